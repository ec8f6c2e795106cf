"""The embedded simulator: contract, experts, snapshots, starts, threads, latency, endings, randomisation."""

import mujoco
import numpy as np
import pytest

import sims
from robo_rl.errors import UserError
from sims.check import check_env
from sims.mujoco import LOCOMOTION, TASKS, model, parse_randomise, rates
from sims.mujoco.experts import either, steer
from sims.mujoco.kinematics import Arm, damped_step, rotation_error, turn
from sims.mujoco.tasks import POST, TOUCH, pair, placed, post
from sims.mujoco.tasks import TASKS as ARM

ARM_TASKS = [t for t in TASKS if t not in LOCOMOTION]


def make(task="pick_cube", n=4, **kw):
    return sims.make("mujoco", task, n, threads=kw.pop("threads", 1), **kw)


def random_actions(env, steps, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, *env.action_space.shape)).astype(np.float32)


def run_expert(env, starts, act=None):
    """(success [N], length [N]) of one episode per env under the expert, or under act(env)."""
    env.reset(options={"starts": np.asarray(starts)})
    length, over = np.zeros(env.num_envs, int), np.zeros(env.num_envs, bool)
    while not over.all():
        length += ~over
        _, _, terminated, truncated, info = env.step(env.expert_action() if act is None else act(env))
        over = terminated | truncated
    return info["success"], length


# ---------------------------------------------------------------- contract


@pytest.mark.parametrize("task", ARM_TASKS)
def test_every_task_keeps_the_env_contract(task):
    parts = check_env(lambda n: make(task, n, max_steps=12))
    assert {"snapshot", "expert", "starts", "frozen"} <= set(parts)


@pytest.mark.parametrize(
    "options",
    [
        {"control": "joint_delta", "reward": "dense"},
        {"randomise": "mass,friction,camera,latency:2"},
        {"threads": 2, "max_steps": 3},
    ],
)
def test_the_contract_holds_with_options(options):
    check_env(lambda n: make("stack_cube", n, **({"max_steps": 12} | options)))


@pytest.mark.gl
def test_the_contract_holds_with_images():
    parts = check_env(
        lambda n: make(
            "pick_by_name", n, max_steps=6, obs="rgb", image_size=32, render=True, randomise="camera"
        )
    )
    assert "render" in parts


def test_the_list_of_tasks_starts_with_the_default_and_every_arm_task_exists():
    assert TASKS[0] == "pick_cube" and sims.tasks("mujoco")[0] == "pick_cube"
    assert set(ARM_TASKS) == set(ARM)
    assert make("", 1).spec.task == "pick_cube"


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("task", ARM_TASKS)
def test_the_expert_succeeds_from_at_least_95_percent_of_200_starts(task):
    success, length = run_expert(make(task, 200, threads=2), np.arange(200))
    assert success.mean() >= 0.95, f"failed from starts {np.flatnonzero(~success)}"
    assert 0.25 < length[success].mean() / ARM[task].max_steps < 0.65


@pytest.mark.parametrize("task", ["pick_cube", "peg_insert"])
def test_the_expert_works_with_joint_control_too(task):
    success, _ = run_expert(make(task, 40, control="joint_delta"), 1000 + np.arange(40))
    assert success.mean() >= 0.93


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        ("stack_place", 4),
        ("stack_cube", 2),
        ("pick_cube", 1),
        ("peg_insert", 0),
        ("reach", 0),
        ("pick_either", 1),
    ],
)
def test_the_expert_does_one_sub_task_after_the_other(task, parts):
    env = make(task, 12)
    env.reset(options={"starts": np.arange(12)})
    seen = [env.subtask()]
    for _ in range(env.spec.max_steps):
        *_, terminated, truncated, _ = env.step(env.expert_action())
        seen.append(env.subtask())
        if (terminated | truncated).all():
            break
    seen = np.array(seen)
    assert seen.dtype == np.int64 and (seen[0] == 0).all() and (seen.max(0) == parts).all()
    for k in range(1, parts + 1):  # each for the first time after the one before it
        assert ((seen >= k).argmax(0) >= (seen >= k - 1).argmax(0)).all() and (seen == k).any(0).all()


