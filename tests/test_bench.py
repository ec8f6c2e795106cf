import ctypes
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from robo_rl import results
from robo_rl.bench import policy as bench_policy
from robo_rl.bench import rows as bench_rows
from robo_rl.bench import run as bench_run
from robo_rl.bench import sim as bench_sim
from robo_rl.bench.bridge import to_and_fro
from robo_rl.bench.options import BenchOptions
from robo_rl.bench.plain import (
    PlainChain,
    PlainChunk,
    chain_flops,
    product_chain,
    product_update,
    update_flops,
)
from robo_rl.bench.policy import CHAINS
from robo_rl.cli import bench
from robo_rl.errors import UserError
from robo_rl.log import quiet_stdout
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy

TINY = {"seconds": 0.05, "quick": True, "envs": 4, "json": True}


def document(capfd, **kw):
    """The one JSON document that a bench prints; anything else on standard output fails here."""
    assert bench.run(BenchOptions(**TINY | kw)) == 0
    return json.loads(capfd.readouterr().out)


def check(doc):
    """What every row promises."""
    assert doc["rows"] or doc["skipped"]
    for r in doc["rows"]:
        assert r["ours"] > 0 and r["limit"] > 0 and r["limit_is"] and 0 < r["of_limit"] < math.inf
        assert r["limit_kind"] in (bench_rows.BARE, bench_rows.PHYSICAL) and r["clock"]
        assert r["n"] >= 3 and r["work"]  # repeats, and the same work on every side
        assert r["ours_iqr"][0] <= r["ours"] <= r["ours_iqr"][1]
        assert r["of_limit_iqr"][0] <= r["of_limit"] <= r["of_limit_iqr"][1]
        assert (
            (r["peer"] is None)
            == (r["over_peer"] is None)
            == (r["peer_is"] == "")
            == (r["over_peer_iqr"] is None)
        )
        told = [o for o in r["others"] if o["role"] == "peer"]
        assert r["peer_is"] or told or r["no_peer"]  # never silently without one
        assert all(o.get("why") or (o["value"] > 0 and o["ratio"] > 0) for o in r["others"])
        if r["peer_is"]:  # the best of them
            assert all(o["ratio"] >= r["over_peer"] for o in told if "why" not in o)
        assert all(o["ratio"] >= r["of_limit"] for o in r["others"] if o["role"] == "limit")
        assert all(b["text"] and isinstance(b["passed"], bool) for b in r["bars"])
        rate = r["unit"] not in bench_rows.SCALE
        one_round = r["ours"] / r["limit"] if rate else r["limit"] / r["ours"]
        assert 0.1 < r["of_limit"] / one_round < 10  # medians of ratios, not ratios of medians
    for s in doc["skipped"]:
        assert s["what"] and s["why"]
    return doc


# ---- measuring ---------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when work is done."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        return self.now

    def work(self, name, seconds):
        def call():
            self.log.append(name)
            self.now += seconds

        return call


def test_turns_alternate_and_give_seconds_per_unit():
    clock = Clock()
    work = {"a": (clock.work("a", 2.0), 10), "b": (clock.work("b", 0.5), 1)}
    times = bench_rows.in_turns(work, 0.0, clock, least=4)
    assert times["a"].tolist() == [0.2] * 4 and times["b"].tolist() == [0.5] * 4
    assert clock.log[4:] == ["a", "b", "b", "a", "a", "b", "b", "a"]  # after one warm and one timed call each


def test_short_calls_are_repeated_until_a_turn_is_long_enough():
    clock = Clock()
    times = bench_rows.in_turns({"a": (clock.work("a", 0.001), 1)}, 0.1, clock, least=2)
    assert np.allclose(times["a"], 0.001) and len(clock.log) - 2 == len(times["a"]) * 20


def test_a_ratio_is_one_at_the_limit_and_above_one_over_a_slower_peer():
    times = {
        "ours": np.array([2.0, 4.0, 2.0]),
        "floor": np.array([1.0, 2.0, 1.0]),
        "peer": np.array([6.0, 12.0, 6.0]),
    }
    for unit, ours, limit in (("steps/s", 0.5, 1.0), ("ms", 2000, 1000)):
        row = bench_rows.make_row("x", unit, times, {"floor": bench_rows.BARE}, ["peer"])
        assert (row.ours, row.limit, row.of_limit, row.over_peer) == (ours, limit, 0.5, 3.0)
        assert row.n == 3 and row.of_limit_iqr == (0.5, 0.5) and row.over_peer_iqr == (3.0, 3.0)
    assert bench_rows.make_row("x", "us", times, {"floor": bench_rows.BARE}).over_peer is None


