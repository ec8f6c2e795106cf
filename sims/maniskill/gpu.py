"""ManiSkill's GPU backend as a vector env: every array but the instruction is a torch tensor on the device,
no copies to the host but one yes-or-no per step (are the actions finite). Physics of all envs advances in one
call.

What differs from the CPU env:
* A reset with `starts`, or with a list of seeds, goes one env at a time (ManiSkill draws a batch of starts
  from its first seed alone), so that a start gives the same placement at any env index: 10 ms and more per
  env, for evaluation. Any other reset draws its envs together, fast: reproducible for the same sequence of
  calls, but not per env.
* PhysX on the GPU is not bit-exact from run to run. There are no snapshots (ManiSkill's restart contacts from
  cold) and no scripted expert.
* The simulators of envs that are over go on unseen; what the env returns stays frozen.
"""

import warnings

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from robo_rl.contract import ControlEnv, action_spaces, observation_spaces, read_device_actions, read_reset
from robo_rl.errors import UserError
from robo_rl.starts import StartStream
from sims.maniskill.build import DENSE, action_map, action_split, build, describe, prepare, split_action
from sims.maniskill.tasks import control_spec, instruction


class ManiSkillGpuEnv(ControlEnv):
    """ManiSkill 3 on one CUDA device; built by `sims.maniskill.make_maniskill(device="cuda")`.

    With device "cpu" the same code runs ManiSkill's CPU backend with one env; the tests use that.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, config: dict, device: str):
        self.num_envs = n = config["num_envs"]
        if device == "cpu" and n != 1:
            raise UserError(f"ManiSkill's CPU backend steps one env per process, got num_envs={n}")
        self.config = config
        warnings.filterwarnings("ignore", "Failed to find system libvulkan")  # SAPIEN has its own
        prepare(config, device)
        self.env = build(config, device)
        self.device = self.env.device
        info = describe(self.env, config)
        self.spec = control_spec(config["task"], info)
        self.render_mode = "rgb_array" if config["render"] else None
        self.single_observation_space, self.observation_space = observation_spaces(
            len(info["state_names"]), n, self.spec.views, info["image_size"]
        )
        self.single_action_space, self.action_space = action_spaces(len(self.spec.axes), n)
        self.middle, self.half = (torch.as_tensor(x, device=self.device) for x in action_map(self.env))
        self.split = action_split(self.env)
        self.task = np.full(n, instruction(config["task"]))
        self.stream = StartStream(n)
        self.steps = torch.zeros(n, dtype=torch.int32, device=self.device)
        self.terminated, self.truncated, self.success = (self._false() for _ in range(3))
        self.reports_success, self.limit = info["reports_success"], info["limit"]
        self.held: dict[str, torch.Tensor] | None = None  # the observation last returned

    def _false(self) -> torch.Tensor:
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def _read(self, obs: dict) -> dict[str, torch.Tensor]:
        """ManiSkill's nested observation as state [N, S] and image/<view> [N, h, w, 3]."""
        from mani_skill.utils import common

        images = {}
        if self.config["obs"] == "rgb":
            images = {f"image/{view}": obs["sensor_data"][view]["rgb"] for view in self.spec.views}
            obs = {k: obs[k] for k in ("agent", "extra")}
        state = torch.as_tensor(common.flatten_state_dict(obs, use_torch=True, device=self.device))
        return {"state": state.float(), **images}

    def _hold(self, obs: dict, fresh: torch.Tensor) -> dict:
        """The new observation where `fresh` [N], the one returned last elsewhere, in memory of its own."""
        new = self._read(obs)
        self.held = {
            k: x.clone()
            if self.held is None
            else torch.where(fresh.view(-1, *[1] * (x.ndim - 1)), x, self.held[k])
            for k, x in new.items()
        }
        return self.held | {"task": self.task.copy()}

    def reset(self, *, seed=None, options=None):
        options = {
            k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in (options or {}).items()
        }
        mask, starts = read_reset(seed, options, self.num_envs)
        if starts is not None and starts[mask].max(initial=0) >= 2**32:
            raise UserError(f"starts must be < 2^32 (ManiSkill's seeds), got {starts[mask].max()}")
        if seed is not None:
            self.stream.seed(seed, mask)
        ids = np.flatnonzero(mask)
        if self.held is None and len(ids) < self.num_envs:
            raise UserError("the first reset must reset every env")
        drawn = self.stream.draw(ids) if starts is None else starts[ids]
        single = starts is not None or (seed is not None and np.ndim(seed) == 1)
        for part in np.arange(len(ids))[:, None] if single else [np.arange(len(ids))]:
            self._place(ids[part], drawn[part])
        fresh = torch.as_tensor(mask, device=self.device)
        self.steps.masked_fill_(fresh, 0)
        self.terminated, self.truncated, self.success = (
            # new ones: the old were handed out
            x & ~fresh
            for x in (self.terminated, self.truncated, self.success)
        )
        return self.seen(fresh), {}

    def seen(self, fresh: "torch.Tensor | None" = None) -> dict:
        """What is observed now: of the envs `fresh` [N], by default all."""
        fresh = ~self._false() if fresh is None else fresh
        return self._hold(self.env.get_obs(self.env.get_info(), unflattened=True), fresh)

    def _place(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Reset the envs `rows` in one ManiSkill reset; with one row its start alone decides the
        placement."""
        if not len(rows):
            return
        seeds = np.full(self.num_envs, starts[0])  # the first one seeds what the batch draws together
        seeds[rows[1:]] = starts[1:]
        options = {} if len(rows) == self.num_envs else {"env_idx": torch.as_tensor(rows, device=self.device)}
        self.env.reset(seed=seeds.tolist(), options=options)

    def step(self, actions):
        act = self._actions(actions)
        if self.held is None:
            raise UserError("reset before the first step")
        live = ~(self.terminated | self.truncated)
        act = split_action(self.middle + self.half * act, self.split)
        env = self.env
        act = env._step_action(act)  # what BaseEnv.step does, with the observation left as a dict
        env._elapsed_steps += 1
        info = env.get_info()
        raw = env.get_obs(info, unflattened=True)
        success = self._flag(info, "success")
        if env.reward_mode in DENSE:
            reward = env.get_reward(obs=raw, action=act, info=info).float()
        else:
            reward = success.float()
        self.steps += live
        self.success = torch.where(live, success, self.success)
        self.terminated = torch.where(live, success | self._flag(info, "fail"), self.terminated)
        self.truncated = torch.where(
            live, ~self.terminated & (self.steps >= self.spec.max_steps), self.truncated
        )
        return (
            self._hold(raw, live),
            reward * live,
            self.terminated,
            self.truncated,
            {"success": self.success},
        )

    def _flag(self, info: dict, name: str) -> torch.Tensor:
        return info[name].bool() if name in info else self._false()

    def _actions(self, actions) -> torch.Tensor:
        """float32[N, A] on the device, clipped; UserError for another shape, a NaN or an infinity."""
        act = read_device_actions(actions, self.action_space.shape, self.device)
        if not bool(torch.isfinite(act).all()):
            raise UserError("actions must be finite, got NaN or infinity")
        return act.clamp(-1.0, 1.0)

    def render(self):
        """uint8[N, 256, 256, 3] (NumPy) of the task's human camera; None unless made with render=True."""
        return None if self.render_mode is None else self.env.render_rgb_array().cpu().numpy()

    def close_extras(self, **kwargs) -> None:
        self.env.close()
