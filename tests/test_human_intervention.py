import numpy as np
import pytest
import torch
from toys import PointReach

import sims
from robo_rl.errors import UserError
from robo_rl.human.intervention import (
    CORRECTION,
    PAUSE,
    POLICY,
    RECOVERY,
    Intervention,
    InterventionEnv,
    NoOperator,
    hold_action,
)
from robo_rl.human.operators import ScriptedOperator, ScriptedOperatorOptions
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.replay import Replay
from robo_rl.replay_collector import ReplayCollector
from robo_rl.rollout import Collector
from robo_rl.types import ActionAxis, ControlSpec
from sims.check import check_env


class Plan(NoOperator):
    """Helps in given steps: {step: (phase, action)} for robot 0 alone."""

    def __init__(self, plan):
        self.plan = plan

    def intervene(self, view):
        phase, actions = np.zeros(len(view.over), np.uint8), np.zeros_like(view.proposed)
        if int(view.steps[0]) in self.plan:
            phase[0], actions[0] = self.plan[int(view.steps[0])]
        return Intervention(actions, phase)


def far(n=2, limit=40):
    """Points too far from their goals to get there."""
    env = PointReach(n, limit=limit)
    return env


def drive(env, steps, action=(0.5, 0.0)):
    """Infos of `steps` steps with one action."""
    env.reset(options={"starts": np.arange(env.num_envs)})
    env.goal[:] = 99
    return [env.step(np.tile(np.array(action, np.float32), (env.num_envs, 1)))[4] for _ in range(steps)]


def arm(n):
    return sims.make("mujoco", "reach", n, max_steps=25, threads=1)


def test_with_nobody_the_env_is_itself_and_the_contract_holds():
    assert "snapshot" in check_env(lambda n: InterventionEnv(arm(n), NoOperator()))


def test_with_a_scripted_person_the_contract_holds_too():
    person = ScriptedOperatorOptions(
        notice_time=0.1,
        disagreement=0.3,
        reaction_time=0.1,
        slip_rate=2.0,
        recovery_time=0.15,
        fatigue=1.0,
        agree_time=0.1,
        least_time=0.2,
    )
    helped = []

    def make(n):
        env = arm(n)
        helped.append(ScriptedOperator(env, person))
        return InterventionEnv(env, helped[-1])

    done = check_env(make)
    assert {"snapshot", "starts", "expert"} <= {*done} and helped[0].stats["helped"].sum() > 10


def test_an_env_without_snapshots_stays_without():
    class Plain(PointReach):
        get_state = property(lambda self: (_ for _ in ()).throw(AttributeError("get_state")))

    assert not hasattr(InterventionEnv(Plain(2), NoOperator()), "get_state") and not hasattr(
        InterventionEnv(Plain(2), NoOperator()), "images"
    )
    assert hasattr(InterventionEnv(PointReach(2), NoOperator()), "get_state")


def test_the_persons_action_replaces_the_policys_from_the_next_step_and_is_recorded():
    env = InterventionEnv(far(), Plan({3: (CORRECTION, (-1, 1)), 4: (RECOVERY, (-1, 1))}), blend=0)
    infos = drive(env, 6)
    source, phase = (np.array([i[k] for i in infos]) for k in ("source", "phase"))
    assert source[:, 0].tolist() == [0, 0, 0, 1, 1, 0] and not source[:, 1].any()
    assert phase[:, 0].tolist() == [0, 0, 0, CORRECTION, RECOVERY, 0] and not phase[:, 1].any()
    assert infos[3]["executed"][0].tolist() == [-1, 1] and infos[3]["executed"][1].tolist() == [0.5, 0]
    assert source.dtype == phase.dtype == np.uint8 and infos[0]["executed"].dtype == np.float32


def test_while_a_command_is_blended_it_is_nobodys_lesson():
    # four steps of 0.1 s
    env = InterventionEnv(far(), Plan(dict.fromkeys(range(3, 10), (CORRECTION, (-1, 1)))), blend=0.4)
    infos = drive(env, 12)
    assert [int(i["phase"][0]) for i in infos] == [0, 0, 0] + [PAUSE] * 3 + [CORRECTION] * 4 + [0, 0]
    own = [np.allclose(i["executed"][0], (-1, 1)) for i in infos]
    assert own == [i["phase"][0] == CORRECTION for i in infos]
    assert [int(i["source"][0]) for i in infos[3:12]] == [1] * 9  # blends back to the policy too