def test_the_fastest_limit_and_the_fastest_peer_are_the_rows_and_the_rest_stay_beside_them():
    times = {
        "ours": np.array([2.0, 3.0]),
        "far": np.array([0.5, 0.5]),
        "near": np.array([1.0, 1.0]),
        "slow": np.array([9.0, 9.0]),
        "quick": np.array([4.0, 4.0]),
    }
    row = bench_rows.make_row(
        "x",
        "s",
        times,
        {"near": bench_rows.BARE, "far": bench_rows.PHYSICAL},
        ["slow", "quick"],
        {"gone": "it is not installed"},
    )
    assert (row.limit_is, row.limit_kind, row.peer_is) == ("far", bench_rows.PHYSICAL, "quick")
    assert [o["name"] for o in row.others] == ["near", "slow", "gone"]
    said = bench_rows.text_of(row)
    assert "gone: not measured, it is not installed" in said and "slow" in said and "n = 2" in said
    low, high = row.ours_iqr
    assert 2.0 < low < row.ours < high < 3.0


def test_the_arm_of_the_bench_goes_to_and_fro_and_ends_where_it_began():
    decide = to_and_fro(np.random.default_rng(0))
    rows = np.concatenate([decide({}) for _ in range(40)])
    assert rows.shape == (40, 7) and np.abs(rows).max() > 0.2
    assert np.array_equal(rows[::2], -rows[1::2]) and np.abs(np.cumsum(rows, 0)).max() <= 0.3


def test_bars_say_what_was_asked_and_whether_it_was_met():
    assert bench_rows.at_least("of limit", 0.9, 0.85) == bench_rows.Bar("of limit >= 0.85", True)
    assert not bench_rows.at_most("ms", 4.6, 4.5).passed and bench_rows.at_most("ms", 4.5, 4.5).passed
    assert not bench_rows.at_least("over peer", float("nan"), 2).passed


def test_what_libraries_print_leaves_standard_output_clean(capfd):
    with quiet_stdout():
        print("from python")
        os.write(1, b"from C\n")
        ctypes.CDLL(None).puts(b"held by C")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    print("the document")
    out, err = capfd.readouterr()
    assert out == "the document\n" and all(
        s in err for s in ("from python", "from C", "held by C", "from a child")
    )


# ---- the peer and the floors do the same job ---------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("name", [*CHAINS])
def test_the_plain_modules_are_the_same_policy(name, activation):
    o = replace(CHAINS[name], horizon=3, execute=3, hidden=32, activation=activation)
    policy = make_policy(o, ObsSpec(state=5, action=2), 0)
    plain, state = PlainChain(policy), torch.randn(40, 5)
    chunk = policy.act({"state": state}, torch.Generator().manual_seed(3), True)
    x, before, after, steps, logp = plain.act(state, torch.Generator().manual_seed(3))
    assert torch.equal(steps, chunk.trace["k"])
    assert torch.allclose(x.view(40, 3, 2), chunk.x0, atol=1e-5)
    assert torch.allclose(before, chunk.trace["x"], atol=1e-5) and torch.allclose(
        after, chunk.trace["x_next"], atol=1e-5
    )
    assert torch.allclose(logp, chunk.logp, atol=1e-3)
    assert torch.allclose(plain.score(state, before, after, steps), logp, atol=1e-3)
    if o.kind == "flow" and o.noise == "sde":
        noise = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
        quiet = policy.act({"state": state}, torch.Generator().manual_seed(3), False).x0
        assert torch.allclose(PlainChunk(plain)(state, noise).view(40, 3, 2), quiet, atol=1e-5)


