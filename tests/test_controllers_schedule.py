import math
from itertools import pairwise

import numpy as np
import pytest

from controllers import schedule as s
from controllers.schedule import ActionChunk, Latency, Schedule
from robo_rl.errors import UserError

DT = 0.05


def plan(t):
    """What a perfect policy would do at time t [s]."""
    return np.array([math.sin(t), math.cos(2 * t)])


def simulate(latency, *, seconds=20.0, horizon=16, every=4, max_step=0.06, wrong=0.05, seed=0):
    """A policy whose chunks are off by a constant of its own, asked every few periods, answering after
    latency().

    -> (schedule, executed [(time, chunk, index, t0, values)], naive commands that switch as soon as a chunk
    is there)
    """
    rng = np.random.default_rng(seed)
    schedule, pending, ran, naive, current = Schedule(DT, 2, max_step=max_step), [], [], [], None
    for k in range(round(seconds / DT)):
        now = k * DT
        for item in sorted((p for p in pending if p[0] <= now), key=lambda p: p[0]):
            pending.remove(item)
            schedule.add(item[1], now)
            if current is None or item[1].t0 >= current.t0:
                current = item[1]
        if k % every == 0:
            rows = np.stack([plan(now + i * DT) for i in range(horizon)]) + rng.normal(0, wrong, 2)
            pending.append((now + latency(rng), ActionChunk(rows, now)))
        row = schedule.row(now)
        if row:
            ran.append((now, row.chunk, row.index, schedule.chunk.t0, row.values))
        if current is not None:
            naive.append(current.rows[min(max(0, round((now - current.t0) / DT)), horizon - 1)])
    return schedule, ran, np.array(naive)


LATENCIES = {
    "none": lambda r: 0.0,
    "100 ms": lambda r: 0.1,
    "400 ms": lambda r: 0.4,
    "0-400 ms": lambda r: r.uniform(0, 0.4),
    "mostly fast": lambda r: 0.38 if r.random() < 0.2 else 0.03,
}


