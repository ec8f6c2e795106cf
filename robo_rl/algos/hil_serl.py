"""HIL-SERL: SAC from demonstrations with human corrections, and a critic of its own for the gripper (Luo et
al. 2024, arXiv 2410.21845).

Two buffers: every step goes to the online one; steps that a person chose also to that of the demonstrations,
as the actions that ran (`robo_rl/replay_collector.py`). Half of every batch comes from each. With
`--policy.gripper toggle` the gripper is discrete:

    y_g = r - penalty * changes + gamma^n (1 - terminated) Q'_g(s', argmax_o Q_g(s', o))       double DQN
    o: one of 2E command sequences that change at most once in a chunk (`policies.offpolicy.gripper_options`)

The paper's choices: gamma 0.97 at 10 Hz, 2 critics, UTD 2 with one of two updates on the critic alone, alpha
from 0.01.

Where we differ: over chunks the gripper has 2E options instead of {close, stay, open} per step (E = 1: close,
open, and staying is repeating); its critic begins with supervised options on the scale of values
(`policies.offpolicy.GRASP`); the arm's critics see the gripper's commands. The preset leaves the gripper to
the Gaussian: options that nobody tried cost it more here than they gain. The supervised actor stays as a
teacher (see demo_sac); one process collects and learns in turn.
"""

import copy

import torch
from torch import Tensor

from robo_rl.algos.credit import descend
from robo_rl.algos.demo_sac import DemoSacLearner
from robo_rl.algos.offpolicy import Rows, check_judge, make_adam, on_trunk, polyak, td_target
from robo_rl.errors import UserError
from robo_rl.options import HilSerlOptions
from robo_rl.policies.offpolicy import SquashedPolicy, gripper_label


def changes(commands: Tensor, before: Tensor) -> Tensor:
    """How often the sign of the gripper's commands [B,E] changes, counting the step `before` [B] (0: there
    was none)."""
    closed = commands < 0
    first = (before != 0) & ((before < 0) != closed[:, 0])
    return (closed[:, 1:] != closed[:, :-1]).sum(1) + first


class HilSerlLearner(DemoSacLearner):
    """The learner of demo_sac, with a DQN for the gripper if the env has one."""

    options: HilSerlOptions

    def __init__(self, policy: SquashedPolicy, options: HilSerlOptions, seed: int):
        super().__init__(policy, options, seed)
        self.on = policy.gripper >= 0
        if self.on:
            self.owns = (*self.owns, "grasp_target", "grasp_opt")
            self.grasp_target = copy.deepcopy(policy.grasp).requires_grad_(False)
            self.grasp_params = list(policy.grasp.parameters())
            self.grasp_opt = make_adam(self.grasp_params, options.critic_lr)

    def grasp_step(self, rows: Rows) -> dict[str, Tensor]:
        """One DQN step on the gripper's commands of the batch."""
        o, g = self.options, self.policy.gripper
        commands = rows.actions[..., g]
        with torch.no_grad():
            best = self.policy.grasp(rows.next_context.pooled).argmax(1, keepdim=True)
            v = self.grasp_target(rows.next_context.pooled).gather(1, best).squeeze(1)
            cost = o.grasp_penalty * changes(commands, rows.before[:, g])
            y = td_target(rows, v, o) - cost
        q = self.policy.grasp(rows.context.pooled).gather(1, gripper_label(commands)[:, None]).squeeze(1)
        loss = (q - y).square().mean()
        descend(loss, self.grasp_params, self.grasp_opt, o.max_grad_norm)
        polyak(self.grasp_target, self.policy.grasp, o.tau)
        return {"grasp_loss": loss.detach(), "grasp_q": q.detach().mean()}

    def critic_step(self, rows: Rows) -> dict[str, Tensor]:
        return super().critic_step(rows) | (self.grasp_step(rows) if self.on else {})


def make(policy, options: HilSerlOptions, seed: int, demos=None) -> HilSerlLearner:
    """Learner for a squashed Gaussian policy, with or without a discrete gripper."""
    if policy.options.acts != "squashed":
        raise UserError(
            f"hil_serl needs --policy.kind squashed{on_trunk(policy.options, 'squashed')}, got "
            f"{policy.options.kind}{policy.options.hint}"
        )
    check_judge("hil_serl", policy, options)
    if policy.gripper < 0:
        options.refuse(
            ("grasp_penalty",), "no critic of a gripper's own would pay it (--policy.gripper toggle)"
        )
    return HilSerlLearner(policy, options, seed)
