"""A run's side of `--share FOLDER`: it gives groups of its episodes there, and learns from those of other
runs (SAPO)."""

import re
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from robo_rl.algos import foreign
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.parallel import allocates, batch, chooses, group_size, staleness
from robo_rl.noise import mix, seed_noise
from robo_rl.options import OnPolicyOptions
from robo_rl.policies.nets import VOCAB
from robo_rl.rollout import Columns, Rollout
from robo_rl.runtime.device import on_device
from robo_rl.runtime.share import SharedGroup, ShareFolder, difference, draws
from robo_rl.types import ControlSpec

GIVEN = 8  # groups of an update that are given, at most
READS = 4  # files that are read for every group that is wanted, at most, and as many more
COUNTS = ("given", "taken", "flat", "unfit", "refused")


def own_groups(config: TrainConfig) -> int:
    """I: groups of an update that the run plays itself."""
    return batch(config) // group_size(config)


def foreign_groups(config: TrainConfig) -> int:
    """J: groups of other runs in an update, at most."""
    return own_groups(config) if config.share_foreign is None else config.share_foreign


def check(config: TrainConfig, env) -> None:
    """Raise UserError for a run that cannot share its episodes."""
    if not config.share:
        if config.share_foreign is not None:
            raise UserError(
                "--share-foreign says how much is taken from other runs: it goes with --share FOLDER"
            )
        return
    o = config.rl
    if config.algo in ("bc", "nft") or not isinstance(o, OnPolicyOptions) or o.advantage in ("gae", "tree"):
        raise UserError(
            "--share gives and takes groups of episodes: it goes with pi_rl, ppo, dppo or reinflow and a "
            "group advantage, for example --rl.advantage grpo"
        )
    if (
        config.periodic
        or config.dream
        or config.learners > 1
        or allocates(config)
        or chooses(config)
        or on_device(env)
        or hasattr(env, "sources")
    ):
        raise UserError(
            "--share goes without --periodic, --dream, --learners, --rl.allocate, --rl.candidates, a person "
            "in training and simulators that compute on a device"
        )
    if o.proximal == "ewma" and staleness(config):
        raise UserError(
            "--share anchors episodes of other runs at the present weights: it goes without --rl.proximal "
            "ewma"
        )
    if foreign_groups(config) > own_groups(config):
        raise UserError(
            f"--share-foreign must be in [0, {own_groups(config)}], the groups that this run plays for an "
            "update (more than half of others' was worse than none of them in SAPO), got "
            f"{config.share_foreign}"
        )
    if Path(config.share).exists() and not Path(config.share).is_dir():
        raise UserError(f"--share {config.share} is a file; name a folder, which is made if it is not there")


def space_of(spec: ControlSpec, policy, task: str, group: int, obs: dict[str, torch.Tensor]) -> dict:
    """What must be equal for runs to learn from each other, as plain JSON; obs {name: [T,N,...]}."""
    return {
        "task": task or spec.task,
        "period": spec.period,
        "state": list(spec.state_names),
        "axes": [[a.name, a.unit, a.low, a.high, a.kind, a.frame] for a in spec.axes],
        "observation": {k: [list(v.shape[2:]), str(v.dtype)[6:]] for k, v in sorted(obs.items())},
        "policy.horizon": policy.options.horizon,
        "policy.execute": policy.options.execute,
        "rl.group": group,
    }


def part_of(folder: Path, prefix: str = "") -> str:
    """The name of a run's own part of a shared folder."""
    where = folder.resolve()
    name = prefix + re.sub(r"[^A-Za-z0-9._-]", "-", where.name).lstrip("._-")[:60]
    return f"{name or 'run'}-{zlib.crc32(f'{prefix}{where}'.encode()):08x}"


def groups_of(r: Rollout, policy, space: dict, chosen: np.ndarray) -> list[SharedGroup]:
    """The groups `chosen` of a rollout of whole episodes."""
    g, out = space["rl.group"], []
    for q in chosen.tolist():
        mine = slice(q * g, (q + 1) * g)
        done = r.done[:, mine].cpu().numpy()
        made = np.cumsum(done, 0) - done == 0
        t = int(np.flatnonzero(done.any(1)).max()) + 1
        obs = {
            k: torch.cat([v[:, mine], r.last_obs[k][None, mine]])[: t + 1].cpu().numpy()
            for k, v in r.obs.items()
        }
        executed = np.where(made, r.executed[:, mine].cpu().numpy(), 0)[:t].astype(np.int64)
        x0 = r.x0[:t, mine].to(policy.action_norm.device)
        start = -1 if r.start is None else int(r.start[0, mine][0])
        out.append(
            SharedGroup(
                space,
                space["task"],
                start,
                obs,
                policy.action_norm.inverse(x0).cpu().numpy().astype(np.float32),
                executed,
                r.outcome[mine].cpu().numpy().astype(np.float32),
            )
        )
    return out


def unfit(g: SharedGroup, space: dict, longest: int) -> str:
    """Why a run of `space` whose episodes have `longest` decisions cannot learn from a group; "" where it
    can."""
    if why := difference(space, g.space):
        return why
    (t, n, h, _), seen = (
        g.actions.shape,
        {k: [list(v.shape[2:]), str(v.dtype)] for k, v in sorted(g.obs.items())},
    )
    tokens = g.obs.get("tokens")
    if seen != space["observation"] or (n, h, g.actions.shape[3]) != (
        space["rl.group"],
        space["policy.horizon"],
        len(space["axes"]),
    ):
        return "its arrays are not of the space that it names"
    if tokens is not None and tokens.dtype == np.int64 and (tokens.min() < 0 or tokens.max() >= VOCAB):
        return "words that there are not"
    if g.executed.max() > space["policy.execute"] or t > longest:
        return f"more than {longest} decisions, or {space['policy.execute']} steps of one"
    return ""


