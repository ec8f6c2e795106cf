"""Rollouts and learning decoupled: who may collect what, with which weights, and what happens when a process
dies.

ledger          counts, leases and batches; pure
rollout_buffer  fragments in a mapped file that outlives every process: hand-over and journal; each has a slot
worker          the rollout role, one decision at a time; also as a process
server          one policy that decides for many workers
episode_slots   whole episodes of groups, each env on its own
batches         finished fragments become batches, in place before the last of them is finished; staging:
                their memory
recovery        fragments that a learner that died left in the rollout buffer
feed            what the learner sees: the next batch, publish, commit
in_process      a feed with every role in this process, in a seeded order
worker_pool     a feed of workers that run elsewhere: process_pool (this machine) or ray_pool (a cluster)
actor           the actor of learning from replay: in this process or in one beside the learner
weights         versioned weights between processes of one host; deltas: lossless updates over a link
snapshot        a collector's state on disk, and who is at work in a run folder
sharded         FSDP2 shards of a learner
virtual         the ledger under a virtual clock
"""