@pytest.mark.parametrize("name", LATENCIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_row_runs_late_or_twice_and_none_is_lost_uncounted(name, seed):
    schedule, ran, _ = simulate(LATENCIES[name], seed=seed)
    for now, _, index, t0, _ in ran:
        assert t0 + index * DT - 1e-6 <= now < t0 + (index + 1) * DT  # in its own period
    assert len({(chunk, index) for _, chunk, index, _, _ in ran}) == len(ran)
    assert len({round(now / DT) for now, *_ in ran}) == len(ran)  # one row per period
    assert all(a[1] <= b[1] for a, b in pairwise(ran))  # never back to an older chunk
    first = ran[0][0]
    assert len(ran) == round((20.0 - first) / DT)  # 800 ms of rows bridge a latency of 400 ms without a gap
    assert schedule.counts["executed"] == len(ran)


@pytest.mark.parametrize("name", LATENCIES)
@pytest.mark.parametrize("seed", range(3))
def test_joins_step_less_than_the_limit_and_less_than_naive_switching(name, seed):
    _, ran, naive = simulate(LATENCIES[name], seed=seed, wrong=0.2, max_step=0.15)
    values = np.array([r[4] for r in ran])
    step = np.abs(np.diff(values, axis=0)).max()
    assert step <= 0.15 + 1e-9
    assert step < np.abs(np.diff(naive, axis=0)).max()


def test_without_disagreement_the_rows_are_what_the_policy_said():
    # a period's own motion is below 0.1
    _, ran, _ = simulate(LATENCIES["0-400 ms"], wrong=0.0, max_step=0.12)
    for now, _, _, _, values in ran:
        assert np.allclose(values, plan(now))


def test_late_rows_are_dropped_and_counted():
    schedule = Schedule(DT, 1)
    rows = np.arange(8.0)[:, None]
    assert schedule.add(ActionChunk(rows, 0.0), 0.17) == 5  # rows 0, 1, 2 are over, row 3 is for [0.15, 0.20)
    assert schedule.counts["late"] == 3
    assert schedule.row(0.17).values == 3.0
    assert schedule.row(0.19) is None  # once
    assert schedule.row(0.32).values == 6.0  # the loop slept over rows 4 and 5
    assert schedule.counts["late"] == 5 and schedule.counts["executed"] == 2
    assert schedule.row(0.41) is None and schedule.counts["starved"] == 1 and schedule.counts["late"] == 6


def test_a_chunk_of_an_older_observation_never_replaces_a_newer_one():
    schedule = Schedule(DT, 1)
    schedule.add(ActionChunk(np.ones((8, 1)), 0.10), 0.10)
    assert schedule.add(ActionChunk(np.zeros((8, 1)), 0.05), 0.12) == 0
    assert schedule.row(0.12).values == 1.0 and schedule.counts["stale_chunks"] == 1
    assert schedule.add(ActionChunk(np.zeros((2, 1)), 0.2), 0.9) == 0  # came after its own end


def test_a_chunk_for_later_waits():
    schedule = Schedule(DT, 1)
    schedule.add(ActionChunk(np.ones((2, 1)), 1.0), 0.0)
    assert schedule.row(0.5) is None and schedule.row(1.01).index == 0


def test_the_join_fades_out_linearly():
    schedule = Schedule(DT, 1, blend=3)
    schedule.add(ActionChunk(np.zeros((8, 1)), 0.0), 0.0)
    assert schedule.row(0.0).values == 0
    schedule.add(ActionChunk(np.ones((8, 1)), DT), DT)
    assert [float(schedule.row(DT * k).values[0]) for k in range(1, 6)] == pytest.approx(
        [0.25, 0.5, 0.75, 1, 1]
    )


def test_a_join_spreads_the_disagreement_of_two_chunks_not_the_motion():
    schedule = Schedule(DT, 1, blend=3)
    ramp = np.arange(10.0)[:, None]
    schedule.add(ActionChunk(ramp, 0.0), 0.0)
    schedule.row(0.0)
    schedule.add(ActionChunk(ramp[1:], DT), DT)
    assert [float(schedule.row(DT * k).values[0]) for k in range(1, 6)] == [1, 2, 3, 4, 5]
    schedule.add(ActionChunk(ramp[:8] + 8, 6 * DT), 6 * DT)  # 2 above the running plan
    assert [float(schedule.row(DT * k).values[0]) for k in range(6, 10)] == [6.5, 8, 9.5, 11]
    schedule.add(ActionChunk(ramp[:4], 30 * DT), 30 * DT)  # nothing runs any more: from the last command, 11
    assert float(schedule.row(30 * DT).values[0]) == 8.25


def test_rows_are_anchored_to_the_observation_that_produced_them():
    rows, anchor = np.array([[1.0], [1.0], [2.0]]), np.array([10.0])
    assert s.anchored(rows, anchor, "relative").ravel().tolist() == [11, 11, 12]
    assert s.anchored(rows, anchor, "delta").ravel().tolist() == [11, 12, 14]
    assert s.anchored(rows, anchor, "absolute") is rows


def test_latency_plans_for_the_worst_recent_delay():
    latency = Latency(window=3)
    assert latency.steps(DT) == 0 and latency.summary() == {"count": 0}
    for x in (0.4, 0.05, 0.1, 0.12):
        latency.add(x)
    assert latency.steps(DT) == 3  # 0.12 s; the 0.4 is forgotten
    assert latency.summary()["count"] == 4 and latency.summary()["max"] == 0.12


# ---- real-time chunking ------------------------------------------------------------------------------------


def test_the_weights_are_the_papers():
    assert np.allclose(s.inpainting_weights(8, 2, 6), [1, 1, 0.5706, 0.2871, 0.1145, 0.0258, 0, 0], atol=1e-4)
    assert s.inpainting_weights(4, 1, 3, "linear").tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert s.inpainting_weights(4, 1, 3, "ones").tolist() == [1, 1, 1, 0]
    assert s.inpainting_weights(4, 1, 3, "zeros").tolist() == [1, 0, 0, 0]


def test_the_gain_is_the_papers_in_our_convention_of_time():
    for t in (0.2, 0.5, 0.8):
        tau = 1 - t
        assert s.guidance_gain(t, 1e9) == pytest.approx(
            (1 - tau) / tau * (tau**2 + (1 - tau) ** 2) / (1 - tau) ** 2
        )
    assert s.guidance_gain(1.0) == s.guidance_gain(0.0) == s.guidance_gain(1e-9) == 5


def sample(velocity, noise, steps, guide=lambda v, x, t: v):
    x = noise
    for k in range(steps):
        t = 1 - k / steps
        x = x - guide(velocity(x, t), x, t) / steps
    return x


def to_point(x, t, goal=0.3):
    """Exact velocity when all data are one point: eps - x0 = (x - goal)/t."""
    return (x - goal) / t


def test_weights_of_zero_are_plain_sampling_to_the_bit():
    noise = np.random.default_rng(0).standard_normal((8, 3))
    y, w = np.ones((8, 3)), np.zeros(8)
    plain = sample(to_point, noise, 5)
    assert np.array_equal(sample(to_point, noise, 5, lambda v, x, t: s.guided_velocity(v, x, t, y, w)), plain)


def test_guidance_brings_the_bound_rows_to_the_previous_chunk_and_more_with_more_gain():
    noise = np.random.default_rng(0).standard_normal((8, 3))
    y, w = np.full((8, 3), 0.8), s.inpainting_weights(8, 3, 3)

    def off(most):
        x = sample(
            lambda x, t: x - 0.3, noise, 20, lambda v, x, t: s.guided_velocity(v, x, t, y, w, most=most)
        )
        return np.abs(x - y)[:3].max(), x

    gaps = [off(m)[0] for m in (0.0, 0.5, 1.0, 2.0, 5.0)]
    assert all(a > b for a, b in pairwise(gaps)) and gaps[-1] < 0.1
    assert np.array_equal(off(5.0)[1][3:], off(0.0)[1][3:])  # rows with weight 0 are untouched


def test_the_jacobian_can_come_from_the_policy():
    v, x, y, w = np.ones((2, 1)), np.ones((2, 1)), np.zeros((2, 1)), np.ones(2)
    half = s.guided_velocity(v, x, 0.5, y, w, vjp=lambda g: g / 2) - v
    assert np.allclose(2 * half, s.guided_velocity(v, x, 0.5, y, w) - v)


def test_the_leftover_is_what_has_not_run():
    schedule = Schedule(DT, 1)
    assert schedule.leftover(0.0, 3)[1] == 0
    schedule.add(ActionChunk(np.arange(6.0)[:, None], 0.0), 0.0)
    schedule.row(0.0)
    rows, real = schedule.leftover(0.12, 6)
    assert rows.ravel().tolist() == [2, 3, 4, 5, 5, 5] and real == 4


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ActionChunk(np.zeros(3), 0.0), r"must be \[H, A\]"),
        (lambda: ActionChunk(np.full((2, 2), np.nan), 0.0), "finite"),
        (lambda: Schedule(DT, 2).add(ActionChunk(np.zeros((4, 3)), 0.0), 0.0), "must have 2 numbers, got 3"),
        (lambda: Schedule(0.0, 2), "dt must be"),
        (lambda: Schedule(DT, 2, max_step=0.0), "max_step must be above 0"),
        (lambda: (x := Schedule(DT, 2), x.row(1.0), x.row(0.5)), "time went backwards"),
        (lambda: s.inpainting_weights(4, 3, 2), "delay <= end"),
        (lambda: s.anchored(np.zeros((2, 2)), np.zeros(2), "deltas"), "unknown kind of rows 'deltas'"),
        (lambda: Latency().add(-1.0), "at least 0"),
    ],
)
def test_wrong_input_is_one_clear_line(call, says):
    with pytest.raises(UserError, match=says) as e:
        call()
    assert "\n" not in str(e.value)