def test_who_acts_next_is_known_before_the_step():
    env = InterventionEnv(far(), Plan({2: (CORRECTION, (1, 1))}), blend=0.3)
    env.reset(seed=0)
    env.goal[:] = 99
    told, was = [], []
    for _ in range(8):
        told.append(env.sources().tolist())
        was.append(env.step(np.zeros((2, 2), np.float32))[4]["source"].tolist())
    assert told == was and [w[0] for w in was] == [0, 0, 1, 1, 1, 0, 0, 0]  # taken over, blended out, policy


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_no_step_jumps_by_more_than_the_blend_allows(steps):
    rng = np.random.default_rng(0)
    plan = {
        t: (CORRECTION, rng.choice([-1, 1], 2)) if t % 7 < 4 else (PAUSE, (0, 0))
        for t in range(4, 30)
        if t not in (11, 12, 20)
    }
    held = {t: plan[t][1] for t in plan}
    for t in held:  # the person holds one command per stretch
        if t - 1 in held and plan[t][0] == plan[t - 1][0]:
            plan[t] = (plan[t][0], plan[t - 1][1])
    env = InterventionEnv(far(), Plan(plan), blend=steps * 0.1)
    executed = np.array([i["executed"][0] for i in drive(env, 38)])
    widest = 2.0  # between -1 and 1
    assert np.abs(np.diff(executed, axis=0)).max() <= widest / steps + 1e-6
    assert np.allclose(executed[-1], (0.5, 0.0))
    if steps == 1:
        assert np.abs(np.diff(executed, axis=0)).max() > 1  # without a blend it does jump


def test_source_is_zero_exactly_where_the_policys_action_ran():
    env = InterventionEnv(
        far(), Plan({5: (PAUSE, (0, 0)), 6: (CORRECTION, (1, -1)), 7: (CORRECTION, (1, -1))}), blend=0.3
    )
    for info in drive(env, 20):
        ran = (info["executed"] == np.array([0.5, 0], np.float32)).all(1)
        assert (ran == (info["source"] == 0)).all()


def test_a_paused_robot_holds_and_the_others_go_on():
    env = InterventionEnv(far(), Plan(dict.fromkeys(range(4, 30), (PAUSE, (0, 0)))), blend=0.2)
    drive(env, 7)
    at = env.pos.copy()
    env.step(np.full((2, 2), 0.5, np.float32))
    assert np.allclose(env.pos[0], at[0]) and not np.allclose(env.pos[1], at[1])


def test_holding_keeps_absolute_axes_where_they_are_and_stops_the_rest():
    axes = (
        ActionAxis("dx", "m", -0.1, 0.1, "delta"),
        ActionAxis("v", "m/s", -1.0, 3.0, "rate"),
        ActionAxis("gripper", "m", 0.0, 0.1, "absolute"),
    )
    got = hold_action(ControlSpec("toy", "t", axes, 0.05, 10), np.array([[0.3, 0.9, -0.7]], np.float32))
    assert np.allclose(got, [[0, -0.5, -0.7]])  # -0.5 of -1 .. 3 is 0 m/s


def test_a_number_that_is_not_finite_from_the_device_pauses_the_robot():
    env = InterventionEnv(far(), Plan({2: (CORRECTION, (np.nan, 0))}), blend=0)
    infos = drive(env, 4)
    assert infos[2]["phase"].tolist() == [PAUSE, POLICY] and infos[2]["executed"][0].tolist() == [0, 0]


@pytest.mark.parametrize(
    "intervention, words",
    [
        (Intervention(np.zeros((3, 2)), np.zeros(2, np.uint8)), r"actions \(2, 2\)"),
        (Intervention(np.zeros((2, 2)), np.array([0, 9])), "phase must be 0 .. 3"),
    ],
)
def test_a_wrong_help_is_refused(intervention, words):
    class Odd(NoOperator):
        def intervene(self, view):
            return intervention

    env = InterventionEnv(far(), Odd())
    env.reset(seed=0)
    with pytest.raises(UserError, match=words):
        env.step(np.zeros((2, 2), np.float32))