@pytest.mark.parametrize("control", ["ee_delta", "joint_delta"])
def test_backing_out_of_an_attempt_ends_above_the_objects_with_open_fingers(control):
    env = make("stack_place", 6, control=control)
    env.reset(options={"starts": np.arange(6)})
    for _ in range(22):
        env.step(env.expert_action())
    assert (env.scene.tcp[2] < 0.12).any()
    for _ in range(40):
        env.step(env.recovery_action())
    assert (np.abs(env.scene.tcp[2] - 0.16) < 0.01).all() and (env.scene.opening > 0.9).all()
    assert np.abs(env.recovery_action()[:, :6]).max() < 0.1


def test_the_expert_succeeds_when_mass_and_friction_vary():
    success, _ = run_expert(make("pick_cube", 60, randomise="mass,friction"), 2000 + np.arange(60))
    assert success.mean() >= 0.93


def test_no_task_is_solved_by_doing_nothing_or_by_random_motion():
    for task in ARM_TASKS:
        env = make(task, 24, max_steps=20)
        rest = np.zeros(env.action_space.shape, np.float32)
        assert run_expert(env, np.arange(24), lambda e, a=rest: a)[0].mean() <= 0.05, task
        rng = np.random.default_rng(0)
        success, _ = run_expert(
            env, np.arange(24), lambda e, r=rng: r.uniform(-1, 1, e.action_space.shape).astype(np.float32)
        )
        assert success.mean() <= 0.1, task


# ---------------------------------------------------------------- exactness


def trajectory(env, acts, starts):
    out = [env.reset(options={"starts": np.asarray(starts)})[0]["state"]]
    for a in acts:
        obs, reward, *_ = env.step(a)
        out += [obs["state"], reward[:, None]]
    return np.concatenate(out, 1)


@pytest.mark.parametrize("control", ["ee_delta", "joint_delta"])
def test_a_start_gives_the_same_episode_in_any_index_and_batch_size(control):
    big = make("stack_cube", 37, control=control, reward="dense")
    acts = random_actions(big, 25)
    whole = trajectory(big, acts, np.arange(37))
    for rows in ([5], [36, 0], list(range(3, 20))):
        part = make("stack_cube", len(rows), control=control, reward="dense")
        np.testing.assert_array_equal(trajectory(part, acts[:, rows], rows), whole[rows])


def test_the_number_of_threads_changes_nothing():
    envs = [make("pick_by_name", 33, threads=t) for t in (1, 2, 3)]
    acts = random_actions(envs[0], 20)
    first, *rest = [trajectory(e, acts, np.arange(33)) for e in envs]
    for other in rest:
        np.testing.assert_array_equal(first, other)


def test_a_snapshot_taken_in_a_grasp_goes_on_bit_for_bit_and_forks_by_row():
    env = make("pick_cube", 8, reward="dense", randomise="mass,latency:1")
    env.reset(options={"starts": np.arange(8)})
    for _ in range(38):
        env.step(env.expert_action())
    saved = env.get_state()
    acts = random_actions(env, 10)
    first = [env.step(a)[0]["state"] for a in acts]
    env.set_state(saved)
    for a, want in zip(acts, first, strict=True):
        np.testing.assert_array_equal(env.step(a)[0]["state"], want)
    rows = np.array([3] * 8)
    env.set_state({k: v[rows] for k, v in saved.items()})
    for a, want in zip(acts, first, strict=True):
        np.testing.assert_array_equal(env.step(a[rows])[0]["state"], want[rows])


# ---------------------------------------------------------------- endings and rewards


def test_success_at_the_time_limit_is_terminated_and_one_step_less_is_truncated():
    _, length = run_expert(make("pick_cube", 3), [0, 1, 2])
    limit = int(length[0])
    for steps, want in ((limit, True), (limit - 1, False)):
        env = make("pick_cube", 1, max_steps=steps)
        env.reset(options={"starts": np.array([0])})
        for _ in range(steps):
            _, reward, terminated, truncated, info = env.step(env.expert_action())
        assert (terminated[0], truncated[0], info["success"][0], reward[0]) == (
            want,
            not want,
            want,
            float(want),
        )


def test_dense_rewards_add_up_to_the_progress_and_a_bonus_for_success():
    env = make("pick_cube", 6, reward="dense")
    env.reset(options={"starts": np.arange(6)})
    before, total, over = env.progress.copy(), np.zeros(6), np.zeros(6, bool)
    while not over.all():
        _, reward, terminated, truncated, info = env.step(env.expert_action())
        total += reward
        over = terminated | truncated
    assert info["success"].all()
    np.testing.assert_allclose(total, env.progress - before + 1, atol=1e-5)
    assert (env.progress > before + 0.5).all() and (env.progress <= 1).all()