def test_a_period_that_had_its_row_gets_no_second_one_from_a_new_chunk():
    schedule = Schedule(DT, 1)
    schedule.add(ActionChunk(np.zeros((4, 1)), 0.0), 0.0)
    assert schedule.row(0.0).index == 0
    assert schedule.add(ActionChunk(np.ones((4, 1)), 0.0), 0.01) == 3
    assert schedule.row(0.02) is None
    assert schedule.row(DT).index == 1


def test_a_join_takes_as_many_rows_as_half_the_step_limit_asks_for():
    schedule = Schedule(DT, 1, max_step=0.25)
    schedule.add(ActionChunk(np.zeros((4, 1)), 0.0), 0.0)
    schedule.row(0.0)
    schedule.add(ActionChunk(np.ones((12, 1)), DT), DT)
    values = [float(schedule.row(DT * k).values[0]) for k in range(1, 10)]
    assert (
        values == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1])
        and not schedule.counts["cut"]
    )


# ---- chunks while the robot goes on ------------------------------------------------------------------------


def runner(chunking="blend", every=0, period=0.02):
    from controllers.chunking import ChunkRunner

    return ChunkRunner(period, np.array([True, False]), np.array([0.01, 1.0]), chunking, every)


def chunk(n=8, step=0.5, grip=1.0):
    return np.tile([[step, grip]], (n, 1))


