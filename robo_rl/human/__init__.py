"""A person in the loop: who acts, why, how it is recorded, and how it is learned from.

`intervention`: an env in which an operator may take over. `operators`, `devices`: scripted operators, and
what a person holds in their hand. `detect`: which robot fails. `protocols`: which operator helps which robot.
`fleet`: N robots with operators beside them. `correction_journal`: frames on the disk before they count.
`training_segments`: which recorded frames a policy learns from.
"""