def test_lifting_another_object_than_the_named_one_ends_the_episode_without_success():
    env = make("pick_by_name", 30)
    obs, _ = env.reset(options={"starts": np.arange(30)})
    named = env.scene.asked.copy()
    assert set(obs["task"]) == {f"pick up the {c} cube" for c in ("red", "green", "blue")}

    def wrong(e):
        e.scene.asked[:] = (named + 1) % 3
        action = e.expert_action()
        e.scene.asked[:] = named
        return action

    success, length = run_expert(env, np.arange(30), wrong)
    assert not success.any() and env.terminated.mean() > 0.9 and length.max() <= env.spec.max_steps


@pytest.mark.parametrize("task", ["reach_around", "pick_either"])
def test_of_two_equal_ways_the_expert_goes_each_in_half_of_the_episodes_as_the_start_says(task):
    def ways(starts):
        env, aside, over = (
            make(task, len(starts)),
            np.zeros(len(starts), np.float32),
            np.zeros(len(starts), bool),
        )
        env.reset(options={"starts": starts})
        # which side the hand has gone furthest to, of the post, or of the middle between the cubes
        while not over.all():
            *_, terminated, truncated, _ = env.step(env.expert_action())
            off = post(env.scene)[0] if task == "reach_around" else env.scene.tcp[1]
            aside, over = np.where(~over & (np.abs(off) > np.abs(aside)), off, aside), terminated | truncated
        return aside > 0

    seen = ways(np.arange(60))
    assert 0.3 < seen.mean() < 0.7
    np.testing.assert_array_equal(seen[30:], ways(np.arange(30, 60)))


def test_whoever_is_on_one_side_of_the_post_is_led_on_there_whatever_the_start_says():
    env = make("reach_around", 20)
    env.reset(options={"starts": np.arange(20)})
    for _ in range(12):
        env.step(env.expert_action())
    before, side = env.expert_action(), np.sign(post(env.scene)[0])
    apart = np.abs(post(env.scene)[0]) > POST[0] + TOUCH + 0.015
    env.starts[:] = env.starts[::-1].copy()
    assert apart.sum() >= 15 and set(side[apart]) == {-1, 1}
    np.testing.assert_array_equal(env.expert_action()[apart], before[apart])


def test_the_mean_of_the_two_ways_around_the_post_leads_into_it_within_two_chunks_and_each_way_past_it():
    env = make("reach_around", 40)
    starts = np.arange(40)
    env.reset(options={"starts": starts})
    left = either(env)
    actions = np.empty((16, 40, 7), np.float32)
    for row in actions:
        row[:] = env.expert_action()
        *_, terminated, _, _ = env.step(row)
        assert not terminated.any()
    actions[:] = (actions[:, left].mean(1) + actions[:, ~left].mean(1))[:, None] / 2
    env.reset(options={"starts": starts})
    for row in actions:
        *_, terminated, _, info = env.step(row)
    assert terminated.all() and not info["success"].any()


def test_a_hand_that_goes_straight_at_the_mark_touches_the_post_and_the_episode_ends_without_success():
    env = make("reach_around", 30)

    def straight(e):
        return steer(e, e.scene.goal, np.zeros(e.num_envs, bool))

    success, length = run_expert(env, np.arange(30), straight)
    assert not success.any() and env.terminated.all() and length.max() < 30


def test_a_stacked_pair_is_no_success_before_it_lies_on_the_mark_and_is_let_go():
    env = make("stack_place", 8)
    env.reset(options={"starts": np.arange(8)})
    stood, over = np.zeros(8, int), np.zeros(8, bool)
    while not over.all():
        stood += pair(env.scene) & (env.scene.opening > 0.65) & ~over
        _, _, terminated, truncated, info = env.step(env.expert_action())
        over = terminated | truncated
    assert info["success"].all() and (pair(env.scene) & placed(env.scene)).all()
    assert stood.min() > 5  # stacked and free, and yet not over


def test_the_state_of_pick_by_name_does_not_tell_which_object_is_named():
    env = make("pick_by_name", 1)
    start = np.array([7])
    state = env.reset(options={"starts": start})[0]["state"]
    other = env.get_state()
    other["asked"] = (other["asked"] + 1) % 3
    env.set_state(other)
    obs = env.step(np.zeros((1, 7), np.float32))[0]
    env.reset(options={"starts": start})
    same = env.step(np.zeros((1, 7), np.float32))[0]
    assert obs["task"][0] != same["task"][0]
    np.testing.assert_array_equal(obs["state"], same["state"])
    assert state.shape[1] == len(env.spec.state_names)


