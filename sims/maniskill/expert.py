"""Scripted experts for ManiSkill's Panda tasks, from the privileged state of one CPU env. No planner, no
memory.

Each expert looks at where things are now and answers with a `Goal`: where the tool centre point (TCP) should
go and whether the gripper is open. Phases are regions of the state, not counters: "above the cube", "around
it", "holding it". `ManiSkillArm.action` turns the goal into the env's own control mode by damped least
squares (DLS) on the arm Jacobian.

Frames: world, z up, table top at z = 0. The TCP's z axis points out of the hand, its y axis is the closing
direction.
Units: m, rad. Quaternions wxyz.
"""

from dataclasses import dataclass

import numpy as np

# TCP axes (columns) of a hand that points straight down
DOWN = np.array([[1.0, 0, 0], [0, -1, 0], [0, 0, -1]])
# what an action of 1 commands per control step: 0.1 rad per joint, or 0.1 m and 0.1 rad of the TCP
REACH = 0.1
# A position drive of stiffness 1000 and damping 100 closes about 0.4 of a commanded step in one period of
# 0.05 s.
GAIN = 2.0
DAMPING = 0.02


@dataclass(frozen=True, slots=True)
class Goal:
    position: np.ndarray  # of the TCP [3]
    rotation: np.ndarray  # of the TCP [3, 3]
    open: bool  # gripper


def rotation(q: np.ndarray) -> np.ndarray:
    """[3, 3] of a unit quaternion wxyz."""
    w, x, y, z = (float(v) for v in q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def rotvec(r: np.ndarray) -> np.ndarray:
    """Axis times angle [3] of a rotation matrix, angle in [0, pi)."""
    v = np.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]])
    s = 0.5 * np.sqrt(v @ v)
    angle = np.arctan2(s, 0.5 * (np.trace(r) - 1))
    return v * (0.5 if s < 1e-9 else angle / (2 * s))