class Products(TorchDispatchMode):
    """Counts the multiply-adds of matrix products."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.overloadpacket.__name__, func(*args, **kwargs or {})
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.total += a.shape[0] * a.shape[1] * b.shape[1]
        return out


def products(call):
    with Products() as counter:
        call()
    return counter.total


def test_the_floors_count_the_products_of_the_job_and_no_more():
    state, d, hidden, k, n = 5, 6, 32, 4, 7
    per_step = d * hidden + 2 * hidden * hidden + hidden * d
    assert products(product_chain(n, state, d, hidden, 3, k)) == n * (state * hidden + k * per_step)
    assert chain_flops(n, state, d, hidden, 3, k) == 2 * n * (state * hidden + k * per_step)
    sizes = [state + d, hidden, hidden, hidden, d]
    forward = sum(a * b for a, b in pairwise(sizes))
    assert products(product_update(n, sizes)) == n * (3 * forward - (state + d) * hidden)
    assert update_flops(n, sizes) == 2 * products(lambda: product_update(n, sizes)())
    policy = make_policy(
        PolicyOptions(horizon=3, execute=3, hidden=hidden, layers=3), ObsSpec(state=state, action=2), 0
    )
    obs, g = {"state": torch.randn(n, state)}, torch.Generator().manual_seed(0)
    extra = k * (32 * 64 + 64 * hidden)  # the time product, once per chain
    assert products(lambda: policy.act(obs, g, True)) == n * (state * hidden + k * per_step) + extra


# ---- whole runs --------------------------------------------------------------------------------------------


def test_bench_policy_compares_each_method_with_the_same_work(capfd):
    doc = check(document(capfd, what="policy"))
    rows = {r["what"]: r for r in doc["rows"]}
    assert len(rows) == 8 and all(r["peer"] for r in rows.values())
    assert doc["bench"] == "policy" and doc["machine"]["cores"] >= 1
    for method, steps in (("pi_rl", "1 step"), ("reinflow", "4 steps"), ("dppo", "5 steps")):
        (update,) = (r for name, r in rows.items() if name.startswith(f"PPO update, {method}"))
        assert update["work"].startswith(steps)
    robot = next(r for name, r in rows.items() if "NumPy alone" in name)
    beside = [robot["peer_is"]] + [o["name"] for o in robot["others"]]
    for form in ("onnxruntime", "torch.jit", "torch.compile", "eager"):  # measured, or said why not
        assert any(form in name for name in beside), form


@pytest.mark.slow
def test_bench_policy_without_quick_holds_each_job_against_its_compiled_form_too():
    """One method of each job; that a form gives the module's own numbers is asserted before it is timed."""
    args, report = BenchOptions(what="policy", **TINY | {"quick": False}), bench_rows.Report(print)
    name, options = next(iter(CHAINS.items()))
    bench_policy.sampling(args, report, name, options)
    bench_policy.update(args, report, name, options, 64)
    bench_policy.robot(args, report)
    assert len(report.rows) == 4
    for row in report.rows:
        measured = [row.peer_is, *(o["name"] for o in row.others if "why" not in o)]
        assert any("torch.compile" in name for name in measured), row


def test_bench_sim_measures_the_arm_at_every_number_of_envs(capfd):
    doc = check(document(capfd, what="sim", task="reach", peers=False, envs=0, seconds=0.01))
    rows = [r["what"] for r in doc["rows"]]
    assert [n for n in bench_sim.COUNTS if any(f"N = {n}, ee_delta, 2 threads" in r for r in rows)] == [
        1,
        4,
        16,
        64,
        256,
        1024,
    ]
    assert sum("rgb" in r for r in rows) + sum("rgb" in s["what"] for s in doc["skipped"]) == 2


def test_bench_sim_measures_a_walker_beside_gymnasium_and_envpool(capfd):
    (row,) = check(document(capfd, what="sim", task="Hopper-v5"))["rows"]
    beside = " ".join([row["limit_is"], row["peer_is"], *(o["name"] for o in row["others"])])
    assert all(
        name in beside for name in ("SyncVectorEnv", "AsyncVectorEnv", "envpool", "Batch alone", "mj_step")
    )
    assert row["what"] == "mujoco Hopper-v5, N = 4, 2 threads"


@pytest.mark.parametrize("task", ["reach", "Hopper-v5"])
def test_the_bare_simulator_ends_in_the_states_of_the_env(task):
    import sims

    env = sims.make("mujoco", task, 3, threads=1)
    from sims.mujoco.model import SUBSTEPS

    stretch = bench_sim.Stretch(
        env, 1, env.walker.frame_skip if task == "Hopper-v5" else SUBSTEPS, quick=True
    )
    stretch.check()
    assert len(stretch.calls) == 3  # Batch twice, and mj_step in a loop
    stretch.controls = [-c for c in stretch.controls]
    with pytest.raises(AssertionError, match="other physics"):
        stretch.check()
    env.close()


