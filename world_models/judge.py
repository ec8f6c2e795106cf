"""Who decides that a step in a model succeeded: the model's head, a classifier, or a vision-language model behind HTTP.

A judge answers with probabilities of success; above one half counts. What it is worth is measured, not believed:
`confusion` asks it about held-out recorded steps whose outcome is known.

HTTP: POST {"items": [{"task": str, "state": [S numbers], "images": {view: PNG in base64}}, ...]} at most `batch` at a time,
answered by {"scores": [probability, ...]} in that order. Answers are kept by the content of their item.
"""

import base64
import hashlib
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from robo_rl import files
from robo_rl.errors import UserError, in_range
from robo_rl.optim import AdamW
from world_models.latent import MlpEnsemble
from world_models.learning import read
from world_models.options import JudgeConfig
from world_models.recorded import Recorded, check


@dataclass(frozen=True, slots=True)
class Seen:
    """n steps to judge: the observations before and after them, the instructions str[n], the actions [n,A] and the
    model's own probability of success [n]."""

    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]
    task: np.ndarray
    action: np.ndarray
    chance: np.ndarray


class SuccessJudge(Protocol):
    """Probability of success [n]; asked every `every` steps of an episode and at its time limit."""

    @property
    def every(self) -> int: ...

    def __call__(self, seen: Seen) -> np.ndarray: ...


@dataclass(frozen=True)
class Head:
    """The model's own head."""

    every: int = 1

    def __call__(self, seen: Seen) -> np.ndarray:
        return seen.chance


