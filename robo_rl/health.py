"""Healthy ranges of an on-policy run's numbers, and who watches them while it runs.

A `Watch` looks at the metrics of every update. A number outside its range for `PATIENCE` updates in a row, or
once beyond its alarm, is a *finding*: it is told at once, once, and ends after as many updates inside. Of the
findings of one metric the first is told, then the 2nd, 4th, 8th and so on, with their count. The first and
the newest ones lie in RUN/health.json with the ranges they were judged by; `robo_rl report` shows the newest
of each metric.

The ranges: PPO's surrogate is a bound for small steps only; its authors steer KL to 0.003 to 0.03 (Schulman
et al. 2017, section 4). That of a whole chain adds up its steps: runs here learn at 0.02 to 0.9 with an
effective sample size of 0.2 to 0.9, and one at a KL of 9 and 0.001 of its samples lost all that it knew.
Beyond the alarms nothing is left of what an update rests on.
"""

import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from robo_rl.files import read_json, write_json
from robo_rl.options import MethodOptions, NftOptions, OnPolicyOptions, PolicyOptions

FILE = "health.json"
PATIENCE = 3  # updates in a row
FEW = 100  # episodes
KEPT = 20  # findings of a metric
# watched in every run, though its log need not have them
COUNTED = ("returns", "failures", "success_kept", "same_return", "not_finite")


@dataclass(frozen=True, slots=True)
class Range:
    """Healthy values of a metric: [low, high]; a single value beyond `alarm` on the unhealthy side is told at
    once."""

    metric: str
    title: str
    low: float = -math.inf
    high: float = math.inf
    alarm: float | None = None
    meaning: str = ""

    def outside(self, value: float) -> bool:
        return not self.low <= value <= self.high  # nan is outside

    def alarming(self, value: float) -> bool:
        if math.isnan(value) or self.alarm is None:
            return math.isnan(value)
        return self.outside(value) and (value >= self.alarm if value > self.high else value <= self.alarm)

    @property
    def text(self) -> str:
        """The range in words."""
        if math.isinf(self.high):
            return f"at least {self.low:g}"
        return f"at most {self.high:g}" if math.isinf(self.low) else f"{self.low:g} to {self.high:g}"


SMALLER = "lower --rl.lr or --rl.epochs, or set --rl.trust-kl"
BOUNDED = "lower --rl.trust-kl"  # where there is one, these follow it
HELD = "lower --rl.lr or --rl.epochs, or raise --rl.kl-coef"  # without a likelihood there is no KL to bound
RATIO = (
    Range("kl", "KL", high=1.0, alarm=5.0, meaning=f"the policy moves too far in an update: {SMALLER}"),
    Range("clip_fraction", "clip fraction", high=0.6, meaning=f"most samples no longer push: {SMALLER}"),
    Range(
        "ess",
        "effective sample size",
        low=0.1,
        alarm=0.01,
        meaning=f"few samples carry the last epoch's gradient: {SMALLER}",
    ),
    Range(
        "ess_frac",
        "effective sample size of stale data",
        low=0.1,
        alarm=0.01,
        meaning="older weights acted too differently: --max-staleness 0, or smaller updates",
    ),
    Range(
        "is_rejected",
        "stale samples dropped or truncated",
        high=0.5,
        meaning="older weights acted too differently: --max-staleness 0, or smaller updates",
    ),
    Range(
        "replayed_ess_frac",
        "effective sample size of replayed data",
        low=0.1,
        meaning="what was played earlier hardly counts any more: lower --rl.replay-age or --rl.replay",
    ),
    Range(
        "candidates/rank",
        "rank correlation of candidates and the same played again",
        low=0.6,
        meaning="the cheaper policy does not tell which noise does well: raise --rl.candidates-steps, use "
        "--rl.candidates-by bf16, or leave out --rl.candidates",
    ),
    Range(
        "first_log_ratio",
        "first log ratio",
        high=1e-2,
        alarm=1e-1,
        meaning="the stored log-probs are not those of the weights that acted: an error, please report it",
    ),
    Range(
        "refused",
        "refused minibatches",
        high=0.0,
        alarm=0.0,
        meaning=f"log ratios that are not finite or beyond 20: {SMALLER}",
    ),
)
STEPS = (
    Range(
        "skipped_updates",
        "steps not taken",
        high=0.0,
        alarm=0.0,
        meaning="a gradient was not finite: lower --rl.lr",
    ),
    Range(
        "skipped_critic",
        "critic steps not taken",
        high=0.0,
        alarm=0.0,
        meaning="a value or a return was not finite: lower --rl.critic-lr, look at the rewards",
    ),
    Range(
        "explained_variance",
        "explained variance of the critic",
        low=-0.5,
        meaning="the critic is worse than a constant: lower --rl.critic-lr",
    ),
)
FINITE = (
    Range(
        "not_finite",
        "number of losses and norms that are not finite",
        high=0.0,
        alarm=0.0,
        meaning="nothing is learnt from such an update: lower the learning rate, look at the rewards and at "
        "the method's loss",
    ),
)
NFT = (
    Range(
        "drift",
        "squared distance to the supervised velocity",
        high=1.0,
        alarm=10.0,
        meaning="the velocity has left what supervision taught it: lower --rl.lr, raise --rl.kl-coef",
    ),
)
FLOOR = (
    Range(
        "returns",
        "returns to the best checkpoint",
        high=0.0,
        alarm=1.0,
        meaning=f"success fell below that of the policy that RL began with, on the same starts: {SMALLER}",
    ),
)
SUCCESS = (
    Range(
        "failures",
        "episodes in a row without a success",
        high=FEW,
        meaning="a sparse reward teaches nothing without one: more --demos or --bc.updates, or a dense "
        "reward",
    ),
    Range(
        "success_kept",
        "success over the best of before",
        low=0.5,
        meaning=f"training undoes what was known: {SMALLER}",
    ),
)
UNPAID = (
    Range(
        "same_return",
        "episodes from the first on with one return",
        high=FEW,
        meaning="a reward that never differs teaches nothing: let the env pay for coming closer, or show "
        "successes first (--demos 20 of the env's expert, or --demos FOLDER)",
    ),
)


