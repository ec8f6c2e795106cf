"""Learning the gate of a `latent` model: when to trust a rollout (`world_models.gate`)."""

import copy
from dataclasses import replace

import numpy as np
import torch

from robo_rl.errors import UserError
from world_models.calibrate import along_recorded
from world_models.gate import Gate, before_steps
from world_models.trust import state_error
from world_models.windows import pick_starts


def check_gate(data) -> None:
    """Raise UserError for data too few to learn a gate from and calibrate it."""
    if data.held.sum() < 4:
        raise UserError(
            "--gate is learnt on one half of the held-out episodes, one in ten of all, and calibrated on "
            f"the other: record at least 40, got {len(data)}"
        )


def gated(model, data, episodes: np.ndarray, horizon: int, seed: int = 0):
    """A copy of a latent model with a gate that is learnt on held-out `episodes`; its memory is of those the
    model learnt from."""
    model = copy.deepcopy(model)
    model.gate, model.spec = None, replace(model.spec, gate=True)
    steps = min(horizon, int(data.lengths[episodes].max()))
    which, rows = pick_starts(
        data.first[episodes], data.end[episodes] - 1, min(16 * len(episodes), 2000), steps, seed
    )
    predicted, truth, there, u = along_recorded(model, data, episodes[which], rows, steps)
    error = state_error(predicted, np.where(there[..., None], truth, predicted), np.array(model.spec.scale))

    def inputs(s: np.ndarray, before: np.ndarray, at: np.ndarray) -> torch.Tensor:
        task = torch.from_numpy(np.repeat(data.task, data.lengths)[at])
        return model.inputs(
            *map(torch.from_numpy, (s, before)), model.commanded(torch.from_numpy(data.action[at]), task)
        )

    learnt = np.flatnonzero(~np.repeat(data.held, data.lengths))
    known = inputs(data.state[learnt], data.state[previous(data, learnt)], learnt)
    gate = Gate(known.shape[1]).remember(known, seed)
    at = np.minimum(rows[:, None] + np.arange(steps), data.end[episodes[which]][:, None] - 1)
    s, before = before_steps(data.state[rows], data.state[previous(data, rows)], predicted)
    q = gate.along(inputs(s, before, at), torch.from_numpy(np.nan_to_num(u)).float())
    gate.law.fit(q[torch.from_numpy(there)], torch.from_numpy(error[there]).float())
    model.gate = gate
    return model


def previous(data, rows: np.ndarray) -> np.ndarray:
    """The row before each, or itself where an episode begins."""
    return np.where(np.isin(rows, data.first), rows, rows - 1)
