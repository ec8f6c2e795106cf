"""A person in the loop: who acts, why, how it is recorded, and how it is learned from.

`intervene` puts a person between policy and env; `operators` and `devices` are that person; `detect` says which robot
fails; `protocols` shares failed robots among few people; `lessons` turns recorded corrections into what is learned.
"""
