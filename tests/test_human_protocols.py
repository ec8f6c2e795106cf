import numpy as np
import pytest
from toys import PointReach

from robo_rl.errors import UserError
from robo_rl.human.fleet import OperatorStats, RobotFleet
from robo_rl.human.intervention import CORRECTION, PAUSE, POLICY, Intervention, InterventionEnv, NoOperator
from robo_rl.human.operators import ScriptedOperator
from robo_rl.human.protocols import UNASSIGNED, OperatorAssignment, assign, target_starts
from robo_rl.options import PolicyOptions, ScriptedOperatorOptions
from robo_rl.policies import ObsSpec, make_policy

# ------------------------------------------------------------ who helps whom


def test_the_longest_wait_is_served_first_and_holds_stay():
    waiting, held = np.array([5.0, 2.0, np.nan, 3.0]), np.array([UNASSIGNED, UNASSIGNED, 0, UNASSIGNED])
    # the only operator is busy
    assert assign(waiting, held, 1).tolist() == [UNASSIGNED, UNASSIGNED, 0, UNASSIGNED]
    assert assign(waiting, held, 2).tolist() == [UNASSIGNED, 1, 0, UNASSIGNED]
    assert assign(waiting, held, 9).tolist() == [3, 1, 0, 2]


def test_assignment_is_one_to_one_for_any_queue():
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, m = rng.integers(1, 12), rng.integers(1, 6)
        waiting = np.where(rng.random(n) < 0.5, rng.random(n), np.nan)
        held = np.full(n, UNASSIGNED)
        taken = rng.permutation(n)[: rng.integers(0, min(n, m) + 1)]
        held[taken] = rng.permutation(m)[: len(taken)]
        out = assign(waiting, held, int(m))
        used = out[out != UNASSIGNED]
        assert len(set(used.tolist())) == len(used) and (used < m).all() and (out[taken] == held[taken]).all()
        free = m - len(taken)
        wants = np.isfinite(waiting) & (held == UNASSIGNED)
        assert (out != UNASSIGNED).sum() - len(taken) == min(free, wants.sum())


def test_a_twin_that_is_the_real_thing_gives_exactly_the_cells_that_fail():
    rng = np.random.default_rng(1)
    rates, trials = np.array([0.9, 0.4, 0.0, 0.1, 0.6]), np.full(5, 20_000)
    got = target_starts(rng.binomial(trials, rates), trials, 0.5)
    assert got.tolist() == [1, 3, 2]  # those that succeed at times first
    # never tried is not known to be hard
    assert target_starts(np.array([0, 0]), np.array([0, 5])).tolist() == [1]


# ------------------------------------------------------------ robots with help


def points(n, operator=None, freeze=False, limit=40):
    env = PointReach(n, limit=limit)
    return env, InterventionEnv(env, operator(env) if operator else NoOperator(), blend=0, freeze=freeze)


def policy(execute=4):
    return make_policy(
        PolicyOptions(horizon=4, execute=execute, hidden=16, layers=1), ObsSpec(state=4, action=2), 0
    )


def test_every_start_becomes_one_episode_whatever_the_number_of_robots():
    got = []
    _, env = points(3)
    robots = RobotFleet(env, policy(), range(100, 110), on_episode=lambda e, i: got.append(e.start))
    while robots.is_running:
        robots.step()
    assert sorted(got) == list(range(100, 110)) and robots.stats.episodes == 10
    assert robots.stats.human_steps == 0 and robots.stats.summary()["human_share"] == 0


def test_steps_of_help_are_recorded_and_accounted():
    person = ScriptedOperatorOptions(
        notice_time=0.3, disagreement=0.1, reaction_time=0.2, slip_rate=0, until_end=True
    )
    episodes = []
    _, env = points(2, lambda e: ScriptedOperator(e, person))
    robots = RobotFleet(env, policy(), range(6), on_episode=lambda e, i: episodes.append(e))
    while robots.is_running:
        robots.step()
    human = sum(int((e.phase == CORRECTION).sum()) for e in episodes)
    a = robots.stats.summary()
    assert a["human_steps"] == human > 0 and a["operator_minutes"] == pytest.approx(
        a["attended_steps"] * 0.1 / 60
    )
    # the reaction of about two steps is the person's time too, where the episode lasts so long
    assert (
        human + a["interventions"]
        <= a["attended_steps"]
        <= human + 6 * a["help_requests"] + 6 * a["interventions"]
    )
    assert a["successes"] == 6 and a["interventions"] >= 5 and a["steps"] == sum(len(e) for e in episodes)
    assert a["interventions_per_hour"] == pytest.approx(a["interventions"] / (a["steps"] * 0.1 / 3600))
    for e in episodes:
        assert all((w == "human") == (p > 0) for w, p in zip(e.source, e.phase, strict=True))


