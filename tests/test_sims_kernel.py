"""The arm's compiled control step is that of NumPy, bit for bit."""

import numpy as np
import pytest
from arm_numpy import NumpyArmEnv

from sims.mujoco.env import MujocoArmEnv
from sims.mujoco.tasks import TASKS


def both(task: str, n: int, control: str, latency: int) -> list[MujocoArmEnv]:
    kinds = frozenset({"mass", "friction"}) if n == 2 else frozenset()
    return [
        cls(TASKS[task], n, False, True, control, 64, 1, 25, kinds, latency, False)
        for cls in (MujocoArmEnv, NumpyArmEnv)
    ]


def assert_same(a, b, where: str) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(
            np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8), where
        )


@pytest.mark.parametrize("n", [1, 2, 17])
@pytest.mark.parametrize("task", TASKS)
def test_random_episodes_are_the_same_to_the_last_bit_as_in_numpy(task, n):
    for control in ("ee_delta", "joint_delta"):
        ours, theirs = both(task, n, control, 2 if n == 2 else 0)
        rng = np.random.default_rng(0)
        assert_same(*([e.reset(seed=3)[0]["state"]] for e in (ours, theirs)), "reset")
        for k in range(40):
            a = (
                ours.expert_action()
                if k % 3 == 0
                else rng.uniform(-1.2, 1.2, ours.action_space.shape).astype(np.float32)
            )
            steps = [e.step(a) for e in (ours, theirs)]
            assert_same(
                *(
                    [
                        s[0]["state"],
                        *s[1:4],
                        s[4]["success"],
                        e.joints,
                        e.target,
                        e.attitude,
                        e.grip,
                        e.batch.state,
                    ]
                    for s, e in zip(steps, (ours, theirs), strict=True)
                ),
                f"{control}, step {k}",
            )
            over = steps[0][2] | steps[0][3]
            if over.any() and k % 2:
                assert_same(
                    *([e.reset(options={"reset_mask": over})[0]["state"]] for e in (ours, theirs)),
                    f"reset at {k}",
                )