def test_a_closed_gripper_beside_a_high_cube_is_no_success():
    env = make("pick_cube", 2)
    env.reset(options={"starts": np.array([0, 1])})
    state = env.get_state()
    env.set_state(state)
    env._qpos[:, 9:12] = env.scene.tcp.T + [0.0, 0.1, 0.1]  # thrown up beside the hand
    _, _, terminated, _, info = env.step(np.zeros((2, 7), np.float32))
    assert env.scene.pos[0][2].min() > 0.12 and not info["success"].any() and not terminated.any()


# ---------------------------------------------------------------- commands


def test_the_hand_moves_by_what_the_action_says():
    env = make("reach", 3)
    env.reset(seed=0)
    begin, frame = env.scene.tcp.copy(), env.scene.frame.copy()
    a = np.zeros((3, 7), np.float32)
    a[0, 0], a[1, 2], a[2, 5], a[:, 6] = 0.5, -0.5, 0.5, 1
    for _ in range(8):
        env.step(a)
    for _ in range(30):
        env.step(a * [0, 0, 0, 0, 0, 0, 1])
    moved, turned = env.scene.tcp - begin, rotation_error(frame, env.scene.frame)
    np.testing.assert_allclose(moved[:, 0], [0.08, 0, 0], atol=2e-3)
    np.testing.assert_allclose(moved[:, 1], [0, 0, -0.08], atol=2e-3)
    np.testing.assert_allclose(turned[:, 2], [0, 0, np.sin(0.4)], atol=5e-3)
    np.testing.assert_allclose(turned[:, :2], 0, atol=5e-3)


def test_a_pushed_down_hand_stops_at_the_table_and_its_target_does_not_wind_up():
    env = make("reach", 1, max_steps=200)
    env.reset(seed=0)
    down = np.array([[0, 0, -1, 0, 0, 0, -1]], np.float32)
    for _ in range(60):
        env.step(down)
    low = env.scene.tcp[2, 0]
    for _ in range(15):
        env.step(-down)
    assert 0 < low < 0.03 and env.scene.tcp[2, 0] > low + 0.1


def test_latency_delays_commands_by_exactly_k_steps():
    acts = random_actions(make(n=2), 20)
    rest = np.zeros((2, 7), np.float32)
    rest[:, 6] = 1
    late, plain = make(n=2, randomise="latency:3"), make(n=2)
    start = {"options": {"starts": np.array([4, 5])}}
    late.reset(**start), plain.reset(**start)
    for k in range(20):
        x = late.step(acts[k])[0]["state"]
        y = plain.step(acts[k - 3] if k >= 3 else rest)[0]["state"]
        np.testing.assert_array_equal(x, y)


def test_randomised_masses_and_frictions_come_from_the_start_alone():
    env = make("pick_cube", 40, randomise="mass,friction,camera")
    env.reset(options={"starts": np.arange(40)})
    body, geom = env.model.body("cube").id, env.model.geom("cube").id
    mass = env.batch.expand("body_mass")[:, body].copy() / env.model.body_mass[body]
    slip = env.batch.expand("geom_friction")[:, geom, 0].copy() / env.model.geom_friction[geom, 0]
    for factor in (mass, slip):
        assert 0.7 <= factor.min() < 0.8 and 1.2 < factor.max() <= 1.3
    assert abs(np.corrcoef(mass, slip)[0, 1]) < 0.5
    eye = env.batch.expand("cam_pos").copy()
    assert 0.005 < np.abs(eye - env.model.cam_pos).max() <= 0.03
    env.reset(options={"starts": np.arange(40)[::-1].copy()})
    np.testing.assert_array_equal(env.batch.expand("body_mass")[::-1, body] / env.model.body_mass[body], mass)
    np.testing.assert_array_equal(env.batch.expand("cam_pos")[::-1], eye)


# ---------------------------------------------------------------- kinematics


