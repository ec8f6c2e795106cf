"""The table of starts in force, from the learner to the processes beside it: two files in the folder of what
is in flight.

`starts.table` is replaced as a whole with every table; `starts.states`, the simulator states that its rows
may name, is written once. A reader looks at the table's file when an episode begins, and reads it only where
it is another one than before.
"""

import os
from pathlib import Path

from robo_rl.runtime import snapshot
from robo_rl.starts import StartTable, StoredStates

TABLE, STATES = "starts.table", "starts.states"


def publish_table(folder: Path, table: StartTable) -> None:
    """Replace the table in force."""
    snapshot.save(folder / TABLE, table.columns())


def publish_states(folder: Path, stored: StoredStates | None) -> None:
    """Write the stored states; without any, a file of before is deleted."""
    if stored is None:
        (folder / STATES).unlink(missing_ok=True)
    else:
        snapshot.save(folder / STATES, stored.rows)


class StartFile:
    """A process's source of starts. RuntimeError: there is no sound table, which a learner writes before it
    starts workers."""

    def __init__(self, folder: Path):
        self.path, self.seen = folder / TABLE, (-1, -1)
        rows = snapshot.load(folder / STATES)
        self.stored = StoredStates(rows) if rows else None
        self.table: StartTable | None = None

    def newest(self) -> StartTable:
        """The table in force."""
        found = os.stat(self.path)
        now = (found.st_ino, found.st_mtime_ns)
        if now != self.seen:
            tree = snapshot.load(self.path)
            if tree:
                self.seen, self.table = now, StartTable(**tree)
        if self.table is None:
            raise RuntimeError(f"{self.path} holds no table of starts")
        return self.table
