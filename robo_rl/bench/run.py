"""One bench: its rows, what they depend on, and the file that keeps them.

Ours, the limit and the peers take turns in every repeat, so that other load on the machine meets all of them;
a ratio is the median of the ratios within a repeat. Ratios carry over to other machines, absolute figures do
not. `robo_rl.bench.rows` says what a row promises.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from datetime import UTC, datetime
from pathlib import Path

from robo_rl.bench.options import BenchOptions
from robo_rl.bench.rows import Report
from robo_rl.files import cores, write_json
from robo_rl.provenance import git_hash, machine_name, versions
from robo_rl.results import UNKNOWN, read

MODULES = {"async": "asynchronous", "wm": "world_model"}  # of what, where its module is not called the same
MEASURES = {
    "sim": ["sims/mujoco", "sims/gym.py", "sims/maniskill"],
    "policy": ["robo_rl/policies", "robo_rl/sampling.py"],
    "train": ["robo_rl/algos", "robo_rl/rollout.py", "robo_rl/policies"],
    "sync": ["robo_rl/runtime"],
    "async": ["robo_rl/runtime"],
    "control": ["controllers"],
    "bridge": ["controllers"],
    "scale": ["robo_rl/runtime"],
    "wm": ["world_models"],
    "gpu": ["robo_rl/bench/pictures.py", "robo_rl/policies/vla", "robo_rl/algos"],
    "serve": [
        "robo_rl/experiment/batching.py",
        "robo_rl/experiment/openpi.py",
        "controllers/openpi.py",
        "robo_rl/policies/vla",
    ],
    "vla": ["robo_rl/policies/vla", "robo_rl/policies/policy.py"],
}  # beside the bench's own file
UNSEEDED = {"async"}  # the pauses of its slow envs are drawn anew in every run


def run_bench(options: BenchOptions, say: Callable[[str], None] = print) -> dict:
    """Measure the rows of `options.what`; `say` gets the text of each row when it is known -> the document.

    The document: {bench, options, command, seed, commit, date (UTC, at the start), machine, load_after, rows:
    fields of `Row`, skipped: [{what, why}]}; it is written to `options.out` after every row.
    """
    date, before = datetime.now(UTC).isoformat(timespec="seconds"), machine()

    def document(after: float | None = None) -> dict:
        return {
            "bench": options.what,
            "options": asdict(options),
            "command": command_of(options),
            "seed": None if options.what in UNSEEDED else 0,
            "commit": git_hash(),
            "date": date,
            "machine": before,
            "load_after": after,
            "rows": [asdict(r) for r in report.rows],
            "skipped": report.skipped,
        }

    def keep() -> None:
        if options.out:
            write_json(options.out, document())

    report = Report(say, keep)
    say(
        f"{before['cpu']}, {before['cores']} cores, load {before['load']:.1f}"
        + (": the machine is busy, trust the ratios only" if before["load"] > 0.5 else "")
    )
    part = importlib.import_module(f"robo_rl.bench.{MODULES.get(options.what, options.what)}")
    part.measure(options, report)
    after = os.getloadavg()[0]
    say(f"load {after:.1f} after")
    done = document(after)
    if options.out:
        write_json(options.out, done)
    return done


def save(document: dict, folder: str | Path = "results") -> Path:
    """Write the document of `run_bench` as the file of results `folder`/bench-<what>.json
    (`robo_rl.results`), whole or not at all -> its path.

    A row that had a place in the README keeps it. A row has, beyond those of every result, {clock, limit,
    peer, …}. The ratio of a limit or peer
    is 1 where we are equal and has quartiles of its own. UserError: no permission, or the disk is full.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"bench-{document['bench']}.json"
    what = document["bench"]
    old = {row.what: row.headline for row in read(path).rows} if path.exists() else {}
    write_json(
        path,
        {"title": f"robo_rl bench {what}"}
        | document
        | {
            "seeds": [] if document["seed"] is None else [document["seed"]],
            "commit": document["commit"] or UNKNOWN,
            "machine": machine_name(),
            "load": document["machine"]["load"],
            "versions": document["machine"]["versions"],
            "files": measured_files(what),
            "rows": [
                saved_row(row) | ({"headline": place} if (place := old.get(row["what"])) else {})
                for row in document["rows"]
            ],
        },
    )
    return path


def measured_files(what: str) -> list[str]:
    """What of the repository a bench measures, the bench itself included."""
    return [f"robo_rl/bench/{MODULES.get(what, what)}.py", *MEASURES[what]]


def saved_row(row: dict) -> dict:
    """The fields of a `Row` under the names of a results file."""
    limit = {
        "name": row["limit_is"],
        "kind": row["limit_kind"],
        "value": row["limit"],
        "ratio": row["of_limit"],
        "quartiles": row["of_limit_iqr"],
    }
    peer = {
        "name": row["peer_is"],
        "value": row["peer"],
        "ratio": row["over_peer"],
        "quartiles": row["over_peer_iqr"],
    }
    return {
        "what": row["what"],
        "value": row["ours"],
        "unit": row["unit"],
        "n": row["n"],
        "interval": row["ours_iqr"],
        "interval_is": "quartiles",
        "clock": row["clock"],
        "limit": limit,
        "peer": peer if row["peer_is"] else None,
    } | {k: row[k] for k in ("others", "no_peer", "bars", "work", "note")}


def command_of(options: BenchOptions) -> str:
    """The command line that gives these options."""
    words = ["robo_rl", "bench", options.what]
    for f in fields(options):
        value = getattr(options, f.name)
        if f.default is MISSING or value == f.default:
            continue
        name = f.name.replace("_", "-")
        words += (
            [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
        )
    return " ".join(words)


def machine() -> dict:
    """What the figures depend on; a load above 0 means that others were measured too."""
    model = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as f:
            model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "")
    return {"cpu": model, "cores": cores(), "load": os.getloadavg()[0], "versions": versions()}