def ranges(options: MethodOptions, policy: PolicyOptions, action: int, sparse: bool) -> tuple[Range, ...]:
    """What is watched of a method on a policy with `action` axes; successes where the reward is `sparse`,
    else whether any episode is paid otherwise than the first.

    Of a log-prob that is a mean over n executed entries KL is about 1/n^2 of that of the density, and so is
    its range. Where KL is bounded (rl.trust_kl) it is the true one per entry, and near its target.
    The first log ratio is 0 for stale data too only where the present weights are the anchor.
    """
    own = NFT if isinstance(options, NftOptions) else RATIO
    bound = options.trust_kl if isinstance(options, OnPolicyOptions) else 0.0
    if bound:
        own = tuple(trusted(bound) if r.metric == "kl" else r for r in own)
    elif policy.logp_reduction == "mean":
        n2 = (policy.execute * action) ** 2
        own = tuple(
            replace(r, high=r.high / n2, alarm=(r.alarm or 0) / n2) if r.metric == "kl" else r for r in own
        )
    if isinstance(options, OnPolicyOptions) and options.proximal != "recompute":
        own = tuple(r for r in own if r.metric != "first_log_ratio")
    found = own + STEPS + FINITE + FLOOR + (SUCCESS if sparse else UNPAID)
    known = isinstance(options, OnPolicyOptions)
    helps = (
        BOUNDED
        if bound
        else HELD
        if isinstance(options, NftOptions)
        else SMALLER
        if known
        else "lower --rl.lr"
    )
    return tuple(replace(r, meaning=named(r.meaning.replace(SMALLER, helps), options)) for r in found)


def named(text: str, options: MethodOptions) -> str:
    """`text` that names learning rates by options only where a method, one of the user's own, has them."""
    for name, word in (("lr", "the learning rate"), ("critic_lr", "the critic's learning rate")):
        if not hasattr(options, name):
            text = re.sub(rf"--rl\.{name.replace('_', '-')}\b", word, text)
    return text


def trusted(target: float) -> Range:
    """The range of KL per executed entry where an update is to have `target`."""
    return Range(
        "kl",
        "KL per executed entry",
        high=2 * target,
        meaning="updates are larger than --rl.trust-kl: an error, please report it",
    )


def not_finite(metrics: dict[str, float]) -> dict[str, float]:
    """How many of the losses and norms of an update are nan or infinite, of a method that does not count the
    steps it skips, as one of the user's own."""
    if {"skipped_updates", "skipped_critic"} & metrics.keys():
        return {}
    own = [v for name, v in metrics.items() if "loss" in name or "norm" in name]
    return {"not_finite": float(sum(not math.isfinite(v) for v in own))}


@dataclass(slots=True)
class Finding:
    """A metric that left its range at step `begin` [control steps] and, if `end` >= 0, came back; its `worst`
    value."""

    metric: str
    title: str
    healthy: str
    meaning: str
    begin: int
    worst: float | None
    at: int
    end: int = -1
    number: int = 1  # of the metric's findings, from 1

    @property
    def text(self) -> str:
        """One sentence."""
        worst = "not a number" if self.worst is None else f"{self.worst:.3g}"
        until = "" if self.end < 0 else f", until step {self.end:,}"
        return (
            f"{self.title} is out of its healthy range ({self.healthy}) from step {self.begin:,}{until}: "
            f"{worst} at step {self.at:,}; {self.meaning}"
        )


