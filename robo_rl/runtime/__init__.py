"""Rollouts and learning decoupled: who may collect what, with which weights, and what happens when a process dies.

    ledger    counts, leases and batches; pure
    slots     fragments in a file that outlives every process
    worker    the rollout role, one chunk at a time
    local     all roles in this process, in a seeded order
    processes workers as processes, supervised
    weights   versioned weights between processes
"""
