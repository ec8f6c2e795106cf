"""Measured results: rows in results/*.json, each with what made it, and how old it is against the code that
it measures.

A file is {title, about, rows: […]} and any field of a row that all its rows share. A row: `what` was
measured, `value`, `unit`, `n` (episodes, repeats), `interval` [low, high] and what kind it is
(`interval_is`), `seeds`, `commit` and `date` of the measurement, `machine`, `command`, `files` (paths of the
repository that it measures), `note`; `recorded`: the commit that wrote the row down, where that of the
measurement is not known; `headline`: its place in the README's table, if it has one.
"""

import functools
import math
import shlex
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from robo_rl import files, old_names
from robo_rl.errors import UserError, quoted
from robo_rl.options import OFF_POLICY, OFFLINE, VLAS
from robo_rl.stats import bootstrap_mean

UNKNOWN = "unknown"
WILSON = "95 %, Wilson"
BOOTSTRAP = "95 %, bootstrap over starts"
Measured = tuple[float, float, float]  # value, low, high
COMMON = 0.9  # success at which the control steps that a run took are counted
STEPS = f"control steps of RL until success {COMMON:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One measured figure. ValueError: a field of the wrong kind."""

    what: str
    value: float | str
    unit: str = ""
    n: int | None = None
    interval: tuple[float, float] | None = None
    interval_is: str = WILSON
    seeds: tuple[int, ...] = ()
    commit: str = UNKNOWN
    recorded: str = ""
    date: str = UNKNOWN
    machine: str = UNKNOWN
    command: str = UNKNOWN
    files: tuple[str, ...] = ()
    note: str = ""
    headline: str = ""

    def __post_init__(self) -> None:
        if not self.what or isinstance(self.value, bool) or not isinstance(self.value, (int, float, str)):
            raise ValueError(
                f"a row needs what and a number or text as value, got {self.what!r}: {self.value!r}"
            )
        if self.interval is not None and (len(self.interval) != 2 or self.interval[0] > self.interval[1]):
            raise ValueError(f"interval of {self.what!r} must be (low, high), got {self.interval}")

    @property
    def key(self) -> tuple:
        """Rows with equal keys are measurements of one thing; the later one replaces the earlier one."""
        return self.what, self.seeds, self.command


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The rows of one file of results/, under a title."""

    path: Path
    title: str
    about: str
    rows: tuple[ResultRow, ...]


NAMES = tuple(f.name for f in fields(ResultRow))


def read(path: "str | Path") -> ResultFile:
    """The rows of one file; what all of them share is filled in. UserError: it is damaged or no file of
    results."""
    path = Path(path)
    document = files.read_json(path)
    rows = document.get("rows")
    if not isinstance(rows, list):
        raise UserError(f"{path} has no rows; a file of results is {{title, rows: […]}}")
    shared = {k: document[k] for k in NAMES if k in document}
    return ResultFile(
        path,
        str(document.get("title") or path.stem),
        str(document.get("about", "")),
        tuple(_row(shared | row, path) for row in rows),
    )


def _row(document: dict, path: Path) -> ResultRow:
    known: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in document.items() if k in NAMES
    }
    if known.get("value") is None:  # JSON has no NaN
        known["value"] = "not a number"
    known["note"] = "; ".join(filter(None, (beside(document), known.get("note", ""))))
    try:
        return ResultRow(**known)
    except (TypeError, ValueError) as e:
        raise UserError(f"{path}: {e}") from None


def beside(row: dict) -> str:
    """What a row of `robo_rl bench` says of its limit and its best peer."""
    limit, peer = row.get("limit"), row.get("peer")
    said = (
        [f"{limit['ratio']:.2f} of the limit ({limit['name']})"]
        if isinstance(limit, dict) and limit.get("ratio")
        else []
    )
    if isinstance(peer, dict) and peer.get("ratio"):
        said.append(f"{peer['ratio']:.2f} x {peer['name']}")
    return ", ".join(said)


def read_all(folder: "str | Path" = "results") -> list[ResultFile]:
    """Every file of results in `folder`, by name."""
    return [read(p) for p in sorted(Path(folder).glob("*.json"))]


def add_rows(path: "str | Path", title: str, rows: Iterable[ResultRow]) -> Path:
    """Write `rows` into the file `path`, whole or not at all; a row with the key of an earlier one takes its
    place, in the README too."""
    path = Path(path)
    document: dict[str, Any] = {"title": title}
    old: tuple[ResultRow, ...] = ()
    if path.exists():
        kept = read(path)
        document, old = {"title": kept.title} | ({"about": kept.about} if kept.about else {}), kept.rows
    new = {row.key: row for row in rows}
    merged = [taking_place_of(row, new.pop(row.key, row)) for row in old] + list(new.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, document | {"rows": [as_json(row) for row in merged]})
    return path


def taking_place_of(old: ResultRow, new: ResultRow) -> ResultRow:
    return new if new.headline else replace(new, headline=old.headline)


def as_json(row: ResultRow) -> dict[str, Any]:
    """The fields of a row that say something."""
    out = {k: v for k, v in asdict(row).items() if v not in ("", (), None)}
    if row.interval is None:
        del out["interval_is"]
    return out


# ---- rows of runs and evaluations --------------------------------------------------------------------------


def measured_files(sim: str, algo: str) -> tuple[str, ...]:
    """What of the repository decides the success of a policy that `algo` trains in `sim`."""
    # a user's method is elsewhere
    own = () if ":" in algo or "/" in algo or algo.endswith(".py") else (f"robo_rl/algos/{algo}.py",)
    shared = (
        "experiment/recap"
        if algo in OFFLINE
        else "algos/offpolicy"
        if algo in OFF_POLICY
        else "algos/onpolicy"
    )
    here = {
        "mujoco": "sims/mujoco",
        "mujoco_warp": "sims/mjwarp.py",
        "maniskill": "sims/maniskill",
        "gym": "sims/gym.py",
        "envpool": "sims/envpool.py",
        "wm": "world_models",
        "arm": "controllers",
        "dds": "controllers",
    }.get(sim.split(":")[0])
    return (
        *own,
        f"robo_rl/{shared}.py",
        "robo_rl/algos/bc.py",
        "robo_rl/policies",
        "robo_rl/rollout.py",
        "robo_rl/losses.py",
        "robo_rl/sampling.py",
        "robo_rl/demos.py",
        "robo_rl/experiment/sft.py",
        "robo_rl/experiment/recipes.py",
        "robo_rl/experiment/recipe_table.py",
        *([here] if here else []),
    )


def run_rows(run: "str | Path", name: str = "") -> list[ResultRow]:
    """The final evaluation of a run folder, the one before online RL, and the control steps until success was
    `COMMON`, with the provenance that its run.json has. name: what tells it from runs of the same task and
    method.

    UserError: it is no run folder, or has no final evaluation yet.
    """
    run = Path(run)
    said = files.read_json(run / "run.json")
    config = old_names.options(said["config"]) if isinstance(said.get("config"), dict) else {}
    if missing := [k for k in ("sim", "task", "algo") if k not in config] + [
        k for k in ("seed", "created") if k not in said
    ]:
        raise UserError(
            f"{run / 'run.json'} does not say {', '.join(missing)}: restore it from a copy, or leave it out"
        )
    learnt = "after labelled episodes" if config["algo"] in OFFLINE else "after online RL"
    labels = {"sft": "after supervised learning", "final": learnt, "best": "best checkpoint"}
    found = [label for label in labels if (run / "evals" / f"{label}.json").exists()]
    if not found and config["sim"] == "none" and (run / "heldout.json").is_file():
        return [held_out_row(run, config, said, name)]
    if "final" not in found and not (config["algo"] == "bc" and found):
        raise UserError(
            f"{run} has no final evaluation yet; finish it with: robo_rl train --resume {quoted(run)}"
        )
    what = f"{config['algo']}, {config['sim']} {config['task']}".strip() + (
        ", pictures" if config.get("obs") == "rgb" else ""
    )
    kind = config.get("policy", {}).get("kind")
    what += f", {kind} ({config['policy'].get('size', '')})" if kind in VLAS else ""
    what += f", {name}" if name else ""
    row = partial(ResultRow, **provenance_of(config, said))
    rows = []
    for label in found:
        document = files.read_json(run / "evals" / f"{label}.json")
        rate = sum(document["success"]) / document["n"], *document["wilson"]
        rows.append(
            measured(
                row,
                f"{what}: {{}} {labels[label]}",
                None if document.get("no_success") else rate,
                bootstrap_mean(document["return"]),
                n=document["n"],
                note=f"{document['time']:.0f} s from the start, step {document['step']}",
            )
        )
    looks = [files.read_json(path) for path in sorted((run / "evals").glob("step_*.json"))]
    judged = not any(look.get("no_success") for look in looks)
    if len(looks) > 1 and judged and config["algo"] not in OFFLINE:  # whose steps are those of the data
        first = next((look for look in looks if sum(look["success"]) >= COMMON * look["n"]), None)
        rows.append(
            row(
                what=f"{what}: {STEPS}",
                value=f"more than {looks[-1]['step']:,}" if first is None else first["step"],
                n=looks[0]["n"],
                note=f"{(first or looks[-1])['time']:.0f} s from the start, "
                f"looks every {config.get('eval_every', 0):,} steps",
            )
        )
    return rows


def provenance_of(config: dict, said: dict) -> dict[str, Any]:
    """What a row says of where a run's figures are from; said: its run.json."""
    return {
        "seeds": (said["seed"],),
        "commit": said.get("git") or UNKNOWN,
        "date": said["created"][:10],
        "machine": said.get("machine") or UNKNOWN,
        "command": command_without_out(said.get("argv") or []),
        "files": measured_files(config["sim"], config["algo"]),
    }