def about_y(angle: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def about_z(angle: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


class ManiSkillArm:
    """The Panda of one unwrapped CPU env: where its TCP is, its Jacobian, and actions that move it to a
    goal."""

    def __init__(self, env, middle: np.ndarray, half: np.ndarray):
        self.hand = env.control_mode == "pd_ee_delta_pose"
        self.absolute = env.control_mode == "pd_joint_pos"
        self.middle, self.half = middle[:7], half[:7]  # `build.action_map` of the joints
        self.robot = env.agent.robot._objs[0]
        self.tcp = env.agent.tcp._objs[0]
        self.joints = [j._objs[0] for j in env.agent.robot.active_joints[:7]]
        limits = self.robot.qlimits[:7]
        self.low, self.high = limits[:, 0], limits[:, 1]

    def read(self) -> None:
        """Position, rotation of the TCP and finger opening [m] (0 .. 0.04 each) now."""
        pose = self.tcp.entity_pose
        self.p, self.r = pose.p.astype(float), rotation(pose.q)
        self.q = self.robot.qpos.astype(float)
        self.fingers = float(self.q[7:9].mean())

    def jacobian(self) -> np.ndarray:
        """[6, 7]: TCP velocity and angular velocity in the world per joint velocity; joints turn about their
        x axis."""
        poses = [j.global_pose for j in self.joints]
        axes = np.array([rotation(p.q)[:, 0] for p in poses])
        return np.vstack((np.cross(axes, self.p - np.array([p.p for p in poses])).T, axes.T))

    def action(self, goal: Goal) -> np.ndarray:
        """float32[A] in [-1, 1]: joint deltas or targets (8) or TCP deltas in the base frame (7), and the
        gripper."""
        # inverse kinematics gives up on poses out of reach
        gain = 1.0 if self.hand else GAIN
        dp = gain * (goal.position - self.p)
        dr = gain * rotvec(goal.rotation @ self.r.T)
        if self.hand:  # base and world frames are parallel
            dp *= min(1.0, REACH / max(1e-9, np.abs(dp).max()))
            dr *= min(1.0, REACH / max(1e-9, np.linalg.norm(dr)))
            move = np.concatenate((dp, dr))
        else:
            twist = np.concatenate((dp, dr))
            twist[:3] *= min(1.0, 0.15 / max(1e-9, np.linalg.norm(dp)))
            twist[3:] *= min(1.0, 0.4 / max(1e-9, np.linalg.norm(dr)))
            move = self.solve(twist)
        if self.absolute:
            move = REACH * (self.q[:7] + move - self.middle) / self.half
        return np.append(np.clip(move / REACH, -1, 1), 1.0 if goal.open else -1.0).astype(np.float32)

    def solve(self, twist: np.ndarray) -> np.ndarray:
        """Joint step [7]: min |J dq - twist|^2 + damping^2 |dq|^2, scaled to |dq| <= REACH, off the
        limits."""
        j, q = self.jacobian(), self.q[:7]
        free = np.ones(7, bool)
        dq = np.zeros(7)
        for _ in range(3):
            jf = j[:, free]
            dq[:] = 0
            dq[free] = jf.T @ np.linalg.solve(jf @ jf.T + DAMPING**2 * np.eye(6), twist)
            dq *= min(1.0, REACH / max(1e-9, np.abs(dq).max()))
            beyond = free & ((q + dq < self.low + 0.02) & (dq < 0) | (q + dq > self.high - 0.02) & (dq > 0))
            if not beyond.any():
                break
            free &= ~beyond
        return dq


def _pose(actor) -> tuple[np.ndarray, np.ndarray]:
    pose = actor._objs[0].pose
    return pose.p.astype(float), rotation(pose.q)


def _grasp_rotation(arm: ManiSkillArm, cube: np.ndarray, obstacle: np.ndarray | None = None) -> np.ndarray:
    """Hand straight down, closing on two faces of the cube: the least turn, away from an obstacle beside
    it."""
    yaw = np.arctan2(cube[1, 0], cube[0, 0])
    now = np.arctan2(arm.r[0, 1], -arm.r[1, 1])  # the y axis of DOWN turned by yaw is (sin yaw, -cos yaw)
    best, least = 0.0, np.inf
    for k in range(4):
        turn = (yaw + k * np.pi / 2 - now + np.pi) % (2 * np.pi) - np.pi
        cost = abs(turn)
        if obstacle is not None:
            closing = np.array([np.sin(now + turn), -np.cos(now + turn)])
            cost += 4 * max(0.0, abs(closing @ obstacle) - 0.6)
        if cost < least:
            best, least = now + turn, cost
    return about_z(best) @ DOWN


def _fetch(arm: ManiSkillArm, p: np.ndarray, r: np.ndarray) -> Goal:
    """Come down on an object at p, gripper open and turned to r, and close around it."""
    side = np.linalg.norm((p - arm.p)[:2])
    turn = np.linalg.norm(rotvec(r @ arm.r.T))
    above = np.clip(4 * (side - 0.01), 0, 0.1) + np.clip(0.3 * (turn - 0.1), 0, 0.06)
    around = side < 0.012 and turn < 0.2 and abs(p[2] - arm.p[2]) < 0.012
    return Goal(p + [0, 0, above], r, not around)


def _holding(arm: ManiSkillArm, p: np.ndarray, width: float) -> bool:
    return bool(np.linalg.norm(p - arm.p) < 0.025 and arm.fingers < width + 0.0015)


def pick_cube(env, arm: ManiSkillArm) -> Goal:
    p, r = _pose(env.cube)
    goal = env.goal_site._objs[0].pose.p.astype(float)
    if _holding(arm, p, 0.02):
        return Goal(arm.p + goal - p, _upright(arm), False)
    return _fetch(arm, p, _grasp_rotation(arm, r))


def _upright(arm: ManiSkillArm) -> np.ndarray:
    """The hand's present heading, pointing straight down."""
    return about_z(np.arctan2(arm.r[1, 0], arm.r[0, 0])) @ DOWN


def stack_cube(env, arm: ManiSkillArm) -> Goal:
    """Grasp cube A, carry it above cube B, let go and rise."""
    a, ra = _pose(env.cubeA)
    b, _ = _pose(env.cubeB)
    off = b + [0, 0, 0.04] - a
    side = np.linalg.norm(off[:2])
    if side < 0.015 and abs(off[2]) < 0.004:  # on top: let go and leave upwards
        return Goal(arm.p + [0, 0, 0.05 if arm.fingers > 0.03 else 0.0], _upright(arm), True)
    if _holding(arm, a, 0.02):
        clear = np.clip(3 * (side - 0.006), 0, 0.05)
        low = off[2] + clear > 0.01  # still below the other cube's top: straight up first
        move = np.array([*(off[:2] * (0.2 if low and side < 0.08 else 1.0)), off[2] + clear])
        return Goal(arm.p + move, _upright(arm), False)
    beside = (b - a)[:2]
    near = np.linalg.norm(beside)
    return _fetch(arm, a, _grasp_rotation(arm, ra, beside / near if near < 0.1 else None))


def _shove(arm: ManiSkillArm, start: np.ndarray, end: np.ndarray, along: float) -> Goal:
    """Bring the closed hand to `start` beside a cube, from above, then sweep in x to `end`; along: the sign
    of x."""
    gap = start - arm.p
    down = arm.p[2] < start[2] + 0.02 and abs(gap[1]) < 0.015
    if down and -0.15 < along * gap[0] < 0.03:
        return Goal(np.array([end[0], start[1], start[2]]), DOWN, False)
    side = np.linalg.norm(gap[:2])
    return Goal(start + [0, 0, np.clip(3 * (side - 0.015), 0, 0.12)], DOWN, False)


def push_cube(env, arm: ManiSkillArm) -> Goal:
    p, _ = _pose(env.obj)
    goal = env.goal_region._objs[0].pose.p.astype(float)
    return _shove(arm, np.array([p[0] - 0.045, p[1], 0.02]), goal - [0.02, 0, 0], 1.0)


def pull_cube(env, arm: ManiSkillArm) -> Goal:
    p, _ = _pose(env.obj)
    goal = env.goal_region._objs[0].pose.p.astype(float)
    return _shove(arm, np.array([p[0] + 0.045, p[1], 0.02]), goal + [0.02, 0, 0], -1.0)


def lift_peg_upright(env, arm: ManiSkillArm) -> Goal:
    """Turn the peg by 90 degrees about the closing axis. The wrist cannot do that from straight above: grasp
    with the hand leaning away from the base, end leaning towards it, and draw the peg nearer so that the
    wrist reaches."""
    p, r = _pose(env.peg)
    up = -r[:, 0] if r[0, 0] > 0 else r[:, 0]  # the end towards the base rises
    grip = p + 0.03 * up
    if np.linalg.norm(grip - arm.p) < 0.04 and arm.fingers < 0.0265:
        tilt = np.arctan2(up[2], np.hypot(up[0], up[1]))
        left = np.pi / 2 - tilt
        axis = np.cross(up, [0, 0, 1.0])
        axis /= max(1e-6, np.linalg.norm(axis))
        height = 0.12 * np.sin(tilt) + 0.025 * np.cos(tilt) + np.clip(0.1 * (left - 0.05), 0, 0.01)
        turn = _turned(axis * min(left, 0.3))
        move = (turn - np.eye(3)) @ (arm.p - p) + [np.clip(-0.12 - p[0], -0.02, 0.02), 0, height - p[2]]
        return Goal(arm.p + move, turn @ arm.r, False)
    yaw = np.arctan2(-up[1], -up[0])
    lean = np.clip(0.6 + 2 * grip[0], 0.35, 0.75)
    return _fetch(arm, grip, about_z(yaw) @ about_y(-lean) @ DOWN)


def _turned(v: np.ndarray) -> np.ndarray:
    """[3, 3] of an axis times angle."""
    angle = np.linalg.norm(v)
    if angle < 1e-9:
        return np.eye(3)
    x, y, z = v / angle
    k = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * k + (1 - np.cos(angle)) * k @ k


EXPERTS = {
    "PickCube-v1": pick_cube,
    "PushCube-v1": push_cube,
    "StackCube-v1": stack_cube,
    "PullCube-v1": pull_cube,
    "LiftPegUpright-v1": lift_peg_upright,
}