@dataclass(slots=True)
class Watch:
    """Judges the metrics of every update; `folder` None keeps findings in memory."""

    ranges: tuple[Range, ...]
    folder: "Path | None" = None
    findings: list[Finding] = field(default_factory=list)
    outside: dict[str, int] = field(default_factory=dict)  # updates in a row
    inside: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    recent: list[tuple[int, float]] = field(default_factory=list)  # episodes of an update and their success
    best: float = 0.0
    paid: float | None = None  # the return of every episode so far; nan: they differ
    alike: int = 0  # episodes

    def begin(self, step: int) -> None:
        """Take up what the folder holds of steps up to `step`, the step of a checkpoint; later findings are
        made again."""
        self.paid = math.nan if step else None  # episodes of before are not known
        if self.folder is not None and (self.folder / FILE).exists():
            known = [Finding(**f) for f in read_json(self.folder / FILE)["findings"]]
            self.findings = [f for f in known if f.begin <= step]
            for f in self.findings:
                f.end = -1 if f.end > step else f.end
        self.write()

    def look(self, step: int, metrics: dict[str, float]) -> list[str]:
        """Judge the metrics of an update that ended at control step `step` -> what is new, a sentence
        each."""
        values = metrics | self.successes(metrics) | self.same_return(metrics) | not_finite(metrics)
        # trained on as if it were fresh
        stale = values.get("staleness_max", 0) > 0 and "ess_frac" not in values
        told, changed = [], False
        for r in self.ranges:
            if r.metric not in values or r.metric == "first_log_ratio" and stale:
                continue
            value = float(values[r.metric])
            bad = r.outside(value)
            self.outside[r.metric] = self.outside.get(r.metric, 0) + 1 if bad else 0
            self.inside[r.metric] = 0 if bad else self.inside.get(r.metric, 0) + 1
            known = next((f for f in self.findings if f.metric == r.metric and f.end < 0), None)
            if known is not None:
                changed |= self.follow(known, r, step, value)
            elif bad and (r.alarming(value) or self.outside[r.metric] >= PATIENCE):
                before = [f for f in self.findings if f.metric == r.metric]
                count = _count(before) + 1
                f = Finding(r.metric, r.title, r.text, r.meaning, step, _number(value), step, number=count)
                self.findings.append(f)
                if len(before) >= KEPT:
                    self.findings.remove(before[1])
                if count & (count - 1) == 0:  # a power of two
                    told.append(f.text + (f"; so far {count} times" if count > 1 else ""))
                changed = True
        if changed:
            self.write()
        return told

    def follow(self, known: Finding, r: Range, step: int, value: float) -> bool:
        """Go on with a finding: a worse value, or its end -> whether it changed."""
        if self.inside[r.metric] >= PATIENCE:
            known.end = step
            return True
        worse = r.outside(value) and (
            math.isnan(value)
            or known.worst is not None
            and (value > known.worst if value > r.high else value < known.worst)
        )
        if worse:
            known.worst, known.at = _number(value), step
        return worse

    def successes(self, metrics: dict[str, float]) -> dict[str, float]:
        """Episodes in a row without a success; the last updates' mean success over the best such mean so
        far."""
        episodes, rate = int(metrics.get("episodes", 0)), metrics.get("success")
        if rate is None or not episodes:
            return {}
        self.failures = self.failures + episodes if rate == 0 else 0
        self.recent = [*self.recent, (episodes, rate)][-PATIENCE:]
        out = {"failures": float(self.failures)}
        total = sum(n for n, _ in self.recent)
        if len(self.recent) == PATIENCE and total >= FEW:  # of fewer the mean is mostly chance
            mean = sum(n * r for n, r in self.recent) / total
            self.best = max(self.best, mean)
            if self.best >= 0.1:
                out["success_kept"] = mean / self.best
        return out

    def same_return(self, metrics: dict[str, float]) -> dict[str, float]:
        """Episodes from the first on whose mean return, update for update, is one number; 0 once it was
        not."""
        paid = metrics.get("return")
        if paid is None or not metrics.get("episodes"):
            return {}
        self.paid = paid if self.paid is None else self.paid
        self.paid = self.paid if abs(paid - self.paid) <= 1e-6 * max(1.0, abs(paid)) else math.nan
        self.alike = 0 if math.isnan(self.paid) else self.alike + int(metrics["episodes"])
        return {"same_return": float(self.alike)}

    def write(self) -> None:
        if self.folder is not None:
            write_json(
                self.folder / FILE,
                {
                    "ranges": [
                        {"metric": r.metric, "title": r.title, "healthy": r.text} for r in self.ranges
                    ],
                    "findings": [asdict(f) for f in self.findings],
                },
            )


def read(folder: Path) -> "tuple[list[dict], list[Finding]]":
    """(ranges, findings) of a run folder; nothing where it was not watched or the file is damaged."""
    if not (folder / FILE).exists():
        return [], []
    had = read_json(folder / FILE)
    return had["ranges"], [Finding(**f) for f in had["findings"]]


def newest_findings(findings: list[Finding]) -> list[str]:
    """A sentence for each metric: its newest finding, and how many came before."""
    newest = {f.metric: f for f in findings}
    counts = {m: _count([f for f in findings if f.metric == m]) for m in newest}
    return [f.text + (f"; {counts[m]} times in all" if counts[m] > 1 else "") for m, f in newest.items()]


def _count(findings: list[Finding]) -> int:
    """How many there were of one metric; those that earlier versions kept have no numbers."""
    return max(findings[-1].number, len(findings)) if findings else 0


def _number(x: float) -> "float | None":
    return x if math.isfinite(x) else None