def test_an_episode_that_is_cut_ends_with_the_step_after_the_hand_back_and_its_help_stays_a_lesson():
    class Once(NoOperator):
        def intervene(self, view):
            wanted = (view.steps >= 3) & (view.steps < 7) | (view.steps > 12)
            return Intervention(
                np.ones_like(view.proposed) * 0.3, np.where(wanted, CORRECTION, POLICY).astype(np.uint8)
            )

    for cut in (True, False):
        env, wrapped = points(2, lambda e: Once(), limit=20)
        episodes = []
        robots = RobotFleet(
            wrapped, policy(), range(4), on_episode=lambda e, i, to=episodes: to.append(e), cut=cut
        )
        env.goal[:] = 99
        while robots.is_running:
            robots.step()
            env.goal[:] = 99
        assert {len(e) for e in episodes} == ({8} if cut else {20})
        assert all((e.phase[-1] == POLICY) == cut and not e.success for e in episodes)


def test_waiting_uses_up_no_steps_and_is_not_recorded():
    class Waits(NoOperator):
        now = 0

        def intervene(self, view):
            self.now += 1
            intervention = super().intervene(view)
            intervention.phase[0] = PAUSE if 5 <= self.now < 100 else POLICY
            return intervention

    env, wrapped = points(2, lambda e: Waits(), freeze=True, limit=20)
    got = []
    robots = RobotFleet(
        wrapped, policy(), [7, 8], on_episode=lambda e, i: got.append((i, len(e), e)), rewindable=True
    )
    env.goal[:] = 99
    while robots.is_running:
        robots.step()
        kept = robots.episodes[0]
        assert (
            len(kept.frames) == len(kept.snapshots) == len(kept.obs) <= 20
        )  # a wait of hours takes no memory
    lengths = {i: n for i, n, _ in got}
    # at most the one step in which it came to rest
    assert lengths == {0: 20, 1: 20} or lengths == {0: 19, 1: 20}
    assert robots.stats.pause_steps > 90


def test_a_robot_goes_back_to_exactly_where_it_was():
    env, wrapped = points(2)
    robots = RobotFleet(wrapped, policy(), range(4), rewindable=True)
    env.goal[:] = 99
    seen = []
    for _ in range(10):
        seen.append((env.pos.copy(), robots.obs["state"].copy()))
        robots.step()
    other = env.pos[1].copy()
    assert robots.rewind(0, 4) == 6 and robots.rewind(0, 99) == 0
    assert np.array_equal(env.pos[0], seen[4][0][0]) and np.array_equal(env.pos[1], other)
    assert np.array_equal(robots.obs["state"][0], seen[4][1][0]) and len(robots.episodes[0].frames) == 4
    assert [robots.frame_before(1, n) for n in (0, 1, 2, 4, 99)] == [10, 9, 8, 6, 0]
    robots.step()
    assert len(robots.episodes[0].frames) == 5 and len(robots.episodes[1].frames) == 11


def test_one_operator_serves_many_failed_robots_one_after_the_other():
    made = []

    def make_operator(env):
        options = ScriptedOperatorOptions(reaction_time=0.2, slip_rate=0, until_end=True, late_share=1)
        made.append(OperatorAssignment(ScriptedOperator(env, options), 1))
        return made[0]

    env, wrapped = points(4, make_operator, freeze=True, limit=60)
    got = []
    robots = RobotFleet(wrapped, policy(), range(4), on_episode=lambda e, i: got.append(e), rewindable=True)
    back = []
    made[0].rewind = lambda i: back.append((i, robots.rewind(i, 0)))
    for t in range(400):
        if t == 5:
            for i in range(4):
                made[0].request_help(i)
        robots.step()
        assert (robots.phase > PAUSE).sum() <= 1
        if not robots.is_running:
            break
    assert len(got) == 4 and all(e.success for e in got) and sorted(i for i, _ in back) == [0, 1, 2, 3]
    assert robots.stats.interventions == 4 and made[0].waited_steps > 0
    # went back to the start: nothing of the policy is left
    assert all((e.phase == CORRECTION).all() for e in got)


def test_freezing_needs_snapshots():
    class Plain(PointReach):
        get_state = property(lambda self: (_ for _ in ()).throw(AttributeError("get_state")))

    with pytest.raises(UserError, match="freeze needs an env with snapshots"):
        InterventionEnv(Plain(1), NoOperator(), freeze=True)


def test_an_account_of_nothing_divides_by_nothing():
    assert all(np.isfinite(v) for v in OperatorStats(0.02).summary().values())