def held_out_row(run: Path, config: dict, said: dict, name: str = "") -> ResultRow:
    """The row of a run without an env: the error of its actions on held-out episodes."""
    told = files.read_json(run / "heldout.json")
    ends = None if told.get("low") is None else (told["low"], told["high"])
    return ResultRow(
        what=", ".join(filter(None, (config["algo"], Path(config["demos"]).name, name)))
        + ": error of actions on held-out episodes",
        value=told["error"],
        unit="of that of the mean action",
        n=len(told["episodes"]),
        interval=ends,
        interval_is="95 %, over episodes",
        note=f"update {told['update']}",
        **provenance_of(config, said),
    )


def measured(row: Callable[..., ResultRow], what: str, rate: Measured | None, gain: Measured, **fields):
    """A row of a success rate with its interval; of the mean return where the task knows no success (None).
    `what` has {} where it says which."""
    name, (value, *ends) = ("return", gain) if rate is None else ("success", rate)
    interval = {"unit": "of 1"} if rate is not None else {"interval_is": BOOTSTRAP}
    ends = None if math.isnan(ends[0]) else tuple(ends)  # of one episode
    return row(what=what.format(name), value=value, interval=ends, **interval, **fields)


def command_without_out(argv: Sequence[str]) -> str:
    """The command line of a run, without the place where it wrote; UNKNOWN for a run that a script
    started."""
    if not argv or argv[0] != "train":
        return UNKNOWN
    kept = [
        a
        for i, a in enumerate(argv)
        if a != "--out" and not a.startswith("--out=") and (i == 0 or argv[i - 1] != "--out")
    ]
    return shlex.join(["robo_rl", *kept])