def test_rows_are_printed_as_they_come_on_the_real_standard_output(capfd):
    with quiet_stdout() as out:
        report = bench_rows.Report(lambda text: print(text, file=out, flush=True))
        report.add(
            bench_rows.make_row(
                "the first row", "us", {"ours": np.ones(3), "floor": np.ones(3)}, {"floor": bench_rows.BARE}
            )
        )
        assert capfd.readouterr().out.startswith(
            "the first row: 1,000,000 us"
        )  # while the next is being measured


@pytest.mark.slow
def test_bench_train_takes_as_many_gradient_steps_as_its_peers(capfd):
    doc = check(document(capfd, what="train", task="Hopper-v5", envs=2))
    assert [r["what"].split(",")[0] for r in doc["rows"]] == ["pi_rl", "reinflow", "dppo"]
    for r in doc["rows"]:
        assert (
            r["peer_is"].startswith("a plain script") and "gradient steps" in r["work"] and "sim" in r["note"]
        )


def test_bench_train_holds_ppo_against_the_best_that_is_installed(capfd):
    (row,) = check(document(capfd, what="train", task="HalfCheetah-v5", envs=2))["rows"]
    beside = " ".join([row["peer_is"], *(o["name"] for o in row["others"])])
    assert all(name in beside for name in ("a plain script", "aselines3", "sample-factory"))


@pytest.mark.parametrize("algo", ["ppo", "pi_rl", "dppo"])
def test_the_plain_script_learns_what_it_is_rewarded_for(algo):
    from robo_rl.bench.script import Script
    from robo_rl.bench.train import Loop
    from robo_rl.experiment.recipes import recipe

    t = recipe("mujoco", "Hopper-v5", algo, "state", "full")
    t = replace(t, envs=4, threads=1, torch_threads=1, rl=replace(t.rl, decisions=8, minibatch=16, epochs=2))
    script = Script(t, Loop(t).policy, 1, 1)
    script.iterate()
    assert script.updates == 2 * 2  # epochs times minibatches
    state = torch.randn(16, script.spec.state)
    _, *trace, logp = script.actor.act(state, torch.Generator().manual_seed(0))
    adv = torch.linspace(-1, 1, 16)
    for _ in range(3):
        script.learn(state, logp, adv, torch.zeros(16), *trace)
    with torch.no_grad():
        gained = (script.actor.score(state, *trace) - logp).sum(1)
    assert gained[8:].mean() > gained[:8].mean()  # what had an advantage became likelier
    script.close()


def test_bench_wm_measures_the_model_against_its_simulator(capfd):
    (row,) = check(document(capfd, what="wm", task="reach"))["rows"]
    beside = " ".join([row["peer_is"], *(o["name"] for o in row["others"])])
    assert "states" in beside and "matrix products" in row["limit_is"]


def test_bench_control_holds_the_law_against_a_compiled_one_of_the_same_torques(capfd):
    doc = check(document(capfd, what="control"))
    rows = {r["what"].split(":")[0]: r for r in doc["rows"]}
    assert {"law, one tick", "one tick of the arm", "arm at 1 kHz"} <= {*rows}
    laws = [r for r in doc["rows"] if r["what"].startswith("law")]
    assert len(laws) == 4 and all("numba" in r["peer_is"] and "J dq" in r["limit_is"] for r in laws)
    assert "the same torques" in laws[0]["work"] and "real-time priority" in doc["rows"][-2]["note"]


def test_bench_bridge_measures_messages_and_joins(capfd):
    doc = check(document(capfd, what="bridge"))
    join, *way = doc["rows"]
    assert "chunks join" in join["what"] and join["note"].endswith(" 0 of them late or twice")
    assert "temporal ensembling" in join["peer_is"] + join["others"][0]["name"]
    assert way or doc["skipped"]


def test_the_rows_of_gymnasiums_subprocesses_are_the_envs_own():
    import sims
    from robo_rl.bench.peers import Subprocesses

    env = sims.make("mujoco", "reach", 4, threads=1)
    many = Subprocesses([partial(sims.make, "mujoco", "reach", 2, threads=1)] * 2)
    starts, actions = np.arange(40, 44), np.random.default_rng(0).uniform(-1, 1, (3, 4, 7)).astype(np.float32)
    told = [
        (x.reset(options={"starts": starts})[0]["state"], *(x.step(a) for a in actions)) for x in (env, many)
    ]
    assert np.array_equal(told[0][0], told[1][0])
    for one, other in zip(told[0][1:], told[1][1:], strict=True):
        assert np.array_equal(one[0]["state"], other[0]["state"]) and np.array_equal(
            one[4]["success"], other[4]["success"]
        )
        assert all(np.array_equal(a, b) for a, b in zip(one[1:4], other[1:4], strict=True))
    mask = np.array([False, True, False, True])
    fresh = [x.reset(options={"reset_mask": mask, "starts": starts + 9})[0]["state"] for x in (env, many)]
    assert np.array_equal(*fresh) and many.reset(seed=3)[0]["state"].shape == fresh[0].shape
    env.close()
    many.close()


