"""`robo_rl.contract` under the name the simulators use."""

from robo_rl.contract import RESET_OPTIONS, action_spaces, observation_spaces, read_actions, read_reset

__all__ = ["RESET_OPTIONS", "action_spaces", "observation_spaces", "read_actions", "read_reset"]
