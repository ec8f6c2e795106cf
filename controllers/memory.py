"""The record of numbers that one law's tick works on, and the tick compiled for it."""

from functools import cache

import numpy as np
from numba import config

from controllers.tick import tick
from robo_rl.compiled import Announcement


def record(n: int) -> np.ndarray:
    """Options and memory [1] of the law of an arm of n joints, all zero. Units as in `LawOptions` and
    `Law`."""
    memory = np.zeros(
        1,
        np.dtype(
            [
                # options
                *((name, float, 6) for name in ("stiffness", "fixed_damping", "error_clip", "clip_target")),
                *(
                    (name, float)
                    for name in (
                        "damping_ratio",
                        "ratio_target",
                        "target_speed",
                        "target_turn",
                        "filter_time",
                        "feed_linear",
                        "feed_angular",
                        "posture_cap",
                        "posture_speed",
                        "limit_margin",
                        "limit_torque",
                        "torque_rate",
                        "ramp",
                        "regularisation",
                        "least",
                        "command_timeout",
                    )
                ),
                *((name, float, n) for name in ("kn", "dn", "low", "high", "most", "phi1", "phi2", "phi3")),
                *(
                    (name, np.int64)
                    for name in (
                        "operational",
                        "tool_axes",
                        "damping_given",
                        "friction",
                        "nullspace",
                        "rigid",
                    )
                ),
                # memory: stiffness and damping, what was commanded, what the joints carry
                *((name, float, 6) for name in ("k", "k_target", "k_pace", "d", "masses", "feed")),
                ("pull", float, 2),  # largest static force and moment of the springs [N], [N m]
                *(
                    (name, float)
                    for name in ("gain", "k_age", "dq_age", "feed_age", "mass_age", "lag", "fade")
                ),
                *((name, float, n) for name in ("q_ref", "q_target", "dq_ref", "tau", "residual")),
                *((name, np.int64) for name in ("feed_tool_axes", "faults", "stale", "carry", "opens")),
                # memory: the reference
                *(
                    (f"{name}{what}", float, size)
                    for name in ("target_", "limited_", "")
                    for what, size in (("pos", 3), ("quat", 4))
                ),
                ("velocity", float, 6),
                ("acceleration", float, 6),
                ("axis", float, 3),
                # of limited_quat's turn about `axis` [rad]; below 0: not looked at since the target came
                ("left", float),
                ("settled", np.int64),
                # a tick's own
                ("a", float, (6, 6)),
                ("factor", float, (6, 6)),
                ("wrench", float, 6),
                ("move", float, 6),
                ("posture", float, n),
                ("axes", float, (6, 6)),
                ("spread", float, (6, 6)),
                ("along", float, 6),
                ("out", float, n),
            ],
            align=True,
        ),
    )
    plain = config.DISABLE_JIT  # pyright: ignore[reportAttributeAccessIssue]  # numba sets it at import
    # plain Python needs one to read fields as attributes
    return memory.view(np.recarray) if plain else memory


@cache
def prepare(n: int) -> None:
    """Compile, or load, the tick of n joints: seconds that a loop in real time does not have."""
    announcement = Announcement("the control law")
    try:
        tick(
            record(n),
            1e-3,
            np.zeros(2 * n),
            np.zeros((6, n)),
            np.zeros((6, n)),
            np.zeros(n),
            np.zeros(3),
            np.zeros(4),
        )
    finally:
        announcement.close()