@pytest.mark.slow
def test_bench_async_and_scale_measure_the_runtime(capfd):
    doc = document(capfd, what="async", seconds=1.0)
    assert len(doc["rows"]) == 4
    doc = document(capfd, what="scale", seconds=1.0)
    assert sum("on paper" in r["what"] for r in doc["rows"]) == 9


def test_bench_sync_measures_one_host_and_a_link(capfd):
    doc = check(document(capfd, what="sync"))
    rows = {r["what"]: r for r in doc["rows"]}
    assert len(rows) == 6 and sum("fetch" in name for name in rows) == 2
    assert all(r["peer"] for r in rows.values())
    assert all(
        "copy" in r["limit_is"]
        or "copies" in r["limit_is"]
        or r["limit_kind"] == bench_rows.BARE
        or "word" in r["limit_is"]
        for r in rows.values()
    )  # the memory's, not a peer's


def test_a_task_without_a_row_is_told(capfd):
    doc = document(capfd, what="train", task="Ant-v5")
    assert not doc["rows"] and "HalfCheetah-v5" in doc["skipped"][0]["why"]


@pytest.mark.slow
def test_stable_baselines3_does_the_same_job_where_it_is_installed(capfd):
    pytest.importorskip("stable_baselines3")
    (row,) = check(document(capfd, what="train", task="HalfCheetah-v5"))["rows"]
    peers = [row["peer_is"], *(o["name"] for o in row["others"] if o["role"] == "peer")]
    # with its version: it was measured
    assert any(name.startswith("stable_baselines3 ") for name in peers) and row["peer"] > 0


@pytest.mark.maniskill
@pytest.mark.slow
def test_bench_sim_measures_maniskill(capfd):
    pytest.importorskip("mani_skill")
    check(document(capfd, what="sim", task="PickCube-v1"))


def test_without_json_every_row_names_its_limit_and_why_it_has_no_peer(capfd):
    assert bench.run(BenchOptions(what="sim", task="Hopper-v5", peers=False, **TINY | {"json": False})) == 0
    out, err = capfd.readouterr()
    assert out.count("limit: ") == 1 and "no peer: --no-peers" in out and "mujoco Hopper-v5" not in err


def test_out_of_range_seconds_are_refused():
    with pytest.raises(UserError, match="--seconds"):
        BenchOptions(what="sim", seconds=0)


def test_the_gpu_bench_runs_as_its_twin_and_keeps_each_row_as_soon_as_it_is_known(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)  # building its kernels takes a minute
    kept, out = [], tmp_path / "gpu.json"
    options = BenchOptions(what="gpu", twin=True, out=str(out), minutes=1.0)
    doc = bench_run.run_bench(
        options, lambda text: kept.append(json.loads(out.read_text()) if out.exists() else {})
    )
    assert [len(d.get("rows", [])) for d in kept[1:]] == [1, 2, 3, 4, 5, 6, 6, 6, 6]
    assert json.loads(out.read_text()) == json.loads(json.dumps(doc))
    names = [row["what"] for row in doc["rows"]]
    for part in (
        "load",
        "1 observation of 2 cameras, K = 10",
        "4 observations of 2 cameras, K = 4",
        "expert alone",
        "full fine",
        "memory",
    ):
        assert any(part in name for name in names), part
    assert all(row["ours"] > 0 and row["of_limit"] > 0 and not row["bars"] for row in doc["rows"])
    assert [skip["what"] for skip in doc["skipped"]] == [
        "ManiSkill on the device",
        "MuJoCo Warp on the device",
    ]