# ---- a classifier of recorded steps ------------------------------------------------------------------------------

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
    """A small network on (state, state^2, pooled images) after a step and its action, learnt apart from any model."""

    every = 1

    def __init__(self, state: int, action: int, views: tuple[str, ...], options: ClassifierOptions, seed: int = 0):
        self.sizes, self.views, self.options = (state, action), views, options
        inputs = 2 * state + action + len(views) * 3 * POOL * POOL
        self.net = MlpEnsemble(1, inputs, options.hidden, 2, 1, torch.Generator().manual_seed(seed))
        self.mean, self.std, self.bar = torch.zeros(state), torch.ones(state), torch.tensor(0.0)

    def features(self, obs: Mapping[str, np.ndarray], action: np.ndarray) -> torch.Tensor:
        z = (torch.as_tensor(np.asarray(obs["state"]), dtype=torch.float32) - self.mean) / self.std
        parts = [z, z.square().clamp(max=25), torch.as_tensor(action, dtype=torch.float32)]
        for view in self.views:
            x = torch.from_numpy(np.ascontiguousarray(obs[f"image/{view}"])).permute(0, 3, 1, 2).float() / 255 - 0.5
            parts.append(F.adaptive_avg_pool2d(x, POOL).flatten(1))
        return torch.cat(parts, 1)

    @torch.no_grad()
    def __call__(self, seen: Seen) -> np.ndarray:
        return torch.sigmoid(self.net(self.features(seen.after, seen.action))[0, :, 0] - self.bar).numpy()

    def fit(self, data: Recorded, seed: int = 0) -> None:
        """Learn which recorded steps succeeded, from what was observed after them (`Recorded.extended`); the bar lets
        `false_alarms` of the held-out failing steps pass.
        """
        o, episode = self.options, np.repeat(np.arange(len(data)), data.lengths)
        won = np.isin(np.arange(len(episode)), data.end[data.success] - 1)
        held = data.held[episode]
        if won[~held].sum() < 5 or won[held].sum() < 1:
            raise UserError(f"a classifier needs at least 5 successes to learn from and 1 held out, got {won[~held].sum()} and "
                            f"{won[held].sum()}; record more: robo_rl collect --policy expert")
        state = torch.from_numpy(data.state)
        self.mean, self.std = state.mean(0), state.std(0).clamp(min=1e-3)
        after, steps = data.extended()
        obs = {"state": after.state[steps + 1]} | {f"image/{v}": after.images[v][steps + 1] for v in self.views}
        x, y = self.features(obs, data.action), torch.from_numpy(won.astype(np.float32))
        generator, opt = torch.Generator().manual_seed(seed), AdamW(self.net.parameters(), o.lr, weight_decay=1e-2, fused=False)
        yes, no = (torch.from_numpy(np.flatnonzero(m & ~held)) for m in (won, ~won))
        for update in range(o.updates):
            opt.param_groups[0]["lr"] = o.lr * (1 - update / o.updates)
            rows = torch.cat([p[torch.randint(0, len(p), (o.batch // 2,), generator=generator)] for p in (yes, no)])
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
        files.write_bytes(Path(folder) / "judge.safetensors", save({k: v.contiguous() for k, v in tensors.items()}))
        files.write_json(Path(folder) / "judge.json", {"format": FORMAT, "sizes": self.sizes, "views": self.views,
                                                       "options": asdict(self.options)})


def load_classifier(folder: "str | Path") -> Classifier:
    """The classifier of a folder; UserError for one that is missing, damaged or of another version."""
    from safetensors import SafetensorError
    from safetensors.torch import load
    doc = files.read_json(Path(folder) / "judge.json")
    try:
        if doc["format"] != FORMAT:
            raise UserError(f"{folder} holds a judge of format {doc['format']}, this robo_rl reads {FORMAT} (1 looked at "
                            "the moment before success); train it again: robo_rl wm judge DATASET")
        out = Classifier(*doc["sizes"], views=tuple(doc["views"]), options=ClassifierOptions(**doc["options"]))
        tensors = load((Path(folder) / "judge.safetensors").read_bytes())
        out.mean, out.std, out.bar = (tensors.pop(k) for k in ("mean", "std", "bar"))
        out.net.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, TypeError, RuntimeError) as e:
        raise UserError(f"{folder} holds no sound judge ({str(e).splitlines()[0]}); train it again: robo_rl wm judge DATASET") from e
    return out


# ---- a vision-language model behind HTTP -------------------------------------------------------------------------

@dataclass
class Endpoint:
    """A judge at `url`. Owns its cache and its counts; each request has `timeout` seconds and `tries` attempts."""

    url: str
    every: int = 8
    batch: int = 32
    timeout: float = 10.0
    tries: int = 3
    pause: float = 0.2  # seconds before the second attempt; doubled before each further one
    most: int = 100_000  # answers kept
    asked: int = 0
    hits: int = 0
    cache: dict[bytes, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low, high in (("every", 1, 10**6), ("batch", 1, 10**4), ("timeout", 1e-3, 3600), ("tries", 1, 20)):
            in_range(f"judge {name}", getattr(self, name), low, high)

    def __call__(self, seen: Seen) -> np.ndarray:
        keys = [_content(seen, i) for i in range(len(seen.task))]
        new = {k: i for i, k in enumerate(keys) if k not in self.cache}  # equal ones are asked about once
        self.hits += len(keys) - len(new)
        rows, answers = list(new.items()), {}
        for at in range(0, len(rows), self.batch):
            part = rows[at:at + self.batch]
            scores = self.ask([_item(seen, i) for _, i in part])
            answers |= {k: s for (k, _), s in zip(part, scores, strict=True)}
        known = self.cache | answers if answers else self.cache
        out = np.array([known[k] for k in keys], np.float32)
        self.cache |= answers
        for k in list(self.cache)[:max(0, len(self.cache) - self.most)]:  # the oldest go
            del self.cache[k]
        return out

    def ask(self, items: list[dict]) -> list[float]:
        """Scores of items; UserError after the last attempt, or for an answer that is none."""
        body, why = json.dumps({"items": items}).encode(), ""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            self.asked += 1
            try:
                request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                    text, end = b"", time.monotonic() + self.timeout
                    while part := answer.read1(1 << 16):  # bytes that drip in would else be waited for one by one
                        text += part
                        if len(text) > 10_000_000 or time.monotonic() > end:
                            raise TimeoutError("its answer does not end")
                return _scores(text, len(items), self.url)
            except urllib.error.HTTPError as e:
                why = f"status {e.code}"
                if e.code < 500 and e.code != 429:
                    break
            except (OSError, TimeoutError) as e:
                why = str(getattr(e, "reason", e)) or type(e).__name__
        raise UserError(f"the judge at {self.url} does not answer ({why}; {attempt + 1} attempts of {self.timeout:g} s); start it, "
                        "or use --judge head or the folder of a classifier")


def _scores(text: bytes, n: int, url: str) -> list[float]:
    try:
        scores = [float(s) for s in files.parse_json(text, "its answer", limit=10_000_000)["scores"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"the judge at {url} must answer {{\"scores\": [...]}}, got {text[:80]!r}") from None
    if len(scores) != n or not all(0 <= s <= 1 for s in scores):
        raise UserError(f"the judge at {url} must answer {n} numbers in [0, 1], got {len(scores)}: {scores[:4]}")
    return scores


def _content(seen: Seen, i: int) -> bytes:
    h = hashlib.blake2b(str(seen.task[i]).encode(), digest_size=16)
    for k in sorted(seen.after):
        h.update(k.encode() + np.ascontiguousarray(seen.after[k][i]).tobytes())
    return h.digest()


def _item(seen: Seen, i: int) -> dict:
    images = {k[6:]: _png(v[i]) for k, v in seen.after.items() if k.startswith("image/")}
    return {"task": str(seen.task[i]), "state": [round(float(x), 6) for x in seen.after["state"][i]], "images": images}


def _png(image: np.ndarray) -> str:
    from PIL import Image
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


# ---- what a judge is worth ---------------------------------------------------------------------------------------

def confusion(judge: SuccessJudge, data: Recorded, most: int = 200, seed: int = 0) -> dict[str, float]:
    """Ask about held-out recorded steps: all successes and as many failing steps, at most `most` of each.

    Returns the counts `true_positive`, `false_negative`, `false_positive`, `true_negative`, and `disagreement`: the mean
    of the two rates of error (0: always right, 0.5: as good as a coin), nan without a held-out success. The observation
    after an episode's last step is the one before it where the recording has no other (old data sets).
    """
    episode = np.repeat(np.arange(len(data)), data.lengths)
    held, n = data.held[episode], len(episode)
    won = np.isin(np.arange(n), data.end[data.success] - 1)
    rng = np.random.default_rng([seed, 23])
    yes, no = (rng.permutation(np.flatnonzero(held & m))[:most] for m in (won, ~won))
    no = no[:max(len(yes), 1)]
    rows = np.concatenate([yes, no])
    whole, steps = data.extended()

    def obs(at: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": whole.state[at]} | {f"image/{v}": x[at] for v, x in whole.images.items()}
    said = judge(Seen(obs(steps[rows]), obs(steps[rows] + 1), np.array(data.tasks)[data.task[episode[rows]]], data.action[rows],
                      np.zeros(len(rows), np.float32))) > 0.5
    hit, alarm = int(said[:len(yes)].sum()), int(said[len(yes):].sum())
    rates = [(len(yes) - hit) / len(yes) if len(yes) else np.nan, alarm / len(no) if len(no) else np.nan]
    return {"true_positive": hit, "false_negative": len(yes) - hit, "false_positive": alarm,
            "true_negative": len(no) - alarm, "disagreement": float(np.mean(rates))}


def make(name: str) -> SuccessJudge:
    """The judge of `--judge`: head, an http(s) address (with options behind #: every=8,timeout=10), or a folder."""
    if name in ("", "head"):
        return Head()
    if name.startswith(("http://", "https://")):
        url, _, words = name.partition("#")
        kinds = {"every": int, "batch": int, "tries": int, "timeout": float}
        try:
            given = dict(w.split("=") for w in words.split(",") if w)
            options = {k: kinds[k](v) for k, v in given.items()}
        except (ValueError, KeyError):
            raise UserError(f"judge options after # are {', '.join(f'{k}=…' for k in kinds)} with commas between, got "
                            f"{words!r}") from None
        return Endpoint(url, **options)
    if (Path(name) / "judge.json").is_file():
        return load_classifier(name)
    raise UserError(f"--judge {name!r} is neither head, an http address, nor the folder of a classifier (robo_rl wm judge)")


def measure_judge(config: JudgeConfig) -> dict:
    """Train a classifier of success and save it, or take the judge `config.check`; ask it about held-out recorded steps.

    Returns {judge: its folder or address, seconds, options} and what `confusion` counts. UserError: data that nothing can
    be learnt from, a folder that holds a judge.
    """
    torch.set_num_threads(1)
    if config.check == "head":
        raise UserError("the head is part of a model: robo_rl wm eval MODEL DATASET says what it is worth")
    data, began = read(config.data, images=True), time.monotonic()
    check(data, " ".join(config.data))
    where = config.check
    if where:
        judge = make(where)
    else:
        where = config.out or f"runs/judge-{data.control.task}".replace(":", "-")
        if (Path(where) / "judge.json").exists():
            raise UserError(f"{where} already holds a judge; choose another --out")
        options = ClassifierOptions(updates=config.updates, false_alarms=config.false_alarms)
        judge = Classifier(data.state.shape[1], data.action.shape[1], tuple(sorted(data.images)), options, config.seed)
        judge.fit(data, config.seed)
        judge.save(where)
    found = confusion(judge, data, seed=config.seed)
    return {"judge": where, "seconds": time.monotonic() - began, "options": asdict(config)} | found
