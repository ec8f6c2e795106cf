"""Isaac's lockstep simulators under the env contract.

Isaac steps all envs at once and resets them by itself; the contract wants an env that is over to wait. So the
adapter keeps for each env what the caller may see: after an end the observation, flags and success stay, the
reward is 0 and Isaac gets zero actions for it, whatever Isaac does with that env meanwhile. `reset` of such
an env starts a new episode in Isaac without advancing the others, or hands out the first observation that
Isaac made by itself, when nothing has run since.

The last observation of an episode: `has_final_obs` in `step`'s info says for which envs it is true. Isaac
Gym's usual tasks return it. Isaac Lab never does, so the adapter's time limit lies before Isaac Lab's, and a
truncated episode has its last observation to bootstrap from; where Isaac Lab ends an episode (terminated,
nothing to bootstrap), the observation before the end is shown instead.
"""

from typing import ClassVar

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_device_actions, read_reset
from robo_rl.errors import UserError
from robo_rl.types import ActionAxis, ControlSpec
from sims.isaac.ports import GymPort, LabPort


class IsaacEnv(ControlEnv):
    """N envs behind a port; observations, rewards and flags are torch tensors on `device`."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}
    one_stream = True  # a reset takes one seed for all envs and no starts

    def __init__(self, port: "GymPort | LabPort", sim: str, task: str, max_steps: int = 0):
        n = self.num_envs = port.num_envs
        self._port, self.device, self.render_mode = port, port.device, None
        self.single_observation_space, self.observation_space = observation_spaces(port.obs_dim, n)
        self.single_action_space, self.action_space = action_spaces(port.action_dim, n)
        axes = tuple(ActionAxis(f"action{i}", "1", -1.0, 1.0, "absolute") for i in range(port.action_dim))
        limit = min(max_steps or port.max_steps, port.max_steps)
        self.spec = ControlSpec(sim, task, axes, port.period, limit)
        self._task = np.full(n, task)
        off = torch.zeros(n, dtype=torch.bool, device=self.device)
        self._terminated, self._truncated, self._success = (off.clone() for _ in range(3))
        self._renewed = off.clone()  # Isaac's last step ended with the first observation of an episode
        self._hidden = off.clone()  # the last observation of the episode was not to be had
        self._steps = torch.zeros(n, dtype=torch.int64, device=self.device)
        self._begun = False  # reset at least once; until then the next two are not there
        self._state: torch.Tensor  # what the caller sees [N, O]
        self._first: torch.Tensor  # what Isaac returned last; first obs where renewed [N, O]

    def reset(self, *, seed=None, options=None):
        mask, starts = read_reset(seed, options, self.num_envs)
        if starts is not None:
            raise UserError(
                f"{self.spec.sim} cannot take starts: one random stream serves all its envs; use a seed"
            )
        if seed is not None and (np.ndim(seed) or not mask.all()):
            raise UserError(
                f"{self.spec.sim} takes one seed for all envs at once: one random stream serves them"
            )
        if mask.all():
            self._state = self._first = self._port.reset_all(
                None if seed is None else int(np.asarray(seed))
            ).clone()
            self._begun = True
        elif not self._begun:
            raise UserError("the first reset must reset every env: leave reset_mask out")
        elif mask.any():
            self._state = self._renew(torch.as_tensor(mask, device=self.device))
        m = torch.as_tensor(mask, device=self.device)
        for flag in (self._terminated, self._truncated, self._success, self._renewed, self._hidden):
            flag &= ~m
        self._steps.masked_fill_(m, 0)
        return self._obs(), {"success": self._success.clone()}

    def _renew(self, mask: torch.Tensor) -> torch.Tensor:
        """What the caller sees once the envs of `mask` have begun again."""
        state = torch.where((mask & self._renewed)[:, None], self._first, self._state)
        stale = mask & ~self._renewed
        ids = stale.nonzero().flatten()
        if len(ids):
            state = torch.where(stale[:, None], self._port.reset_some(ids), state)
        return state

    def step(self, actions):
        if not self._begun:
            raise UserError("call reset() before step()")
        a = self._actions(actions)
        live = ~(self._terminated | self._truncated)
        s = self._port.step(a * live[:, None])
        self._steps += live
        self._terminated |= s.terminated & live
        self._truncated |= (s.truncated | (self._steps >= self.spec.max_steps)) & live & ~self._terminated
        self._success |= s.success & live
        # copies: Isaac writes into its own buffers again
        self._state = torch.where((live & ~s.renewed)[:, None], s.obs, self._state)
        self._first, self._renewed = s.obs, s.renewed
        self._hidden |= s.renewed & live
        reward = torch.where(live, s.reward, torch.zeros_like(s.reward))
        info = {"success": self._success.clone(), "has_final_obs": ~self._hidden}
        return self._obs(), reward, self._terminated.clone(), self._truncated.clone(), info

    def _actions(self, actions) -> torch.Tensor:
        """float32 [N, A] on the device, clipped to [-1, 1]; UserError for another shape or a NaN."""
        a = read_device_actions(actions, self.action_space.shape, self.device)
        if not torch.isfinite(a).all():
            raise UserError("actions must be finite, got NaN or infinity")
        return a.clamp(-1.0, 1.0)

    def _obs(self) -> dict:
        return {"state": self._state.clone(), "task": self._task.copy()}

    def close_extras(self) -> None:
        self._port.close()