class ExperienceSharing:
    """Gives groups of every update and mixes those of others in; `state_dict` goes into the checkpoint.

    What comes from others follows from the seed, the update and what is in the folder; a group is learnt from
    once.
    """

    def __init__(self, config: TrainConfig, folder: Path, spec: ControlSpec, say: Callable[..., None]):
        self.config, self.spec, self.say = config, spec, say
        self.group, self.own, self.most = group_size(config), own_groups(config), foreign_groups(config)
        self.longest = -(-spec.max_steps // config.policy.execute)
        self.folder = ShareFolder(config.share, part_of(folder), config.share_keep)
        self.update, self.taken = 0, set[str]()
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self.told: set[str] = set()  # of whom something was said
        self.last = {"foreign": 0.0, "decisions": 0.0, "runs": 0.0}
        self.generator = torch.Generator()

    def begin(self, saved: "dict | None") -> None:
        """From now on, or from where the checkpoint with the state `saved` was."""
        if saved:
            self.folder.mine, self.update = saved["run"], int(saved["update"])
            self.taken, self.told = set(saved["taken"]), set(saved["told"])
            self.counts |= {k: int(v) for k, v in saved["counts"].items()}
        self.folder.forget_after(self.update)
        self.say(
            f"shares episodes over {self.folder.root} as {self.folder.mine}: an update has {self.own} groups "
            f"of its own and up to {self.most} of other runs"
        )

    def mix(self, own: Rollout, policy, version: int) -> Rollout:
        """Give of `own`, whole episodes in groups -> `own`, with groups of others behind it where there are
        any."""
        space = space_of(self.spec, policy, self.config.task, self.group, own.obs)
        self.give(own, policy, space)
        parts = self.take(policy, space, version) if self.most else []
        self.update += 1
        if not parts:
            self.last |= {"foreign": 0.0, "decisions": 0.0}
            return own
        r = foreign.side_by_side(own, foreign.foreign_rollout(parts))
        teaching = foreign.decisions_with_advantage(r, self.group)
        mine = len(teaching) - len(parts)
        self.last |= {
            "foreign": len(parts) / len(teaching),
            "decisions": float(teaching[mine:].sum() / max(teaching.sum(), 1)),
        }
        return r

    def give(self, own: Rollout, policy, space: dict) -> None:
        """Write some groups that are not flat, drawn evenly; where that fails the run goes on."""
        outcome = own.outcome.view(-1, self.group)
        whole = own.done.any(0).view(-1, self.group).all(1)
        useful = ((outcome != outcome[:, :1]).any(1) & whole).nonzero().squeeze(1).cpu().numpy()
        order = np.random.default_rng(mix(self.config.seed, 67, self.update)).permutation(len(useful))[:GIVEN]
        try:
            groups = groups_of(own, policy, space, np.sort(useful[order]))
            self.folder.write(self.update, groups)
            self.counts["given"] += len(groups)
        except (OSError, UserError) as e:
            self.warn("", f"cannot give episodes to {self.folder.root} ({e}); the run goes on without")

    def take(self, policy, space: dict, version: int) -> list[Columns]:
        """Up to J groups of others that were not taken yet."""
        names = self.folder.foreign()
        self.taken &= set(names)
        self.last["runs"] = float(len({n.split("/")[0] for n in names}))
        out, actor = list[Columns](), foreign.actor_of(policy)
        for k, name in enumerate(draws(names, self.taken, self.config.seed, self.update)):
            if len(out) == self.most or k == READS * (self.most + 1):
                break
            try:
                g = self.folder.read(name)
            except (OSError, UserError) as e:
                self.account(name, "refused", str(e))
                continue
            if g is None:
                continue
            if why := unfit(g, space, self.longest):
                self.account(name, "unfit", f"episodes of {name.split('/')[0]} are of another kind: {why}")
            elif g.is_flat:
                self.account(name, "flat", "")
            else:
                seed_noise(self.generator, mix(self.config.seed, 71, self.update, k))
                columns = foreign.foreign_columns(
                    policy,
                    g.obs,
                    g.actions,
                    g.executed,
                    g.outcome,
                    version,
                    self.generator,
                    g.behaviour if g.actor == actor else None,
                )
                if not foreign.is_sound(columns):
                    self.account(name, "refused", f"{name}: its actions have no finite log-prob here")
                    continue
                out.append(columns)
                self.account(name, "taken", "")
        return out

    def account(self, name: str, why: str, words: str) -> None:
        """Count a group, which is not looked at again; of what is wrong with a run's groups the first is
        said."""
        self.taken.add(name)
        self.counts[why] += 1
        if words:
            self.warn(name.split("/")[0], words)

    def warn(self, who: str, words: str) -> None:
        """Say something about a run once."""
        if who not in self.told and len(self.told) < 100:
            self.told.add(who)
            self.say(f"--share: {words}", "warning")

    def metrics(self) -> dict[str, float]:
        """share/*: of the last update its share of foreign groups, and of decisions that teach; counts so
        far."""
        return {f"share/{k}": float(v) for k, v in (self.last | self.counts).items()}

    def state_dict(self) -> dict:
        return {
            "run": self.folder.mine,
            "update": self.update,
            "taken": sorted(self.taken),
            "told": sorted(self.told),
            "counts": dict(self.counts),
        }


def make_sharing(run, spec: ControlSpec, saved: "dict | None") -> ExperienceSharing:
    """The sharing that --share asks for, as it was where `saved`, its state in a checkpoint, is given."""
    foreign.check_policy(run.policy)
    sharing = ExperienceSharing(run.config, run.folder, spec, run.report.say)
    sharing.begin(saved)
    return sharing