def test_a_chunk_that_found_the_robot_waiting_begins_at_its_first_row():
    r = runner()
    assert r.due(0.0) and r.ask(0.0, 0.0) is None and not r.due(0.0)
    assert r.row(0.0) is None and r.row(0.02) is None
    r.take(chunk(), 0.0, 0.04, 0.04)
    assert r.row(0.04) == pytest.approx([0.5, 1.0]) and r.schedule.counts["late"] == 0
    assert r.latency.seen[0] == pytest.approx(0.04)


def test_increments_that_did_not_run_are_made_up_once_and_absolutes_are_taken_as_they_are():
    r = runner()
    r.ask(0.0, 0.0)
    r.take(chunk(), 0.0, 0.0, 0.0)
    r.ran(r.row(0.0))
    r.ask(0.02, 0.02)
    for k in (1, 2):  # two rows run while the next chunk is thought about, of which one has no effect
        action = r.row(0.02 * k)
        if k == 1:
            r.ran(action)
    r.take(chunk(), 0.02, 0.06, 0.06)
    assert r.row(0.06) == pytest.approx([1.0, 1.0])  # its third row, and what is behind
    r.ran(np.array([1.0, 1.0]))
    assert r.row(0.08) == pytest.approx([0.5, 1.0])
    r.ran(np.array([0.25, 1.0]))  # half of it was done
    assert r.row(0.10) == pytest.approx([0.75, 1.0])


def test_a_chunk_is_asked_for_when_enough_rows_ran_less_the_time_of_inference_or_few_are_left():
    r = runner(every=4)
    r.ask(0.0, 0.0)
    r.take(chunk(10), 0.0, 0.04, 0.04)  # inference takes two periods, and began the robot
    asked = []
    for k in range(2, 12):
        if r.due(k * 0.02):
            asked.append(k)
        row = r.row(k * 0.02)
        r.ran(row)
    assert asked[0] == 4 and r.delay() == 2 and r.delay(blocks=True) == 0  # at 2 rows used, 4 - 2
    full = runner()
    full.ask(0.0, 0.0)
    full.take(chunk(4), 0.0, 0.0, 0.0)
    for k in range(4):
        assert not full.due(k * 0.02, blocks=True)
        full.ran(full.row(k * 0.02))
    assert full.due(0.08, blocks=True)


@pytest.mark.parametrize("chunking", ["naive", "blend", "rtc"])
def test_the_prefix_is_what_will_have_run_in_the_policys_own_units(chunking):
    r = runner(chunking)
    r.ask(0.0, 0.0)
    r.take(np.array([[0.1, -1], [0.2, -1], [0.3, 1], [0.4, 1], [0.5, 1]], float), 0.0, 0.02, 0.02)
    for k in (1, 2):
        r.ran(r.row(0.02 * k))
    prefix = r.ask(0.06, 0.06)
    if chunking != "rtc":
        assert prefix is None
        return
    assert (prefix.delay, prefix.end) == (1, 3) and prefix.rows.shape == (5, 2)
    assert prefix.rows[:3] == pytest.approx(np.array([[0.3, 1], [0.4, 1], [0.5, 1]]))
    assert (
        prefix.rows[3:, 0].tolist() == [0, 0]
        and prefix.weights.tolist()[0] == 1
        and not prefix.weights[3:].any()
    )


def test_naive_jumps_where_blend_keeps_to_the_largest_step():
    jumps = {}
    for chunking in ("naive", "blend"):
        r = runner(chunking)
        r.ask(0.0, 0.0)
        r.take(chunk(20, 0.1), 0.0, 0.0, 0.0)
        r.ran(r.row(0.0))
        r.ask(0.02, 0.02)
        for k in range(1, 10):
            r.ran(r.row(0.02 * k))
        r.take(chunk(20, 1.0), 0.02, 0.2, 0.2)
        jumps[chunking] = r.row(0.2)[0]
    assert jumps["naive"] > 2 * 2.1 > 2 * jumps["blend"]


@pytest.mark.parametrize(
    ("rows", "delay", "end"), [((3,), 0, 0), ((3, 2), 2, 1), ((3, 2), 0, 4), ((3, 2), -1, 1)]
)
def test_a_prefix_that_is_none_is_refused(rows, delay, end):
    from controllers.chunking import Prefix

    with pytest.raises(UserError, match="a prefix has"):
        Prefix(np.zeros(rows), delay, end)
    with pytest.raises(UserError, match="needed \\[E, 2\\]"):
        r = runner()
        r.ask(0.0, 0.0)
        r.take(np.zeros((2, 3)), 0.0, 0.0, 0.0)
    with pytest.raises(UserError, match="--chunking"):
        runner("fast")