def scripted(limit=40, n=1, seed=0, **person):
    env = PointReach(n, limit=limit)
    operator = ScriptedOperator(env, ScriptedOperatorOptions(**{"slip_rate": 0.0, **person}), seed)
    return InterventionEnv(env, operator, blend=0), operator


def helped(env, steps, wrong=True):
    """sources [steps, N] of an episode whose policy drives away from the goal (or towards it)."""
    env.reset(options={"starts": np.arange(env.num_envs)})
    return np.array([env.step(env.expert_action() * (-1 if wrong else 1))[4]["phase"] for _ in range(steps)])


def test_a_scripted_person_notices_reacts_and_brings_the_episode_to_success():
    env, operator = scripted(notice_time=0.3, disagreement=0.3, reaction_time=0.5, late_share=1)
    phases = helped(env, 40)[:, 0]
    first = int(np.argmax(phases > 0))
    assert 5 <= first <= 15  # 3 steps to notice, about 5 to react
    assert env.env.over[0][0] and operator.stats["helped"][0] == 1
    assert operator.stats["seconds"][0] == pytest.approx(0.1 * (phases > 0).sum())


def test_a_scripted_person_leaves_a_good_policy_alone():
    env, operator = scripted(late_share=1)
    assert not helped(env, 40, wrong=False).any() and env.env.over[0][0] and operator.stats["asked"][0] == 0


def test_the_person_hands_back_once_policy_and_person_agree():
    env, _operator = scripted(
        notice_time=0.2, disagreement=0.3, reaction_time=0.1, late_share=1, agree_time=0.2, least_time=0.3
    )
    env.reset(options={"starts": np.arange(1)})
    env.goal[:] = 99
    phases = [env.step(env.expert_action() * (-1 if t < 8 else 1))[4]["phase"][0] for t in range(20)]
    assert CORRECTION in phases and phases[-1] == POLICY


def test_a_person_who_has_given_their_time_lets_go_and_does_not_come_back():
    env, _ = scripted(
        n=4,
        limit=400,
        notice_time=0.1,
        disagreement=0.1,
        reaction_time=0.1,
        agree_time=60,
        late_share=0,
        leave_after=0.1,
    )
    env.reset(options={"starts": np.arange(4)})
    env.goal[:] = 99
    held = np.array([env.step(-env.expert_action())[4]["phase"] > 0 for _ in range(100)]).sum(1)
    assert 60 <= held.sum() < 60 + 4 and not held[-50:].any()  # 6 s of 0.1 s, by whole steps of four robots


def test_a_person_who_watches_a_third_of_the_episodes_helps_in_a_third_of_them():
    env, operator = scripted(
        n=300, notice_time=0.1, disagreement=0.1, reaction_time=0.1, attended_share=0.33, late_share=0.2
    )
    came = (helped(env, 30) > 0).any(0)
    assert 0.25 < came.mean() < 0.42 and (operator.stats["asked"] > 0).tolist() == came.tolist()


def test_a_tired_person_reacts_later():
    fresh, tired = (
        scripted(n=32, limit=200, late_share=1)[1],
        scripted(n=32, limit=200, fatigue=2.0, late_share=1)[1],
    )
    for op in (fresh, tired):
        op.rows["work"][:] = 600  # one minute of 0.1 s steps
        op.request_help(np.ones(32, bool))
    assert tired.stats["reaction"].sum() == pytest.approx(3 * fresh.stats["reaction"].sum())


def test_a_person_who_recovers_backs_out_first_and_corrects_once_there_or_out_of_time():
    for limit, most in ((30.0, 25), (0.3, 3)):
        env, _ = scripted(
            notice_time=0.6, disagreement=0.3, reaction_time=0.1, recovery_time=limit, late_share=1
        )
        env.reset(options={"starts": np.arange(1)})
        env.goal[:] = 9
        track, phases = [], []
        for _ in range(40):
            phases.append(env.step(-env.expert_action())[4]["phase"][0])
            track.append(np.abs(env.pos).max())
        first, then = phases.index(RECOVERY), phases.index(CORRECTION)
        assert RECOVERY not in phases[then:] and 0 < then - first <= most
        assert (track[then - 1] < 0.03) == (limit == 30.0)


