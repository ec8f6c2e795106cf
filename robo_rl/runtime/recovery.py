"""Recover the fragments that a learner that died left in the rollout buffer."""

from collections.abc import Callable

from robo_rl.runtime import ledger as led
from robo_rl.runtime.ledger import Fragment, Ledger
from robo_rl.runtime.rollout_buffer import EMPTY, LEASED, SEALED, TAKEN, RolloutBuffer


def checkpoint_state(ledger: Ledger) -> dict:
    """The part of a checkpoint about rollouts that is not in the rollout buffer."""
    waiting = sorted(
        f.uid for f in ledger.fragments.values() if f.state != led.TAKEN or f.batch >= ledger.next_batch
    )
    return {
        "version": ledger.version,
        "next_batch": ledger.next_batch,
        "taken": ledger.taken,
        "next_uid": ledger.next_uid,
        "waiting": waiting,
    }


def recover_fragments(
    buffer: RolloutBuffer, ledger: Ledger, state: dict, envs_of: Callable[[int], int], streams: bool
) -> None:
    """Take over the fragments in the rollout buffer, but for what the checkpoint `state` covers and what a
    power cut tore.

    envs_of: worker -> envs of its fragments. What a stream took since the checkpoint is simply there again:
    it has an order of its own.
    """
    head, found, waiting = buffer.head, [], state.get("waiting")
    for slot in range(buffer.count):
        kind, worker, rows, uid, granted = (
            int(head[k][slot]) for k in ("state", "worker", "rows", "uid", "granted")
        )
        if (
            kind not in (LEASED, SEALED, TAKEN)
            or waiting is not None
            and uid < state["next_uid"]
            and uid not in waiting
        ):
            continue  # the last: spent, though a power cut brought back an older header
        if kind == LEASED:
            if worker not in ledger.shares or not (0 <= rows <= buffer.decisions and granted > 0):
                continue  # begun by one that has left since, or torn
            if not 0 <= int(head["members"][slot]) <= buffer.columns(slot, worker)["done"].shape[1]:
                continue
            head["rows"][slot] = rows = buffer.sound(slot, worker, rows)
        elif worker < 0 or not buffer.is_sealed_whole(slot, worker):
            continue
        taken = led.READY if streams and int(head["batch"][slot]) >= state["next_batch"] else led.TAKEN
        found.append(
            Fragment(
                uid,
                slot,
                worker,
                granted,
                int(head["members"][slot]) or envs_of(worker),
                int(head["due"][slot]),
                {LEASED: led.LEASED, SEALED: led.READY, TAKEN: taken}[kind],
                int(head["attempt"][slot]),
                int(head["made"][slot]),
                rows,
                int(head["oldest"][slot]),
                int(head["batch"][slot]),
                int(head["start"][slot]),
            )
        )
    found = list({f.uid: f for f in found}.values())
    for slot in ledger.recover(
        found, state["version"], state["next_batch"], state["taken"], state["next_uid"]
    ):
        head["state"][slot] = EMPTY
    for f in ledger.finished.values():
        head["state"][f.slot] = SEALED  # also what is left of a torn batch, or of a stream
