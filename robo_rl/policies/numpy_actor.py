"""Acting without torch: one chunk for one robot from a checkpoint's weights, NumPy alone.

The chain of `ChainPolicy.act(explore=False)` at batch 1, with everything constant folded into the weights
when they are loaded. Rows of the first matrix are [state, one-hot step, x] (before x, [H] flags of given
rows, where the policy was taught with some), so a step's product is a single one:

    h = act([clip(s), e_k, x] W1),  h = act([h, 1] W) ...,  x <- x + [h, 1] Wout
    or, residual:  h = [clip(s), e_k, x] W1,  h = h + act([norm(h), 1] W) ...

W1's state rows hold the normaliser, its K step rows the time product and the biases; Wout is scaled by the
Euler step t' - t = -1/K. Of a network that predicts actions D the step is x <- (1 - w) x + w D with w = 1/(K
- k).

Axes: S state, H chunk, E executed, A action, D = H A, K denoise steps.
"""

import math
import zlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from robo_rl.errors import UserError, choose
from robo_rl.files import read_json
from robo_rl.options.lora import LoraOptions

FORMAT = 1  # of robo_rl.checkpoint
F = np.float32
CLIP = F(10)  # of the observation normaliser
NORM_EPS = 1e-5  # of torch's layer_norm


class NumpyActor:
    """Flow policy on a state; `act` gives what the torch policy gives for the same initial noise, to 1e-5."""

    def __init__(self, weights: dict[str, np.ndarray], options: dict, spec: dict):
        """weights: the policy's state_dict as arrays; options and spec: PolicyOptions and ObsSpec as
        dicts."""
        if options["kind"] != "flow" or spec["views"] or spec["language"]:
            seen = "images" if spec["views"] else "an instruction" if spec["language"] else "a state"
            raise UserError(
                f"NumpyActor carries flow policies that see a state alone, got kind {options['kind']!r} "
                f"that sees {seen}; load it with robo_rl.checkpoint.load_policy"
            )
        if options.get("window", 0):
            raise UserError(
                "NumpyActor carries no policy of --policy.window; load it with robo_rl.checkpoint.load_policy"
            )
        told = options.get("advantage", False)
        if told and options["guidance"] != 1:
            raise UserError(
                f"NumpyActor makes one pass per step, a policy guided by beta {options['guidance']:g} takes "
                "two; load it with robo_rl.checkpoint.load_policy, or train it with --policy.guidance 1"
            )
        self.activation = choose("activation", options["activation"], ("relu", "silu", "tanh"))
        self.steps, self.horizon, self.execute = (
            options["denoise_steps"],
            options["horizon"],
            options["execute"],
        )
        self.clean = options.get("predict", "velocity") == "action"
        self.commit = options.get("commit", 0)
        self.state, self.action = spec["state"], spec["action"]
        w = LoraOptions(**options.get("lora", {})).merged(
            {k: np.asarray(v, np.float64) for k, v in weights.items()}
        )
        mean, std = w["obs_norm.mean"], w["obs_norm.std"]
        self._low, self._high = (mean - CLIP * std).astype(F), (mean + CLIP * std).astype(F)
        self._mean, self._std = w["action_norm.mean"].astype(F), w["action_norm.std"].astype(F)

        context = w["head.from_context.weight"]
        # the number 1 of `guidance.told_context`, and its products, which earlier policies have none of
        context, good, products = np.split(context, [self.state, self.state + 1], 1)
        context = (context + products if products.size else context) / std
        bias = w["head.from_context.bias"] + good.sum(1) - context @ mean
        times = 1 - np.arange(self.steps) / self.steps
        given = w["head.from_committed.weight"].T if self.commit else np.zeros((0, len(bias)))
        rows = [context.T, _time_product(times, w) + bias, given, w["head.from_x.weight"].T]
        body = [f"head.body.{i}" for i in range(options["layers"] - 1)]
        layers = [
            np.concatenate([w[f"{n}.weight"], w[f"{n}.bias"][:, None]], 1).T for n in (*body, "head.out")
        ]
        if not self.clean:
            layers[-1] = layers[-1] / -self.steps
        self._weights = [np.ascontiguousarray(m, F) for m in (np.concatenate(rows), *layers)]

        d, s, k = self.horizon * self.action, self.state, self.steps
        g = len(given)
        first = np.zeros(s + k + g + d, F)
        self._state, self._step, self._given, self._x = np.split(first, np.cumsum([s, k, g]))
        hidden = self._weights[0].shape[1]
        # the last entry stays 1: it carries the bias
        buffers = [np.ones(hidden + 1, F) for _ in self._weights[1:]]
        self._out = np.empty(d, F)
        outputs, self._last = [b[:-1] for b in buffers], (buffers[-1], self._weights[-1])
        self.residual = options.get("residual", False)
        if self.residual:
            total = np.ones(hidden + 1, F)
            outputs = [total[:-1], *(np.empty(hidden, F) for _ in body)]
            self._last = total, self._weights[-1]
            self._spread = np.ones(len(body))  # std that each layer's input was divided by
        # (input, weight, output); of a residual layer but the first the output is what it adds to the first's
        self._layers = list(zip([first, *buffers], self._weights, outputs, strict=False))
        self._scratch, self._zeros = np.empty(hidden, F), np.zeros(hidden, F)

    @staticmethod
    def load(checkpoint: "Path | str") -> "NumpyActor":
        """Actor of a checkpoint folder (`meta.json`, `policy.safetensors`); UserError if it is damaged."""
        path = Path(checkpoint)
        try:
            if not (path / "meta.json").exists():
                raise UserError(f"{path} is not a checkpoint that can be read: it has no meta.json")
            meta = read_json(path / "meta.json", remedy=f"use another checkpoint of {path.parent}")
            blob = (path / "policy.safetensors").read_bytes()
            if meta["format"] != FORMAT:
                raise UserError(f"{path} has checkpoint format {meta['format']}, this robo_rl reads {FORMAT}")
            if zlib.crc32(blob) != meta["crc"]["policy.safetensors"]:
                raise UserError(
                    f"{path / 'policy.safetensors'} is damaged (its checksum differs from meta.json). "
                    f"Use another checkpoint of {path.parent}"
                )
            policy = meta["policy"]
            return NumpyActor(load(blob), policy["options"], policy["spec"])
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
            raise UserError(f"{path} is not a checkpoint that can be read ({type(e).__name__}: {e})") from e

    def act(
        self,
        state: np.ndarray,
        noise: "np.ndarray | None" = None,
        rng: "np.random.Generator | None" = None,
        rows: int = 0,
        prefix: "tuple[np.ndarray, np.ndarray, list[float]] | None" = None,
        committed: "tuple[np.ndarray, int] | None" = None,
    ) -> np.ndarray:
        """state float32[S], initial noise float32[D] (or drawn from `rng`) -> the first actions float32[rows,
        A] of the chunk in -1 .. 1 units; rows 0: E. prefix: actions [H, A] that the chunk is guided to,
        weights [H] that say where, and gains [K] (`_guide`).
        committed: actions [H, A] of which the first so many are given (`policies.guided.committed_chunk`)."""
        if np.shape(state) != (self.state,):
            raise UserError(f"state must have shape ({self.state},), got {np.shape(state)}")
        x, step, out = self._x, self._step, self._out
        if noise is not None:
            x[:] = noise if np.ndim(noise) == 1 else np.reshape(noise, -1)
        elif rng is not None:
            rng.standard_normal(out=x, dtype=F)
        else:
            raise UserError(
                "act needs the initial noise or a generator: act(state, rng=np.random.default_rng(0))"
            )
        np.maximum(state, self._low, out=self._state)
        np.minimum(self._state, self._high, out=self._state)
        last, last_weight = self._last
        goal = None if prefix is None else self._goal(*prefix[:2])
        self._given[:] = 0
        kept, fixed = (x[:0], x[:0]) if committed is None else self._fix(*committed)
        for k in range(self.steps):
            if committed is not None:
                kept[:] = fixed
            step[k - 1] = 0
            step[k] = 1
            if self.residual:
                self._add_up()
            else:
                for before, weight, h in self._layers:
                    np.dot(before, weight, out=h)
                    self._activate(h)
            np.dot(last, last_weight, out=out)
            pull = (
                None if goal is None or prefix is None else prefix[2][k] / self.steps * self._guide(k, *goal)
            )
            if self.clean:
                np.subtract(out, x, out=out)
                np.multiply(out, F(1 / (self.steps - k)), out=out)
            np.add(x, out, out=x)
            if pull is not None:
                np.add(x, pull, out=x)
        if committed is not None:
            kept[:] = fixed
        actions = x.reshape(self.horizon, self.action)[: rows or self.execute] * self._std
        actions += self._mean
        return actions

    def _activate(self, h: np.ndarray) -> None:
        """In place."""
        if self.activation == "relu":
            np.maximum(h, self._zeros, out=h)  # an array of zeros: a scalar costs twice as much
        elif self.activation == "tanh":
            np.tanh(h, out=h)
        else:
            _silu(h, self._scratch)

    def _add_up(self) -> None:
        """The residual layers of a step."""
        (first, entry, h), *layers = self._layers
        np.dot(first, entry, out=h)
        for i, (before, weight, added) in enumerate(layers):
            normed = before[:-1]
            np.subtract(h, h.mean(), out=normed)
            self._spread[i] = math.sqrt(float(normed @ normed) / len(normed) + NORM_EPS)
            np.divide(normed, F(self._spread[i]), out=normed)
            np.dot(before, weight, out=added)
            self._activate(added)
            np.add(h, added, out=h)

    def _fix(self, actions: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tell the network that the first `count` rows are given -> (their place in x, their normalised
        values)."""
        if not 0 <= count <= self.commit:
            raise UserError(
                f"this policy was taught with at most {self.commit} rows given (--policy.commit), got {count}"
            )
        goal, _ = self._goal(actions, np.zeros(self.horizon))
        self._given[:count] = 1
        return self._x[: count * self.action], goal[: count * self.action]

    def _goal(self, actions: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(normalised actions, weights), both float32[D]. UserError: they are no chunk of this policy."""
        if np.shape(actions) != (self.horizon, self.action) or np.shape(weights) != (self.horizon,):
            raise UserError(
                f"a prefix has {self.horizon} rows of {self.action} numbers and a weight each, got "
                f"{np.shape(actions)} and {np.shape(weights)}"
            )
        return ((np.asarray(actions, F) - self._mean) / self._std).ravel(), np.repeat(
            np.asarray(weights, F), self.action
        )

    def _guide(self, k: int, goal: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """J^T [W (goal - x0)] with J = dx0/dx at step k, backwards through the layers whose activations the
        step has left. The chain adds gain/K times it to x, as `controllers.schedule.guided_velocity` does to
        the velocity."""
        t = 1 - k / self.steps
        d = len(goal)
        x0 = self._out if self.clean else self._x + t * self.steps * self._out
        pull = weights * (goal - x0)
        back = pull if self.clean else t * self.steps * pull
        back = self._last[1][:-1] @ back
        for at in range(len(self._layers) - 1, 0, -1):
            back = self._behind(at, back)
        _, entry, h = self._layers[0]
        back = entry[-d:] @ (back if self.residual else back * self._slope(0, h))
        return (back if self.clean else pull + back).astype(F)

    def _behind(self, at: int, back: np.ndarray) -> np.ndarray:
        """J^T back of layer `at` above the first; of a residual one itself, and what goes through the layer
        and its normalisation."""
        before, weight, h = self._layers[at]
        inner = weight[:-1] @ (back * self._slope(at, h))
        if not self.residual:
            return inner
        normed = before[:-1]
        inner = inner - inner.mean() - normed * (inner @ normed / len(normed))
        return back + inner / self._spread[at - 1]

    def _slope(self, at: int, h: np.ndarray) -> np.ndarray:
        """Derivative of the activation of a layer, from its output h; silu is not monotone, and asks for its
        input again."""
        if self.activation == "relu":
            return h > 0
        if self.activation == "tanh":
            return 1 - h * h
        before, weight, _ = self._layers[at]
        z = np.maximum(np.dot(before, weight), F(-80))
        gate = 1 / (1 + np.exp(-z))
        return gate * (1 + z * (1 - gate))


def _silu(h: np.ndarray, scratch: np.ndarray) -> None:
    """h <- h / (1 + exp(-h)), in place."""
    np.negative(h, out=scratch)
    np.minimum(scratch, 80, out=scratch)  # exp stays finite
    np.exp(scratch, out=scratch)
    scratch += 1
    np.divide(h, scratch, out=h)


def _time_product(times: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    """`ChunkHead.time` of times [K] -> [K, hidden], in float64."""
    freq = np.exp(np.linspace(0, math.log(100.0), 16)) * math.pi
    angle = times[:, None] * freq
    h = (
        np.concatenate([np.sin(angle), np.cos(angle)], 1) @ w["head.from_time.0.weight"].T
        + w["head.from_time.0.bias"]
    )
    return (h / (1 + np.exp(-h))) @ w["head.from_time.2.weight"].T
