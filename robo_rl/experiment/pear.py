"""`--bc.pear`: supervised learning weighs demonstrated chunks by how the policy that learns would go on
(`robo_rl.algos.pear`)."""

import numpy as np
import torch
from torch import Tensor

from robo_rl.algos.pear import suffix_weights
from robo_rl.data.reader import Dataset, chunks
from robo_rl.devices import device_of
from robo_rl.experiment.collect import best_policy
from robo_rl.experiment.run import Run
from robo_rl.policies import obs_tensors

TIMES = 10  # in a supervised stage that weights are made anew
SIZE = 256  # frames of a batch


@torch.no_grad()
def errors(policy, data: Dataset, steps: int, scale: np.ndarray) -> np.ndarray:
    """Mean squared error [n] of what the policy does without exploring, over all axes and the first `steps`
    that the episode of frame n has, in units of `scale` [A]."""
    _, chunk, pad = chunks(data, steps)
    out, device = [], device_of(policy)
    for e in range(len(data)):
        rows = slice(data.from_[e], data.to[e])
        views = {f"image/{v}": data.frames(v, e) for v in policy.spec.views}
        for i in range(rows.start, rows.stop, SIZE):
            n = min(SIZE, rows.stop - i)
            at = i - rows.start
            raw = {"state": data.state[i : i + n], "task": [data.task(e)] * n} | {
                k: v[at : at + n] for k, v in views.items()
            }
            obs = {k: v.to(device) for k, v in obs_tensors(raw, policy.spec).items()}
            acted = (
                policy.act(obs, torch.Generator().manual_seed(0), explore=False)
                .actions[:, :steps]
                .cpu()
                .numpy()
            )
            out.append((((acted - chunk[i : i + n]) / scale) ** 2).mean(-1))
    return (np.concatenate(out) * ~pad).sum(1) / (~pad).sum(1)


class PearWeights:
    """The weights [n] of the frames of a data set; `look` makes them anew while `run.policy` learns."""

    def __init__(self, run: Run, data: Dataset, updates: int):
        self.run, self.data, self.every = run, data, max(1, updates // TIMES)
        self.scale = np.maximum(data.action.std(0), 0.05)
        shown, own = best_policy(run.config.bc.pear, run.env), run.policy.options
        self.block, self.steps = own.execute, min(own.execute, shown.options.execute)
        self.shown = errors(shown, data, self.steps, self.scale)
        self.last = data.to[data.episode_index] - 1
        self.weights = torch.ones(len(self.shown))

    def __call__(self, rows: Tensor) -> Tensor:
        """Weights of the frames `rows` [B]."""
        return self.weights[rows]

    def state_dict(self) -> dict[str, Tensor]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights = state["weights"]

    def look(self, update: int) -> dict[str, float]:
        """After every tenth of the updates the weights follow the policy -> what to log."""
        if update % self.every:
            return {}
        log_ratio = self.shown - errors(self.run.policy.eval(), self.data, self.steps, self.scale)
        self.run.policy.train()
        self.weights = torch.from_numpy(suffix_weights(log_ratio, self.last, self.block)).float()
        return {
            "sft/pear_log_ratio": float(log_ratio.mean()),
            "sft/pear_least": float(self.weights.min()),
            "sft/pear_most": float(self.weights.max()),
            "sft/pear_mean": float(self.weights.mean()),
        }