def evaluation_row(
    result: dict, command: str, algo: str, commit: str, date: str, machine: str, policy_commit: str
) -> ResultRow:
    """The row of `robo_rl eval --save`. result: of `evaluate_checkpoint`; policy_commit: of the run that made
    the policy."""
    rate = None if result.get("no_success") else (result["success_rate"], result["low"], result["high"])
    return measured(
        ResultRow,
        f"{algo}, {result['sim']}: {{}} of {result['run']}, {result['checkpoint']}",
        rate,
        tuple(result[f"return_{k}"] for k in ("mean", "low", "high")),
        n=result["n"],
        seeds=(result["seed"],),
        commit=commit or UNKNOWN,
        date=date,
        machine=machine,
        command=command,
        files=measured_files(result["sim"].split("/")[0], algo),
        note=f"list {result['seed']} of starts; trained at commit {policy_commit or UNKNOWN}",
    )


# ---- how old a row is --------------------------------------------------------------------------------------

OLDER, CURRENT, NO_COMMIT, FOREIGN, NO_GIT, NO_FILES = (
    "earlier code",
    "present code",
    "commit unknown",
    "commit not in this history",
    "not checked",
    "names no files",
)


def age(row: ResultRow, repository: "Path | None") -> str:
    """Whether the files that the row names changed after its commit: OLDER, CURRENT, or why that is not
    known."""
    since = row.commit if row.commit != UNKNOWN else row.recorded
    if not since:
        return NO_COMMIT
    if repository is None:
        return NO_GIT
    if not row.files:
        return NO_FILES
    changed = _changed(str(repository), since.rstrip("+"), row.files)
    if row.commit == UNKNOWN and changed != OLDER:
        return NO_COMMIT
    return changed


@functools.cache
def _changed(repository: str, commit: str, paths: Sequence[str]) -> str:
    done = subprocess.run(
        ["git", "-C", repository, "log", "--format=%H", f"{commit}..HEAD", "--", *paths],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        return FOREIGN
    return OLDER if set(done.stdout.split()) - _of_form_alone(repository) else CURRENT


@functools.cache
def _of_form_alone(repository: str) -> frozenset[str]:
    """Commits that changed the form of code and nothing that it does, as `git blame` is told them."""
    path = Path(repository, ".git-blame-ignore-revs")
    if not path.exists():
        return frozenset()
    lines = path.read_text().splitlines()
    return frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def head_of(repository: Path) -> tuple[str, str]:
    """(commit, its date) of what is checked out; ("no commit", "") in a repository without one."""
    done = subprocess.run(
        ["git", "-C", str(repository), "log", "-1", "--format=%h %as"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    commit, _, date = done.stdout.strip().partition(" ")
    return commit or "no commit", date


def repository_of(folder: "str | Path") -> "Path | None":
    """The git repository that holds `folder`; None without git, or outside one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--show-toplevel"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError:
        return None
    return Path(done.stdout.strip()) if done.returncode == 0 else None