def test_a_part_of_the_gpu_bench_that_fails_or_has_no_time_left_leaves_the_others():
    from robo_rl.bench import gpu

    def fails(bench):
        raise RuntimeError("out of memory")

    def counts(bench):
        ran.append(bench.scale.size)

    ran: list[str] = []
    parts = {"a": fails, "b": counts}
    report = bench_rows.Report(lambda text: None)
    gpu.run_parts(parts, gpu.Bench(gpu.TWIN, report, 0.1), math.inf)
    assert ran == ["tiny"] and report.skipped == [
        {"what": "a", "why": "it failed: RuntimeError: out of memory"}
    ]
    gpu.run_parts(parts, gpu.Bench(gpu.TWIN, report, 0.1), 0.0)
    assert ran == ["tiny"] and report.skipped[-1] == {"what": "b", "why": "the time is over"}


def test_the_full_size_of_the_gpu_bench_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        bench_run.run_bench(BenchOptions(what="gpu"), lambda text: None)
    with pytest.raises(UserError, match="--twin is of robo_rl bench gpu"):
        BenchOptions(what="sim", twin=True)


@pytest.mark.slow
def test_the_server_bench_measures_clients_at_once_against_one_after_the_other(capfd):
    pytest.importorskip("websockets", reason="needs robo_rl[console]")
    rows = document(capfd, what="serve", seconds=0.5, envs=3)["rows"]
    assert (
        "3 clients at once" in rows[0]["what"]
        and rows[0]["peer_is"].startswith("one after the other")
        and rows[0]["over_peer"] > 0
    )
    assert "deadline" in rows[1]["what"] and rows[1]["limit_is"] == "the deadline"


def test_the_vla_bench_measures_stored_prefixes_against_computing_them_again(capfd):
    done = document(capfd, what="vla")
    check(done)
    assert [r["what"].split(", ")[2] for r in done["rows"]] == ["pi05 tiny", "smolvla tiny"]
    assert all(
        r["peer_is"].startswith("the prefix computed again") and r["over_peer"] > 0 for r in done["rows"]
    )


def test_a_bench_is_a_function_and_its_document_is_saved_whole(tmp_path):
    said = []
    options = BenchOptions(what="sync", **TINY | {"json": False}, peers=False)
    doc = bench_run.run_bench(options, said.append)
    path = bench_run.save(doc, tmp_path / "results")
    kept = json.loads(path.read_text())
    assert path.name == "bench-sync.json" and [*path.parent.iterdir()] == [path]
    assert kept["command"] == "robo_rl bench sync --seconds 0.05 --envs 4 --quick --no-peers"
    assert {"commit", "date", "machine", "options", "skipped"} <= {*kept} and kept["seeds"] == [0]
    assert [r["what"] for r in kept["rows"]] == [r["what"] for r in doc["rows"]] and len(said) == len(
        doc["rows"]
    ) + 2
    for r in kept["rows"]:
        assert {"what", "value", "unit", "n", "interval", "clock"} <= {*r} and r["peer"] is None
        assert r["interval"][0] <= r["value"] <= r["interval"][1] and 0 < r["limit"]["ratio"] < math.inf
    kept["rows"][0]["headline"] = "3"
    path.write_text(json.dumps(kept))
    bench_run.save(doc, path.parent)  # measured again
    assert json.loads(path.read_text()) == kept
    rows = results.read(path).rows
    assert [row.what for row in rows] == [r["what"] for r in kept["rows"]]
    assert all(
        row.command == kept["command"] and row.interval_is == "quartiles" and "of the limit" in row.note
        for row in rows
    )
    root = Path(__file__).parent.parent
    assert all((root / f).exists() for row in rows for f in row.files)


def test_every_bench_names_the_files_that_it_measures():
    root = Path(__file__).parent.parent
    for what in get_args(get_type_hints(BenchOptions)["what"]):
        assert all((root / f).exists() for f in bench_run.measured_files(what)), what


def test_save_writes_below_the_current_folder_and_only_when_asked(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document(capfd, what="train", task="Ant-v5")
    assert not [*tmp_path.iterdir()]
    document(capfd, what="train", task="Ant-v5", save=True)
    kept = json.loads((tmp_path / "results" / "bench-train.json").read_text())
    assert kept["bench"] == "train" and not kept["rows"] and kept["skipped"]


def test_the_command_of_a_bench_gives_its_options_again():
    from robo_rl.cli import parse_options

    options = BenchOptions(what="wm", task="reach", envs=7, peers=False, save=True, seconds=2.5)
    assert parse_options(BenchOptions, "bench", bench_run.command_of(options).split()[2:]) == options