def test_a_person_who_stays_low_does_not_raise_the_hand_where_the_expert_would():
    """Beside the cube and low, the expert goes up and over it; the person who stays low goes through where it
    is."""
    raised = {}
    for low in (False, True):
        env = sims.make("mujoco", "push_cube", 4, max_steps=60, threads=1)
        person = ScriptedOperatorOptions(
            stay_low=low, slip_rate=0, notice_time=0.2, disagreement=0.1, reaction_time=0.1, late_share=1
        )
        helped = InterventionEnv(env, ScriptedOperator(env, person), blend=0)
        helped.reset(options={"starts": np.arange(4)})
        down = np.zeros((4, 7), np.float32)
        down[:, 2] = -1
        said = [helped.step(down)[4] for _ in range(30)]
        up = np.array([x["executed"][:, 2] for x in said])[np.array([x["phase"] for x in said]) == CORRECTION]
        raised[low] = up.max()
    assert raised[True] <= 0 < raised[False]
    with pytest.raises(UserError, match=r"toy:point.* has no axis dz.*stay-low"):
        ScriptedOperator(PointReach(1), ScriptedOperatorOptions(stay_low=True))


def test_a_person_with_a_sub_task_hands_back_once_one_more_of_them_is_done():
    """Whether policy and person agree or not; sub-tasks that were done before do not count."""
    env, operator = scripted(
        limit=400,
        notice_time=0.2,
        disagreement=0.3,
        reaction_time=0.1,
        least_time=0.1,
        late_share=1,
        until_subtask=True,
    )
    done = {"n": 3}
    operator.env.subtask = lambda: np.array([done["n"]], np.int64)
    env.reset(options={"starts": np.arange(1)})
    env.goal[:] = 9
    phases = []
    for k in range(60):
        done["n"] = 3 if k < 30 else 4
        phases.append(env.step(-env.expert_action())[4]["phase"][0])
    came = phases.index(CORRECTION)
    assert came < 10 and phases[came:30] == [CORRECTION] * (30 - came) and POLICY in phases[30:33]
    assert CORRECTION in phases[33:]  # the policy is as wrong as before: the next one lasts to the fifth
    with pytest.raises(UserError, match="does not tell its sub-tasks"):

        class Whole(PointReach):
            subtask = property(lambda self: (_ for _ in ()).throw(AttributeError("subtask")))

        ScriptedOperator(Whole(1), ScriptedOperatorOptions(until_subtask=True))


def test_an_env_without_a_recovery_has_no_one_who_recovers():
    class NoWayBack(PointReach):
        recovery_action = property(lambda self: (_ for _ in ()).throw(AttributeError("recovery_action")))

    ScriptedOperator(NoWayBack(1), ScriptedOperatorOptions())
    with pytest.raises(UserError, match="no scripted recovery"):
        ScriptedOperator(NoWayBack(1), ScriptedOperatorOptions(recovery_time=1.0))


def test_slips_come_at_their_rate_and_the_seed_decides_them():
    def slips(seed):
        env, _ = scripted(
            n=16,
            limit=300,
            slip_rate=0.5,
            notice_time=0.1,
            disagreement=0.1,
            reaction_time=0.1,
            agree_time=60,
            late_share=1,
            seed=seed,
        )
        env.reset(options={"starts": np.arange(16)})
        env.goal[:] = 99
        out = []
        for _ in range(200):
            expert = env.expert_action()
            info = env.step(-expert)[4]
            out.append((info["executed"] != expert).any(1) & (info["source"] == 1))
        return np.array(out)

    a = slips(0)
    assert np.array_equal(a, slips(0)) and not np.array_equal(a, slips(1))
    assert 0.05 < a[10:].mean() < 0.2  # bursts of about two of every twenty steps


def test_an_env_without_an_expert_needs_another_operator():
    class NoExpert(PointReach):
        expert_action = property(lambda self: (_ for _ in ()).throw(AttributeError("expert_action")))

    with pytest.raises(UserError, match="no scripted expert"):
        ScriptedOperator(NoExpert(1))


def collector(plan, n=2, execute=4, decisions=6):
    env = far(n)
    wrapped = InterventionEnv(env, Plan(plan), blend=0)
    policy = make_policy(
        PolicyOptions(horizon=4, execute=execute, hidden=16, layers=1), ObsSpec(state=4, action=2), 0
    )
    c = Collector(wrapped, policy, 0.9, 0)
    env.goal[:] = 99
    c.obs = c._read(env._obs(), {})
    return c.collect(policy, decisions), c


