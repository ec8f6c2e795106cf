"""Rollouts and learning decoupled: who may collect what, with which weights, and what happens when a process dies.

    ledger     counts, leases and batches; pure
    slots      fragments in a mapped file that outlives every process: hand-over and journal
    worker     the rollout role, one decision at a time; also as a process
    server     one policy that decides for many workers
    lanes      whole episodes of groups, each env on its own
    batches    finished fragments become batches, in place before the last of them is finished; staging: their memory
    recovery   what a learner that died left in the slots
    feed       what the learner sees: the next batch, publish, commit
    local      a feed with every role in this process, in a seeded order
    crewed     a feed whose crew runs elsewhere: processes (this machine) or ray_crew (a cluster)
    weights    versioned weights between processes of one host; deltas: lossless updates over a link
    snapshot   a collector's state on disk, and who is at work in a run folder
    sharded    FSDP2 shards of a learner
    virtual    the ledger under a virtual clock
"""
