"""WSRL: start online RL from an offline policy and critic, without keeping the offline data (arXiv
2412.07762).

1. offline: Cal-QL on the demonstrations (`pretrain`)
2. warm-up: the frozen policy fills an empty replay (`warmup`)
3. online: SAC with an ensemble and no pessimism, actor, critics and targets as the offline stage left them,
   optimizers and temperature fresh, every batch from what was collected since (`demo_share` 0)

The warm-up keeps the critics from falling apart at the switch: their first online targets are of states the
policy visits. The paper's choices: 5,000 warm-up steps, UTD 4, 10 critics, actor lr 1e-4.
"""

from robo_rl.algos.calql import CalQlLearner, check_offline
from robo_rl.algos.offpolicy import Temperature, make_adam
from robo_rl.errors import UserError
from robo_rl.options import WsrlOptions


class WsrlLearner(CalQlLearner):
    """Conservative offline, plain online."""

    options: WsrlOptions

    def begin_online(self) -> None:
        """The switch; does nothing the second time, as after a resume."""
        if not self.conservative:
            return
        o, self.conservative = self.options, False
        self.critics.target.load_state_dict(self.critics.critic.state_dict())
        self.critics.opt = make_adam(self.critics.params, o.critic_lr)
        self.actor_opt = make_adam(self.actor_params, o.lr)
        self.alpha = Temperature(o.alpha, o.alpha_lr, self.alpha.target, self.alpha.log.device)

    def state_dict(self) -> dict:
        return super().state_dict() | {"conservative": self.conservative}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.conservative = state["conservative"]


def make(policy, options: WsrlOptions, seed: int, demos=None) -> WsrlLearner:
    """Learner for a squashed Gaussian policy."""
    check_offline("wsrl", policy)
    if options.demo_share:
        raise UserError(
            f"wsrl keeps no offline data online: --rl.demo-share must be 0, got {options.demo_share}"
        )
    return WsrlLearner(policy, options, seed)
