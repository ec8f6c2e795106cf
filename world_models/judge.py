"""Who decides that a step in a model succeeded: the model's head, a classifier, or a vision-language model
behind HTTP.

A judge answers with probabilities of success; above one half counts. What it is worth is measured, not
believed: `confusion` asks it about held-out recorded steps whose outcome is known.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch.nn import functional as F

from robo_rl import files
from robo_rl.errors import UserError, in_range
from robo_rl.optim import AdamW
from robo_rl.stats import bootstrap_mean, wilson
from world_models import instructions
from world_models.judge_http import ChatJudge, Endpoint
from world_models.judge_protocol import Head, Seen, SuccessJudge, clip_rows
from world_models.latent import MlpEnsemble
from world_models.options import JudgeConfig
from world_models.reading import read
from world_models.recorded import Recorded, check

# ---- a classifier of recorded steps ------------------------------------------------------------------------

FORMAT = 2  # of its folder
POOL = 8  # images are seen as so many means in each direction


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions:
    """What a classifier is and how it is learnt."""

    hidden: int = 64
    updates: int = 1500
    batch: int = 256
    lr: float = 3e-3
    false_alarms: float = 0.01
    """Share of held-out failing steps that may be called a success; the bar is set by it."""

    def __post_init__(self) -> None:
        in_range("false_alarms", self.false_alarms, 0, 1)
        in_range("updates", self.updates, 1, 10**7)


class Classifier:
    """A small network on (state, state^2, pooled images) after a step and its action, learnt apart from any
    model."""

    every = 1

    def __init__(
        self,
        state: int,
        action: int,
        views: tuple[str, ...],
        options: ClassifierOptions,
        seed: int = 0,
        tasks: tuple[str, ...] = (),
    ):
        self.sizes, self.views, self.options, self.tasks = (state, action), views, options, tasks
        self.words = torch.from_numpy(instructions.features(tasks))
        inputs = 2 * state + action + self.words.shape[1] + len(views) * 3 * POOL * POOL
        self.net = MlpEnsemble(1, inputs, options.hidden, 2, 1, torch.Generator().manual_seed(seed))
        self.mean, self.std, self.bar = torch.zeros(state), torch.ones(state), torch.tensor(0.0)

    def features(self, obs: Mapping[str, np.ndarray], action: np.ndarray, task: np.ndarray) -> torch.Tensor:
        z = (torch.as_tensor(np.asarray(obs["state"]), dtype=torch.float32) - self.mean) / self.std
        parts = [z, z.square().clamp(max=25), torch.as_tensor(action, dtype=torch.float32)]
        if self.words.shape[1]:
            parts.append(self.words[torch.from_numpy(instructions.places(self.tasks, task, "the judge"))])
        for view in self.views:
            x = (
                torch.from_numpy(np.ascontiguousarray(obs[f"image/{view}"])).permute(0, 3, 1, 2).float() / 255
                - 0.5
            )
            parts.append(F.adaptive_avg_pool2d(x, POOL).flatten(1))
        return torch.cat(parts, 1)

    @torch.no_grad()
    def __call__(self, seen: Seen) -> np.ndarray:
        return torch.sigmoid(
            self.net(self.features(seen.after, seen.action, seen.task))[0, :, 0] - self.bar
        ).numpy()

    def fit(self, data: Recorded, seed: int = 0) -> None:
        """Learn which recorded steps succeeded, from what was observed after them (`Recorded.extended`); the
        bar lets `false_alarms` of the held-out failing steps pass.
        """
        o, episode = self.options, np.repeat(np.arange(len(data)), data.lengths)
        won = np.isin(np.arange(len(episode)), data.end[data.success] - 1)
        held = data.held[episode]
        if won[~held].sum() < 5 or won[held].sum() < 1:
            raise UserError(
                "a classifier needs at least 5 successes to learn from and 1 held out, got "
                f"{won[~held].sum()} and {won[held].sum()}; record more: robo_rl collect --policy expert"
            )
        state = torch.from_numpy(data.state)
        self.mean, self.std = state.mean(0), state.std(0).clamp(min=1e-3)
        after, steps = data.extended()
        obs = {"state": after.state[steps + 1]} | {
            f"image/{v}": after.images[v][steps + 1] for v in self.views
        }
        x, y = (
            self.features(obs, data.action, np.array(data.tasks)[data.task[episode]]),
            torch.from_numpy(won.astype(np.float32)),
        )
        generator, opt = (
            torch.Generator().manual_seed(seed),
            AdamW(self.net.parameters(), o.lr, weight_decay=1e-2, fused=False),
        )
        yes, no = (torch.from_numpy(np.flatnonzero(m & ~held)) for m in (won, ~won))
        for update in range(o.updates):
            opt.param_groups[0]["lr"] = o.lr * (1 - update / o.updates)
            rows = torch.cat(
                [p[torch.randint(0, len(p), (o.batch // 2,), generator=generator)] for p in (yes, no)]
            )
            loss = F.binary_cross_entropy_with_logits(self.net(x[rows])[0, :, 0], y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            logits = self.net(x[torch.from_numpy(held & ~won)])[0, :, 0]
        self.bar = torch.quantile(logits, 1 - o.false_alarms).clamp(min=0.0)

    def save(self, folder: "str | Path") -> None:
        """Write weights, then judge.json."""
        from safetensors.torch import save

        tensors = dict(self.net.state_dict()) | {"mean": self.mean, "std": self.std, "bar": self.bar}
        files.private_folder(folder)
        files.write_bytes(
            Path(folder) / "judge.safetensors", save({k: v.contiguous() for k, v in tensors.items()})
        )
        files.write_json(
            Path(folder) / "judge.json",
            {
                "format": FORMAT,
                "sizes": self.sizes,
                "views": self.views,
                "tasks": self.tasks,
                "options": asdict(self.options),
            },
        )


def load_classifier(folder: "str | Path") -> Classifier:
    """The classifier of a folder; UserError for one that is missing, damaged or of another version."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    doc = files.read_json(Path(folder) / "judge.json")
    try:
        if doc["format"] != FORMAT:
            raise UserError(
                f"{folder} holds a judge of format {doc['format']}, this robo_rl reads {FORMAT} (1 looked at "
                "the moment before success); train it again: robo_rl wm judge DATASET"
            )
        out = Classifier(
            *doc["sizes"],
            views=tuple(doc["views"]),
            options=ClassifierOptions(**doc["options"]),
            tasks=tuple(doc.get("tasks", ())),
        )
        tensors = load((Path(folder) / "judge.safetensors").read_bytes())
        out.mean, out.std, out.bar = (tensors.pop(k) for k in ("mean", "std", "bar"))
        out.net.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as e:
        raise UserError(
            f"{folder} holds no sound judge ({str(e).splitlines()[0]}); train it again: robo_rl wm judge "
            "DATASET"
        ) from e
    return out


