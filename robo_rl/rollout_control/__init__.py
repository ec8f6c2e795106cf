"""Where rollouts are spent: which start comes next, where episodes fork, when they stop, what is used again.
Pure functions and small state that a checkpoint carries.

    sampler = …                                     `Sampler`: proposes a table of starts, observes what
                                                    became of the episodes
    control = StartControl(sampler, seed)           the learner's side of it
    Collector(…, starts=control)                    draws from the table that is in force
    control.observe(rollout.ended); control.renew() after every update: the next table
"""

from robo_rl.rollout_control.sampler import Sampler, StartControl, Uniform

__all__ = ["Sampler", "StartControl", "Uniform"]
