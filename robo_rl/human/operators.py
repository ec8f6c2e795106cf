"""A scripted operator: the env's expert with a reaction time, slips and fatigue, for tests and measurements
of help.

The person watches how far the policy's commands are from what they would do. Once that stays large for
`notice_time` seconds, or the episode is late, they decide to help, act after a reaction time, and hand back
once policy and person have agreed for `agree_time` seconds (with `until_subtask` once one more of the env's
sub-tasks is done; with `until_end` only when the episode is over). With `recovery_time` they first back out
(the env's `recovery_action`) to where attempts begin, which the demonstrations know, and then correct: RaC's
two phases. The expert raises the hand by itself where an attempt went wrong, so its corrections are
recoveries too; a person who stays low (`stay_low`) does not.

Every draw is a hash of (seed, first observation of the episode, step), so an episode is the same at any env
index.
"""

import zlib

import numpy as np

from robo_rl.errors import UserError
from robo_rl.human.intervention import CORRECTION, POLICY, RECOVERY, Intervention, OperatorView
from robo_rl.noise import mix
from robo_rl.options import ScriptedOperatorOptions

SLIP = 0.25  # s
ARRIVED = 0.1  # a recovery is over when no axis of it asks for more than this


class ScriptedOperator:
    """One scripted person per robot of `env` (which needs `expert_action`); a person helps only where
    `wanted[N]` is True.

    stats[N]: `asked` decisions to help, `helped` take-overs, `reaction` their summed reaction times [s],
    `seconds` at the controls. Raises UserError if the env has no expert, or no recovery where the person is
    to recover.
    """

    def __init__(self, env, person: ScriptedOperatorOptions | None = None, seed: int = 0):
        if not hasattr(env, "expert_action"):
            raise UserError(
                f"{env.spec.sim}:{env.spec.task} has no scripted expert to stand in for the person; "
                "take a gamepad, the keyboard or the console as the operator"
            )
        person = person or ScriptedOperatorOptions()
        if person.recovery_time and not hasattr(env, "recovery_action"):
            raise UserError(
                f"{env.spec.sim}:{env.spec.task} has no scripted recovery; leave out "
                "--scripted-operator.recovery-time and --protocol rac"
            )
        if person.until_subtask and not hasattr(env, "subtask"):
            raise UserError(
                f"{env.spec.sim}:{env.spec.task} does not tell its sub-tasks; leave out "
                "--scripted-operator.until-subtask and --protocol rac"
            )
        self.env, self.person, self.seed = env, person, seed
        self.up = up_axis(env.spec) if person.stay_low else -1
        n, period = env.num_envs, env.spec.period
        self.absolute = np.array([x.kind == "absolute" for x in env.spec.axes])
        self.wait = {
            k: max(1, round(getattr(person, k) / period)) for k in ("notice_time", "agree_time", "least_time")
        }
        self.slip_steps = max(1, round(SLIP / period))
        self.back_steps = round(person.recovery_time / period)
        self.wanted = np.ones(n, bool)
        self.stats = {k: np.zeros(n) for k in ("asked", "helped", "reaction", "seconds")}
        self.rows = {
            "key": np.zeros(n, np.int64),
            "wrong": np.zeros(n, np.int64),
            "right": np.zeros(n, np.int64),
            "until": np.zeros(n, np.int64),
            "phase": np.zeros(n, np.uint8),
            "held": np.zeros(n, np.int64),
            "now": np.zeros(n, np.int64),
            "slip": np.zeros(n, np.int64),
            "work": np.zeros(n, np.int64),
            "stage": np.zeros(n, np.int64),
            "away": np.zeros(n, bool),
        }

    def begin(self, mask, obs):
        r, state = self.rows, np.ascontiguousarray(obs["state"], np.float32)
        for name in r:
            if name != "work":  # fatigue outlives the episode
                r[name][mask] = 0
        for i in np.flatnonzero(mask):
            r["key"][i] = zlib.crc32(state[i].tobytes())
            r["away"][i] = _uniform(self.seed, r["key"][i], 0, 4) >= self.person.attended_share

    def request_help(self, mask: np.ndarray) -> None:
        """Request the help of the persons of `mask`; they act after their reaction time."""
        self._decide(mask & (self.rows["phase"] == POLICY) & (self.rows["until"] == 0), self.rows["now"])

    def send_away(self, mask: np.ndarray) -> None:
        """End the interventions of the persons of `mask`."""
        for name in ("wrong", "right", "until", "phase", "held", "slip"):
            self.rows[name][mask] = 0

    def intervene(self, view: OperatorView) -> Intervention:
        r, p, n = self.rows, self.person, len(view.over)
        wanted = self.wanted & ~r["away"] & ~self.gone
        if self.gone:
            self.send_away(np.ones(n, bool))
        r["now"] += 1  # goes on while the episode's clock stands still
        alive = ~view.over
        expert = self._stay_low(np.asarray(self.env.expert_action(), np.float32))
        ran = alive & (view.steps > 0)
        gap = np.sqrt(((view.proposed.clip(-1, 1) - expert) ** 2).mean(1))
        far = gap > p.disagreement
        free = (r["phase"] == POLICY) & alive
        r["wrong"] = np.where(free & ran & far, r["wrong"] + 1, 0)
        r["right"] = np.where(~free & ran & ~far, r["right"] + 1, 0)
        late = view.steps >= p.late_share * self.env.spec.max_steps if p.late_share < 1 else np.zeros(n, bool)
        self._decide(
            wanted & free & (r["until"] == 0) & ((r["wrong"] >= self.wait["notice_time"]) | late), r["now"]
        )
        come = free & (r["until"] > 0) & (r["now"] >= r["until"])
        self.stats["helped"][come] += 1
        r["phase"][come] = RECOVERY if self.back_steps else CORRECTION
        r["held"][come], r["until"][come], r["right"][come] = 0, 0, 0
        actions, begun = expert, come & (r["phase"] == CORRECTION)
        if (recover := r["phase"] == RECOVERY).any():
            back = np.asarray(self.env.recovery_action(), np.float32)
            out = recover & (
                (r["held"] >= self.back_steps) | (np.abs(back[:, ~self.absolute]).max(1) < ARRIVED)
            )
            r["phase"][out], begun = CORRECTION, begun | out
            actions = np.where((recover & ~out)[:, None], back, expert)
        done = (r["phase"] == CORRECTION) & (r["held"] >= self.wait["least_time"]) & (not p.until_end)
        if p.until_subtask:
            stage = self.env.subtask()
            r["stage"][begun] = stage[begun]
            done &= stage > r["stage"]
        else:
            done &= (r["right"] >= self.wait["agree_time"]) & ~late
        r["phase"][done | view.over] = POLICY
        helping = (r["phase"] != POLICY) & alive
        r["held"] += helping
        r["work"] += helping
        self.stats["seconds"] += helping * self.env.spec.period
        attended = (helping | (r["until"] > 0)) & alive
        actions = self._slips(self._stay_low(actions), helping, r["now"])
        return Intervention(actions, np.where(alive, r["phase"], 0).astype(np.uint8), None, attended)

    def get_state(self):
        return {k: v.copy() for k, v in self.rows.items()}

    def set_state(self, state, mask):
        for k, v in self.rows.items():
            v[mask] = np.asarray(state[k])[mask]

    # ------------------------------------------------------------ parts

    @property
    def gone(self) -> bool:
        """Whether the persons have given all the time they had."""
        return 0 < self.person.leave_after * 60 <= self.rows["work"].sum() * self.env.spec.period

    def tired(self) -> np.ndarray:
        """Factor [N] on reaction time and error: 1 when fresh."""
        return 1 + self.person.fatigue * self.rows["work"] * self.env.spec.period / 60

    def _decide(self, who: np.ndarray, steps: np.ndarray) -> None:
        """The persons of `who` decide to help: set the step at which they will be there."""
        tired = self.tired()
        for i in np.flatnonzero(who):
            u = np.array([_uniform(self.seed, self.rows["key"][i], steps[i], j) for j in (1, 2)])
            z = np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])
            reaction = self.person.reaction_time * np.exp(0.3 * z) * tired[i]
            self.rows["until"][i] = steps[i] + max(1, round(reaction / self.env.spec.period))
            self.stats["asked"][i] += 1
            self.stats["reaction"][i] += reaction

    def _stay_low(self, actions: np.ndarray) -> np.ndarray:
        """`actions` of the expert as a person gives them who corrects from where the failure is."""
        low = self.rows["phase"] == CORRECTION
        if self.up < 0 or not low.any():
            return actions
        if hasattr(self.env, "subtask"):
            low = low & (self.env.subtask() == 0)
        out = actions.copy()
        out[low, self.up] = np.minimum(out[low, self.up], 0)
        return out

    def _slips(self, actions: np.ndarray, helping: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """`actions` with slips: bursts of the command turned round (absolute axes stay)."""
        r, out, tired = self.rows, actions.copy(), self.tired()
        r["slip"] = np.maximum(r["slip"] - 1, 0) * helping
        if not self.person.slip_rate:
            return out
        chance = np.minimum(self.person.slip_rate * self.env.spec.period * tired, 1)
        for i in np.flatnonzero(helping):
            if r["slip"][i] == 0 and _uniform(self.seed, r["key"][i], steps[i], 3) < chance[i]:
                r["slip"][i] = self.slip_steps
            if r["slip"][i]:
                out[i] = np.where(self.absolute, out[i], -out[i])
        return out


def up_axis(spec) -> int:
    """Number of the axis that raises the hand. UserError: there is none."""
    found = [i for i, a in enumerate(spec.axes) if a.name == "dz" and a.kind == "delta" and a.frame == "base"]
    if not found:
        raise UserError(
            f"{spec.sim}:{spec.task} has no axis dz that raises the hand; leave out "
            "--scripted-operator.stay-low"
        )
    return found[0]


def _uniform(*keys) -> float:
    """In (0, 1)."""
    return (mix(*(int(k) for k in keys)) + 0.5) / (1 << 63)