# ---- what a judge is worth ---------------------------------------------------------------------------------


def confusion(judge: SuccessJudge, data: Recorded, most: int = 200, seed: int = 0) -> dict[str, Any]:
    """Ask about held-out recorded steps: all successes and as many failing steps, at most `most` of each.

    Returns the counts `true_positive`, `false_negative`, `false_positive`, `true_negative`, and
    `disagreement`: the mean of the two rates of error (0: always right, 0.5: as good as a coin), nan without
    a held-out success; `tasks`: agreement per instruction with its interval; of a judge with partial credit
    `credit` of both kinds of steps and the share `divided`. The observation after an episode's last step is
    the one before it where the recording has no other (old data sets).
    """
    episode = np.repeat(np.arange(len(data)), data.lengths)
    held, n = data.held[episode], len(episode)
    won = np.isin(np.arange(n), data.end[data.success] - 1)
    rng = np.random.default_rng([seed, 23])
    yes, no = (rng.permutation(np.flatnonzero(held & m))[:most] for m in (won, ~won))
    no = no[: max(len(yes), 1)]
    rows = np.concatenate([yes, no])
    whole, steps = data.extended()

    def obs(at: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": whole.state[at]} | {f"image/{v}": x[at] for v, x in whole.images.items()}

    asks: Any = judge
    frames, clip = getattr(asks, "frames", 1), {}
    if frames > 1:
        at = clip_rows(steps[rows], whole.first[episode[rows]], frames, asks.skip)
        clip = {f"image/{v}": x[at] for v, x in whole.images.items()}
    tasks = np.array(data.tasks)[data.task[episode[rows]]]
    seen = Seen(
        obs(steps[rows]),
        obs(steps[rows] + 1),
        tasks,
        data.action[rows],
        np.zeros(len(rows), np.float32),
        clip,
    )
    votes = asks.votes(seen) if hasattr(judge, "votes") else (judge(seen),)
    said, true = votes[0] > 0.5, np.arange(len(rows)) < len(yes)
    hit, alarm = int(said[true].sum()), int(said[~true].sum())
    rates = [(len(yes) - hit) / len(yes) if len(yes) else np.nan, alarm / len(no) if len(no) else np.nan]
    out = {
        "true_positive": hit,
        "false_negative": len(yes) - hit,
        "false_positive": alarm,
        "true_negative": len(no) - alarm,
        "disagreement": float(np.mean(rates)),
        "tasks": agreement(said == true, tasks),
    }
    if len(votes) > 1:
        credit = {"succeeded": votes[1][true], "did_not": votes[1][~true]}
        out |= {
            "credit": {k: bootstrap_mean(v)._asdict() for k, v in credit.items()},
            "divided": asks.divided / max(asks.judged, 1),
        }
    return out


def agreement(right: np.ndarray, tasks: np.ndarray) -> dict[str, dict]:
    """{instruction: {n, value, low, high}}: share of the steps that a judge was right about, with Wilson's
    interval."""
    return {
        str(t): {"n": int((tasks == t).sum())}
        | wilson(int(right[tasks == t].sum()), int((tasks == t).sum()))._asdict()
        for t in np.unique(tasks)
    }


def make(name: str, option: str = "--judge") -> SuccessJudge:
    """The judge `name` that `option` gives: head, an http(s) address, openai: before one (both with options
    behind #: every=8,timeout=10), or a folder."""
    if name in ("", "head"):
        return Head()
    chat, address = name.startswith("openai:"), name.removeprefix("openai:")
    if address.startswith(("http://", "https://")):
        url, _, words = address.partition("#")
        check_address(url)
        kind = ChatJudge if chat else Endpoint
        kinds = {
            f.name: type(f.default)
            for f in fields(kind)
            if f.name not in ("url", "pause", "most", "judged", "divided")
        }
        try:
            given = dict(w.split("=", 1) for w in words.split(",") if w)
            options: dict[str, Any] = {k: kinds[k](v) for k, v in given.items()}
        except (ValueError, KeyError):
            raise UserError(
                f"judge options after # are {', '.join(f'{k}=…' for k in kinds)} with commas between, got "
                f"{words!r}"
            ) from None
        return kind(url, **options)
    if (Path(name) / "judge.json").is_file():
        return load_classifier(name)
    head = "head, " if option == "--judge" else ""
    raise UserError(
        f"{option} {name!r} is neither {head}an http address (openai:http://… for OpenAI's protocol), nor "
        "the folder of a classifier (robo_rl wm judge)"
    )


def check_address(url: str) -> None:
    """Raise UserError for an address without a host, or with a port that is none."""
    try:
        if urlsplit(url).hostname and urlsplit(url).port != 0 and " " not in url:
            return
        why = ""
    except ValueError as e:
        why = f" ({e})"
    raise UserError(
        f"judge {url!r} is no address{why}; it is http://HOST:PORT/PATH, with a port of 1 to 65535"
    )


def measure_judge(config: JudgeConfig) -> dict:
    """Train a classifier of success and save it, or take the judge `config.check`; ask it about held-out
    recorded steps.

    Returns {judge: its folder or address, seconds, options; of one behind HTTP requests} and what `confusion`
    counts. UserError: data that nothing can be learnt from, a folder that holds a judge.
    """
    torch.set_num_threads(1)
    if config.check == "head":
        raise UserError("the head is part of a model: robo_rl wm eval MODEL DATASET says what it is worth")
    data, began = read(config.data, images=True), time.monotonic()
    check(data, *config.data)
    where = config.check
    if where:
        judge = make(where, "--check")
    else:
        where = config.out or f"runs/judge-{data.control.task}".replace(":", "-")
        if (Path(where) / "judge.json").exists():
            raise UserError(f"{where} already holds a judge; choose another --out")
        options = ClassifierOptions(updates=config.updates, false_alarms=config.false_alarms)
        judge = Classifier(
            data.state.shape[1],
            data.action.shape[1],
            tuple(sorted(data.images)),
            options,
            config.seed,
            data.tasks,
        )
        judge.fit(data, config.seed)
        judge.save(where)
    found = confusion(judge, data, seed=config.seed)
    told = {"judge": where, "seconds": time.monotonic() - began, "options": asdict(config)} | found
    asked = requests_of(judge)
    return told if asked is None else told | {"requests": asked}


def requests_of(judge) -> int | None:
    """Requests that a judge behind HTTP was sent, those counted that were sent again; None for others."""
    return judge.server.asked if isinstance(judge, (Endpoint, ChatJudge)) else None