def test_a_policy_chunk_is_cut_at_the_seam():
    rollout, _ = collector({5: (CORRECTION, (1, 1)), 6: (CORRECTION, (1, 1))})
    assert rollout.executed[:, 0].tolist() == [4, 1, 2, 4, 4, 4]  # 4 + 1 policy, 2 human, then policy again
    assert rollout.mask[:, 0].tolist() == [True, True, False, True, True, True] and rollout.mask[:, 1].all()


def test_the_policy_is_not_credited_with_what_a_person_did():
    rollout, _ = collector({5: (CORRECTION, (1, 1)), 6: (CORRECTION, (1, 1))})
    assert (
        rollout.done[:, 0].tolist() == [False, True, True, False, False, False]
        and not rollout.done[:, 1].any()
    )
    # cut, not terminated: bootstraps from the seam
    assert torch.allclose(rollout.discounts[1, 0], torch.tensor(0.9))
    assert torch.equal(rollout.final_obs["state"][0], rollout.obs["state"][2, 0])
    assert rollout.stats["episodes"] == 0


def test_without_a_wrapper_nothing_of_this_is_there():
    policy = make_policy(
        PolicyOptions(horizon=4, execute=4, hidden=16, layers=1), ObsSpec(state=4, action=2), 0
    )
    assert "cut" not in Collector(far(), policy, 0.9, 0).layout(policy)


class Wild(NoOperator):
    """Takes over, brakes and lets go at random, with commands anywhere in the box."""

    def __init__(self, env):
        self.rng = np.random.default_rng(0)

    def intervene(self, view):
        n, a = view.proposed.shape
        phase = np.where(self.rng.random(n) < 0.4, self.rng.integers(0, 4, n), 0)
        return Intervention(self.rng.choice([-1, 1, 0.3], (n, a)), phase)


class Noted(PointReach):
    """Keeps what it does: the action given, as it clips it; `given` is the greatest one before that."""

    def __init__(self, n):
        super().__init__(n, limit=15)
        self.did, self.given = [], 0.0

    def step(self, actions):
        self.did.append(np.clip(actions, -1, 1))
        self.given = max(self.given, float(np.abs(actions).max()))
        return super().step(actions)


OPERATORS = {
    "nobody": lambda env: NoOperator(),
    "wild": Wild,
    "a person": lambda env: ScriptedOperator(
        env,
        ScriptedOperatorOptions(
            notice_time=0.1,
            disagreement=0.3,
            reaction_time=0.1,
            slip_rate=2.0,
            recovery_time=0.3,
            fatigue=1.0,
            agree_time=0.1,
            least_time=0.2,
        ),
    ),
    "none": None,
}


@pytest.mark.parametrize("blend", [0, 0.15, 0.5, 3.0])
@pytest.mark.parametrize("operator", OPERATORS)
def test_replay_holds_the_action_that_ran_whoever_chose_it_and_however_it_was_blended(operator, blend):
    """A policy that asks for twice what the box allows, and what the env really did."""
    env = Noted(3)
    whole = (
        env
        if operator == "none"
        else InterventionEnv(env, OPERATORS[operator](env), blend, freeze=operator == "wild")
    )
    policy = make_policy(
        PolicyOptions(kind="squashed", horizon=2, execute=2, hidden=16, layers=1, init_std=1.0),
        ObsSpec(state=4, action=2),
        0,
    )
    act = policy.act

    def loud(*a):
        chunk = act(*a)
        chunk.actions.mul_(2)
        return chunk

    policy.act = loud
    online, corrections = (Replay({"state": ((4,), np.float32)}, 2, 2, 0.9, 4000, 3) for _ in range(2))
    kept = []
    collector = ReplayCollector(whole, policy, online, corrections, 0, record=kept.append)
    collector.run(policy, 200)
    rows = np.arange(online.total)
    rows = rows[~online.final[rows]]
    ran = online.action[rows]
    assert env.given > 1.5 and np.array_equal(ran, np.concatenate(env.did).astype(np.float32))
    assert np.abs(ran).max() == 1 and np.abs(corrections.action).max() <= 1
    assert all(np.abs(e.action).max() <= 1 for e in kept)
    share = (online.source[rows] == 1).mean()
    assert share == 0 if operator in ("nobody", "none") else 0.1 < share < 0.97, share