def test_kinematics_agree_with_mujoco():
    mj = mujoco.MjModel.from_xml_string(model.scene_xml(""))
    data = mujoco.MjData(mj)
    q = (np.array(model.HOME)[:, None] + np.random.default_rng(0).uniform(-0.6, 0.6, (7, 20))).astype(
        np.float32
    )
    arm = Arm(20)
    arm.forward(q)
    jac, last = arm.jacobian(), mj.body("link7").id
    turned = np.array(
        [
            [np.cos(model.HAND_YAW), -np.sin(model.HAND_YAW), 0],
            [np.sin(model.HAND_YAW), np.cos(model.HAND_YAW), 0],
            [0, 0, 1],
        ]
    )
    for i in range(20):
        data.qpos[:7] = q[:, i]
        mujoco.mj_forward(mj, data)
        axes = data.xmat[last].reshape(3, 3)
        tip = data.xpos[last] + axes[:, 2] * model.TOOL
        both = np.zeros((2, 3, mj.nv))
        mujoco.mj_jac(mj, data, both[0], both[1], tip, last)
        np.testing.assert_allclose(arm.tcp[:, i], tip, atol=3e-6)
        np.testing.assert_allclose(arm.frame[:, :3, i], (axes @ turned).T, atol=3e-6)
        np.testing.assert_allclose(jac[:, :, i], both.reshape(6, -1)[:, :7], atol=5e-6)
    pads = np.stack([data.geom(f"{side}_pad").xpos for side in ("left", "right")])
    assert (pads[0] - pads[1]) @ arm.frame[1, :3, -1] > 0.01  # the fingers open along the frame's second axis


def test_the_damped_step_solves_its_equation():
    rng = np.random.default_rng(1)
    jac = rng.normal(size=(6, 7, 9)).astype(np.float32)
    twist = rng.normal(size=(6, 9)).astype(np.float32)
    got = damped_step(jac, twist, damping=0.1)
    for i in range(9):
        j = jac[:, :, i].astype(float)
        want = j.T @ np.linalg.solve(j @ j.T + 0.01 * np.eye(6), twist[:, i])
        np.testing.assert_allclose(got[:, i], want, rtol=1e-3, atol=1e-4)


def test_a_frame_stays_orthonormal_over_a_thousand_turns():
    arm = Arm(4)
    arm.forward(np.repeat(np.array(model.HOME, np.float32)[:, None], 4, 1))
    frame, w = arm.frame, np.random.default_rng(0).uniform(-0.1, 0.1, (5, 4)).astype(np.float32)
    w[3:] = w[:2]
    for _ in range(1000):
        frame = turn(frame, w)
    gram = np.einsum("crn,drn->cdn", frame[:, :3], frame[:, :3])
    np.testing.assert_allclose(gram, np.eye(3)[:, :, None].repeat(4, 2), atol=1e-3)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("kw", "says"),
    [
        ({"task": "pick_cub"}, "pick_cube"),
        ({"control": "torque"}, "ee_delta"),
        ({"device": "cuda"}, "cpu"),
        ({"max_steps": -1}, "max_steps"),
        ({"threads": -1}, "threads"),
        ({"randomise": "wind"}, "mass, friction, camera"),
        ({"randomise": "latency"}, "latency:2"),
        ({"randomise": "latency:many"}, "latency:2"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(kw, says):
    with pytest.raises(UserError, match="."):
        try:
            make(**kw)
        except UserError as e:
            assert all(word in str(e) for word in says.split(", ")), str(e)
            raise


def test_randomise_is_a_comma_list():
    assert parse_randomise(" mass , latency:3") == ({"mass"}, 3)
    assert parse_randomise("") == (frozenset(), 0)


def test_step_before_reset_and_a_partial_first_reset_are_refused():
    env = make(n=2)
    with pytest.raises(UserError, match="reset"):
        env.step(np.zeros((2, 7), np.float32))
    with pytest.raises(UserError, match="first reset"):
        env.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(UserError, match="render=True"):
        env.render()


def test_a_snapshot_of_another_task_or_with_a_missing_part_is_refused():
    env, other = make(n=2), make("stack_cube", 2)
    env.reset(seed=0), other.reset(seed=0)
    with pytest.raises(UserError, match="physics"):
        env.set_state(other.get_state())
    with pytest.raises(UserError, match="starts"):
        env.set_state({"physics": env.get_state()["physics"]})


def test_rates_measure_the_env_and_the_bare_batch_on_the_same_physics():
    measured = rates("reach", 16, 1, seconds=0.1)
    assert set(measured) >= {"env", "raw"} and min(measured.values()) > 500
