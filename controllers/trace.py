"""A log that shows when it was changed: every event carries the hash of the one before it.

One JSON object per line: {"i", "t" [s], "kind", "data", "prev", "hash"}, where hash = sha256 of prev and the
other fields. A changed, lost or reordered event breaks the chain at its place; cutting the end off does not,
so keep the last hash elsewhere if that matters. Numbers that are not finite are written as strings.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from robo_rl.files import parse_json

GENESIS = "0" * 64


def plain(x: Any) -> Any:
    """x in what JSON can hold; float() gives NaN and infinities back from their names."""
    if isinstance(x, float):
        return x if math.isfinite(x) else str(x)
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(v) for v in x]
    if x is None or isinstance(x, (str, int, bool)):
        return x
    return plain(x.tolist()) if hasattr(x, "tolist") else repr(x)


def digest(event: dict) -> str:
    """sha256 over everything but the hash itself."""
    body = {k: v for k, v in event.items() if k != "hash"}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Trace:
    """Events in memory, and in a file where one is given."""

    def __init__(self, path: "str | Path | None" = None):
        self.events: list[dict] = []
        self.last, self.count = GENESIS, 0
        self.file: TextIO | None = None
        if path:
            self.file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115, closed by `close`

    def add(self, kind: str, t: float, data: dict) -> None:
        event = {"i": self.count, "t": plain(float(t)), "kind": kind, "data": plain(data), "prev": self.last}
        event["hash"] = self.last = digest(event)
        self.count += 1
        self.events.append(event)
        if self.file:
            self.file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def close(self) -> None:
        if self.file:
            self.file.close()
            self.file = None


def read(path: "str | Path") -> list[dict]:
    """Events of a file, as they stand; `first_broken` tells whether they can be trusted."""
    out = []
    for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines()):
        out.append(parse_json(line, f"{path}: line {i + 1}", limit=1 << 20))
    return out


def first_broken(events: Iterable[dict]) -> int | None:
    """Index of the first event whose place or content is not what was written; None: the chain holds."""
    prev = GENESIS
    for i, event in enumerate(events):
        if event.get("i") != i or event.get("prev") != prev or event.get("hash") != digest(event):
            return i
        prev = event["hash"]
    return None
