"""Runs that share episodes over a folder: what is written and read, what is learnt from it, and what nobody
can do to a run with it."""

import json
import os
import shutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from commands import TINY, kill_after_a_checkpoint, last_weights, robo_rl
from feeds import same_rollouts
from safetensors.numpy import save
from test_runtime import build

from robo_rl.algos import foreign
from robo_rl.algos.stale import scores
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.share import ExperienceSharing, check, groups_of, space_of, unfit
from robo_rl.journal import frame
from robo_rl.options import RL_OPTIONS, NftOptions, PiRlOptions, PolicyOptions, PpoOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.rollout import Collector, new_columns, rollout_of
from robo_rl.runtime.share import (
    MOST_BYTES,
    SharedGroup,
    ShareFolder,
    difference,
    draws,
    fault,
    pack_group,
    parse_group,
)

G, SPEC = 4, ObsSpec(state=4, action=2)
OPTIONS = PpoOptions(advantage="grpo", group=G, decisions=0)
KINDS = {
    "gaussian": {"kind": "gaussian"},
    "flow, one step": {"noise": "sde", "noise_steps": "one"},
    "flow, all steps": {"noise": "cps", "noise_steps": "all"},
    "learned noise": {"noise": "learned", "noise_steps": "all"},
    "flow that predicts actions": {"predict": "action", "noise": "cps", "noise_steps": "one"},
    "diffusion": {"kind": "diffusion", "denoise_steps": 5, "train_steps": 20, "finetune_steps": 3},
}


def make(kind="gaussian", seed=0, **kw):
    return make_policy(
        PolicyOptions(**{"horizon": 4, "execute": 3, "hidden": 16, "layers": 2} | KINDS[kind] | kw),
        SPEC,
        seed,
    )


def group(seed=0, t=3, outcome=(1, 0, 0, 1), space=None, scale=0.5):
    rng = np.random.default_rng(seed)
    executed = np.full((t, G), 3)
    executed[-1, 1] = 0
    return SharedGroup(
        {"task": "x"} if space is None else space,
        "x",
        7,
        {"state": rng.standard_normal((t + 1, G, 4), np.float32)},
        scale * rng.standard_normal((t, G, 4, 2), np.float32),
        executed,
        np.array(outcome, np.float32),
    )


def config(folder, seed=0, **kw):
    return TrainConfig(
        algo="ppo",
        task="point",
        share=str(folder),
        seed=seed,
        envs=4 * G,
        workers=0,
        max_staleness=0,
        policy=PolicyOptions(kind="gaussian", horizon=4, execute=3),
        rl=OPTIONS,
        **kw,
    )


def episodes(policy, n=4 * G, seed=0, limit=12):
    line = Collector(build(n), policy, 0.99, seed)
    columns, made = new_columns(line.layout(policy), line.longest()), 0
    line.begin(np.arange(n) // G)
    while line.alive.any():
        line.decide(policy, columns, made, 0, True, whole=True)
        made += 1
    return columns, made


def played(policy, seed=0):
    """Whole episodes, with outcomes that no group has equal."""
    r = rollout_of([episodes(policy, seed=seed)])
    r.outcome = torch.rand(len(r.outcome), generator=torch.Generator().manual_seed(seed))
    return r


def sharing(tmp_path, name, policy, said=None, **kw):
    out = ExperienceSharing(
        config(tmp_path / "share", **kw),
        tmp_path / name,
        build(1).spec,
        lambda *words: None if said is None else said.append(words),
    )
    out.begin(None)
    return out


def fill(folder, run, groups):
    ShareFolder(folder, run, 4096).write(0, groups)


# ---- a file ------------------------------------------------------------------------------------------------


def test_a_group_comes_back_from_its_file_as_it_was():
    g = group()
    again = parse_group(pack_group(g, 3), "x")
    assert (
        again.space == g.space
        and (again.task, again.start) == ("x", 7)
        and not again.is_flat
        and again.obs.keys() == {"state"}
    )
    assert all(
        np.array_equal(a, b)
        for a, b in (
            (again.obs["state"], g.obs["state"]),
            (again.actions, g.actions),
            (again.executed, g.executed),
            (again.outcome, g.outcome),
        )
    )
    assert group(outcome=(1, 1, 1, 1)).is_flat


def test_no_byte_of_a_file_can_change_unseen_and_none_can_be_missing():
    data = pack_group(group(), 0)
    for at in range(0, len(data), 7):
        with pytest.raises(UserError):
            parse_group(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "x")
    for bad in (data[:-1], data + b"x", b"", data[:20]):
        with pytest.raises(UserError):
            parse_group(bad, "x")


def hostile():
    """Files with a good checksum whose contents are no group."""

    def arrays(g=None, meta=None, **kw):
        g = g or group()
        head = {"format": 1, "space": g.space, "task": g.task, "start": g.start} if meta is None else meta
        text = head if isinstance(head, bytes) else json.dumps(head).encode()
        out = {
            "meta": np.frombuffer(text, np.uint8),
            "actions": g.actions,
            "executed": g.executed,
            "outcome": g.outcome,
            "obs/state": g.obs["state"],
        } | kw
        return frame(0, G, 0, save({k: np.ascontiguousarray(v) for k, v in out.items() if v is not None}))

    g = group()
    huge, nan, hole = (x.copy() for x in (g.actions, g.obs["state"], g.executed))
    huge[0, 0, 0, 0], nan[0, 0, 0], hole[0, 2] = 1e6, np.nan, 0
    return {
        "no arrays": frame(0, 1, 0, b"\x80\x04pickle"),
        "a header of nothing": frame(0, 1, 0, b"\xff" * 8 + b"{}"),
        "no meta": arrays(meta=b""),
        "deep meta": arrays(meta=b"[" * 5000),
        "a list as meta": arrays(meta=b"[1]"),
        "another format": arrays(meta={"format": 9}),
        "a start that is text": arrays(meta={"format": 1, "space": {}, "task": "", "start": "x"}),
        "another array": arrays(more=np.zeros(3)),
        "no outcome": arrays(outcome=None),
        "a number as actions": arrays(actions=np.float32(1)),
        "doubles": arrays(actions=g.actions.astype(np.float64)),
        "too few rows": arrays(**{"obs/state": g.obs["state"][:-1]}),
        "huge": arrays(actions=huge),
        "nan": arrays(**{"obs/state": nan}),
        "an infinite outcome": arrays(outcome=np.full(G, np.inf, np.float32)),
        "a hole": arrays(executed=hole),
        "more steps than a chunk has": arrays(executed=g.executed + 9),
        "a negative count": arrays(executed=-g.executed),
        "no decisions": arrays(actions=g.actions[:0], executed=g.executed[:0]),
    }


@pytest.mark.parametrize("name", hostile())
def test_what_is_no_group_is_refused_in_one_line(name):
    with pytest.raises(UserError) as e:
        parse_group(hostile()[name], "them/u.group")
    assert "\n" not in str(e.value) and str(e.value).startswith("them/u.group")


def test_a_group_that_is_too_large_is_not_written():
    g = group()
    g.obs["image/front"] = np.zeros((4, G, 2200, 2200, 3), np.uint8)
    with pytest.raises(UserError, match="64 MiB"):
        pack_group(g, 0)
    assert not fault(g) and MOST_BYTES == 64 << 20


# ---- the folder --------------------------------------------------------------------------------------------


def test_a_run_keeps_its_newest_groups_and_writes_an_update_again_in_the_same_place(tmp_path):
    mine = ShareFolder(tmp_path, "a", 8)
    for update in range(5):
        mine.write(update, [group(update), group(update + 100), group(update + 200)])
    assert len(list((tmp_path / "a").iterdir())) == 8
    before = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    mine.write(4, [group(4), group(104), group(204)])
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == before
    (tmp_path / "a" / ".u00000004-001.group.1.tmp").write_bytes(b"half of one, when it was killed")
    mine.forget_after(4)
    assert max(int(p.name[1:9]) for p in (tmp_path / "a").iterdir()) == 3


def test_a_run_sees_the_groups_of_others_alone_and_nothing_that_is_no_file_of_theirs(tmp_path):
    for run in ("a", "b", "c"):
        fill(tmp_path, run, [group()])
    (tmp_path / "b" / "notes.txt").write_text("x")
    (tmp_path / "b" / ".u00000000-001.group.1.tmp").write_bytes(b"half")
    os.mkfifo(tmp_path / "b" / "u00000001-000.group")
    (tmp_path / "b" / "u00000002-000.group").symlink_to("/etc/passwd")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    (tmp_path / "..hidden").mkdir()
    folder = ShareFolder(tmp_path, "a", 8)
    assert folder.foreign() == ["b/u00000000-000.group", "c/u00000000-000.group"]
    shutil.rmtree(tmp_path / "c")
    assert folder.read("c/u00000000-000.group") is None and folder.read("b/u00000000-000.group").start == 7
    assert ShareFolder(tmp_path / "nowhere", "a", 8).foreign() == []


def test_groups_are_drawn_uniformly_and_follow_from_the_seed():
    names = [f"b/{i}" for i in range(6)]
    first = [next(draws(names, {"b/0"}, 0, u)) for u in range(3000)]
    counts = np.array([first.count(n) for n in names])
    assert counts[0] == 0 and (abs(counts[1:] - 600) < 5 * np.sqrt(600 * 0.8)).all()
    assert (
        list(draws(names, set(), 1, 2)) == list(draws(names, set(), 1, 2))
        and sorted(draws(names, set(), 1, 2)) == names
    )


# ---- what is learnt from -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_trace_of_a_foreign_chunk_is_one_that_the_policy_could_have_made(kind):
    policy = make(kind)
    obs = {"state": torch.randn(5, 4)}
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    trace = foreign.drawn_trace(
        policy, policy.encode(obs), chunk.x0.flatten(1), torch.Generator().manual_seed(1)
    )
    assert {k: (v.shape, v.dtype) for k, v in trace.items()} == {
        k: (v.shape, v.dtype) for k, v in chunk.trace.items()
    }
    logp, _ = policy.score(policy.encode(obs), trace)
    assert logp.shape == chunk.logp.shape and torch.isfinite(logp).all()
    if kind == "gaussian":
        assert torch.equal(trace["x_next"], chunk.trace["x_next"])


@pytest.mark.parametrize("kind", ["flow, all steps", "flow that predicts actions", "diffusion"])
def test_drawn_steps_lie_on_chains_that_end_in_the_chunk(kind):
    """x' given x0 has the chain's own distribution: N((1 - t') x0, t'^2), of diffusion N(sqrt(b') x0, 1 -
    b')."""
    policy = make(kind, **({"std_floor": 1e-6} if kind == "diffusion" else {"denoise_steps": 4}))
    n, x0 = 40_000, torch.linspace(-1, 1, 8)
    obs = {"state": torch.zeros(1, 4).expand(n, 4)}
    trace = foreign.drawn_trace(policy, policy.encode(obs), x0.expand(n, 8), torch.Generator().manual_seed(0))
    for f in range(trace["k"].shape[1]):
        for k in trace["k"][:, f].unique().tolist():
            x, after = (trace[name][trace["k"][:, f] == k, f] for name in ("x", "x_next"))
            if policy.diffusion:
                means, stds = (
                    [b.sqrt() * x0 for b in (policy.bars[k], policy.bars_prev[k])],
                    [(1 - b).sqrt() for b in (policy.bars[k], policy.bars_prev[k])],
                )
            else:
                t = [float(policy.times[k]), float(policy.times[k + 1]) if k + 1 < len(policy.times) else 0.0]
                means, stds = [(1 - s) * x0 for s in t], [torch.tensor(s) for s in t]
            for seen, mean, std in zip((x, after), means, stds, strict=True):
                assert torch.allclose(seen.mean(0), mean, atol=0.05) and torch.allclose(
                    seen.std(0), std.expand(8), atol=0.03
                )


@pytest.mark.parametrize("kind", ["gaussian", "flow, one step"])
def test_what_a_run_gives_another_with_its_weights_takes_as_it_was(kind):
    policy = make(kind)
    r = played(policy)
    space = space_of(build(1).spec, policy, "point", G, r.obs)
    for q, g in enumerate(groups_of(r, policy, space, np.arange(4))):
        assert not fault(g) and not difference(space, g.space)
        c = foreign.foreign_columns(
            policy, g.obs, g.actions, g.executed, g.outcome, 5, torch.Generator().manual_seed(0)
        )
        mine, t = slice(q * G, (q + 1) * G), len(g.executed)
        live = r.mask[:t, mine]
        assert (
            not r.mask[t:, mine].any()
            and np.array_equal(c["mask"], live)
            and np.array_equal(c["done"], r.done[:t, mine])
        )
        assert np.array_equal(c["executed"][live], r.executed[:t, mine][live])
        assert np.array_equal(c["obs/state"][:t], r.obs["state"][:t, mine])
        assert np.allclose(c["x0"], r.x0[:t, mine], atol=1e-5) and (c["version"] == 5).all()
        assert np.array_equal(c["returns"][-1], r.outcome[mine].double())
        if kind == "gaussian":
            assert np.allclose(c["logp"], r.logp[:t, mine], atol=1e-4)


def test_two_rollouts_side_by_side_are_the_rollout_of_their_columns():
    policy = make()
    a, b = episodes(policy, seed=0), episodes(policy, n=G, seed=1)
    short = ({k: v[: 2 + k.startswith("obs/")].copy() for k, v in b[0].items()}, 2)
    for parts in ((a, b), (short, a), (a, short)):
        both, one = rollout_of(parts), foreign.side_by_side(*(rollout_of([p]) for p in parts))
        same_rollouts(both, one)


@pytest.mark.parametrize("kind", ["gaussian", "flow, one step", "diffusion"])
def test_the_anchor_of_foreign_episodes_is_the_policy_that_learns_so_that_their_first_ratio_is_one(
    kind, tmp_path
):
    other, policy = make(kind, seed=1), make(kind)
    sharing(tmp_path, "other", other).mix(played(other, 1), other, 0)
    mine = sharing(tmp_path, "mine", policy)
    own = played(policy)
    r = mine.mix(own, policy, 0)
    assert (
        r.mask.shape[1] == 8 * G
        and mine.metrics()["share/foreign"] == 0.5
        and mine.metrics()["share/taken"] == 4
    )
    n, t = 4 * G, len(own.mask)
    assert (r.version[:, n:] == 0).all() and torch.equal(r.logp[:t, :n], own.logp) and r.stats is own.stats
    obs, trace = ({k: v.flatten(0, 1) for k, v in x.items()} for x in (r.obs, r.trace))
    now = scores(policy, obs, trace, torch.arange(r.mask.numel())).view_as(r.logp)
    ratio = (now - r.logp)[r.mask].exp()
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=2e-5)
    name = {"gaussian": "ppo", "diffusion": "dppo"}.get(kind, "pi_rl")
    options = RL_OPTIONS.get(name, PiRlOptions)(advantage="grpo", group=G, decisions=0, epochs=1)
    metrics = import_module(f"robo_rl.algos.{name}").make(policy, options, 0).update(r, 0.0, 0)
    assert metrics["first_log_ratio"] < 2e-5 and "staleness_mean" not in metrics  # nothing is corrected


def test_episodes_of_pictures_and_words_are_shared_too_and_words_that_there_are_not_are_left_out():
    spec = ObsSpec(state=4, action=2, views=("front",), image_size=16, language=True)
    policy = make_policy(
        PolicyOptions(kind="gaussian", horizon=4, execute=3, hidden=16, layers=2, width=16, depth=1), spec, 0
    )
    rng, g = np.random.default_rng(0), group()
    obs = g.obs | {
        "image/front": rng.integers(0, 256, (4, G, 16, 16, 3), np.uint8),
        "tokens": np.full((4, G, 16), 7),
    }
    space = space_of(build(1).spec, policy, "point", G, {k: torch.from_numpy(v) for k, v in obs.items()})
    again = parse_group(pack_group(replace(g, obs=obs, space=space), 0), "x")
    assert not unfit(again, space, 4)
    c = foreign.foreign_columns(
        policy, again.obs, again.actions, again.executed, again.outcome, 0, torch.Generator()
    )
    assert (
        foreign.is_sound(c)
        and c["obs/image/front"].dtype == np.uint8
        and foreign.foreign_rollout([c]).obs["tokens"].shape == (3, G, 16)
    )
    again.obs["tokens"] = again.obs["tokens"] + 4096
    assert "words that there are not" in unfit(again, space, 4)


def test_without_foreign_groups_a_rollout_goes_through_untouched(tmp_path):
    policy = make()
    other = sharing(tmp_path, "other", policy)
    other.mix(played(policy), policy, 0)
    alone = sharing(tmp_path, "mine", policy, share_foreign=0)
    own = played(policy, 1)
    assert (
        alone.mix(own, policy, 0) is own
        and alone.metrics()["share/given"] == 4
        and alone.metrics()["share/foreign"] == 0
    )


def test_flat_groups_are_neither_given_nor_taken_and_a_group_is_taken_once(tmp_path):
    policy = make()
    own = played(policy)
    own.outcome[: 2 * G] = 1
    first = sharing(tmp_path, "first", policy)
    assert first.mix(own, policy, 0) is own and first.counts["given"] == 2
    space = space_of(build(1).spec, policy, "point", G, own.obs)
    fill(tmp_path / "share", "flat", [group(outcome=(0, 0, 0, 0), space=space)])
    mine = sharing(tmp_path, "mine", policy)
    mine.mix(played(policy, 1), policy, 0)
    mine.mix(played(policy, 2), policy, 1)
    assert mine.counts["taken"] == 2 and mine.counts["flat"] == 1 and mine.metrics()["share/foreign"] == 0


def test_whoever_floods_the_folder_gets_no_more_than_the_share_of_foreign_groups(tmp_path):
    policy = make()
    own = played(policy)
    space = space_of(build(1).spec, policy, "point", G, own.obs)
    fill(tmp_path / "share", "flood", [group(i, space=space) for i in range(40)])
    mine = sharing(tmp_path, "mine", policy, share_foreign=1)
    for update in range(5):
        r = mine.mix(played(policy, update), policy, update)
        assert r.mask.shape[1] == 5 * G and mine.metrics()["share/foreign"] == pytest.approx(1 / 5)
    assert mine.counts["taken"] == 5


def test_files_that_are_no_groups_are_counted_once_said_once_and_cost_a_bounded_number_of_reads(tmp_path):
    policy, said = make(), []
    mine = sharing(tmp_path, "mine", policy, said, share_foreign=1)
    (tmp_path / "share" / "bad").mkdir(parents=True)
    for i in range(20):
        (tmp_path / "share" / "bad" / f"u{i:08d}-000.group").write_bytes(b"junk")
    own = played(policy)
    assert mine.mix(own, policy, 0) is own and mine.counts["refused"] == 8
    for update in range(1, 4):
        mine.mix(played(policy, update), policy, update)
    assert mine.counts["refused"] == 20 and len([w for w in said if len(w) == 2]) == 1


def test_episodes_of_another_space_are_named_and_left_out(tmp_path):
    policy, said = make(), []
    space = space_of(build(1).spec, policy, "point", G, played(policy).obs)
    fill(tmp_path / "share", "chunks", [group(space=space | {"policy.horizon": 8})])
    fill(tmp_path / "share", "liar", [group(space=space, t=3)])
    data = group(space=space)
    data.obs["state"] = data.obs["state"][..., :3].copy()
    fill(tmp_path / "share", "liar", [data])
    fill(tmp_path / "share", "endless", [group(space=space, t=30)])
    mine = sharing(tmp_path, "mine", policy, said)
    mine.mix(played(policy), policy, 0)
    words = " ".join(w[0] for w in said)
    assert mine.counts["unfit"] == 3 and mine.counts["taken"] == 0
    assert (
        "their policy.horizon is 8, here 4" in words
        and "not of the space that it names" in words
        and "more than 4 decisions" in words
    )


def test_a_folder_that_cannot_be_written_costs_a_warning_and_not_the_run(tmp_path):
    policy, said = make(), []
    mine = sharing(tmp_path, "mine", policy, said)
    (tmp_path / "share").write_text("a file now")
    own = played(policy)
    assert mine.mix(own, policy, 0) is own and mine.mix(own, policy, 1) is own
    assert len([w for w in said if "cannot give" in w[0]]) == 1


def test_the_state_of_a_checkpoint_goes_on_where_it_was(tmp_path):
    policy = make()
    space = space_of(build(1).spec, policy, "point", G, played(policy).obs)
    fill(tmp_path / "share", "other", [group(i, space=space) for i in range(20)])
    whole = sharing(tmp_path, "mine", policy, share_foreign=2)
    rollouts = []
    for update in range(4):
        if update == 2:
            saved = json.loads(json.dumps(whole.state_dict()))
        rollouts.append(whole.mix(played(policy, update), policy, update))
    again = sharing(tmp_path, "elsewhere", policy, share_foreign=2)
    again.begin(saved)
    for update in (2, 3):
        r = again.mix(played(policy, update), policy, update)
        assert torch.equal(r.logp, rollouts[update].logp) and torch.equal(r.x0, rollouts[update].x0)
    assert again.state_dict() == whole.state_dict() and again.folder.mine == whole.folder.mine


# ---- the command -------------------------------------------------------------------------------------------

RUN = (
    *TINY,
    "--steps",
    1600,
    "--eval-every",
    800,
    "--envs",
    8,
    "--algo",
    "ppo",
    "--policy.kind",
    "gaussian",
    "--rl.advantage",
    "grpo",
    "--rl.group",
    4,
    "--reward",
    "dense",
)


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_runs_share_and_one_that_takes_nothing_is_bit_for_bit_the_plain_run_and_a_killed_one_loses_nothing(
    tmp_path,
):
    assert (end := robo_rl(tmp_path, "train", *RUN, "--out", "plain")).code == 0, end
    assert (
        robo_rl(tmp_path, "train", *RUN, "--out", "giver", "--share", "one", "--share-foreign", 0).code == 0
    )
    assert last_weights(tmp_path / "plain") == last_weights(tmp_path / "giver")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    argv = (*RUN, "--seed", 1, "--share-foreign", 1)
    assert robo_rl(tmp_path, "train", *argv, "--out", "whole", "--share", "one").code == 0
    told = [row for row in rows(tmp_path / "whole") if "share/foreign" in row]
    assert max(row["share/foreign"] for row in told) == pytest.approx(1 / 3) and told[-1]["share/taken"] >= 3
    kill_after_a_checkpoint(tmp_path, "train", *argv, "--share", "two")
    assert (end := robo_rl(tmp_path, "train", "--resume", "killed")).code == 0, end
    assert last_weights(tmp_path / "whole") == last_weights(tmp_path / "killed")
    given = [
        {p.name: p.read_bytes() for p in tmp_path.glob(f"{where}-*/*")}
        for where in ("one/whole", "two/killed")
    ]
    assert len(given[0]) > 3 and given[0] == given[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": __file__}, "is a file"),
        ({"share_foreign": 9}, r"must be in \[0, 4\]"),
        ({"share_keep": 1}, "--share-keep"),
        ({"algo": "nft", "rl": NftOptions(advantage="grpo", group=G, decisions=0)}, "advantage"),
        ({"rl": PpoOptions()}, "group advantage"),
        ({"rl": replace(OPTIONS, epochs=1), "periodic": 2}, "--periodic"),
        ({"dream": 0.5}, "--dream"),
        ({"rl": replace(OPTIONS, allocate="refill")}, "--rl.allocate"),
        ({"rl": replace(OPTIONS, proximal="ewma"), "max_staleness": 1}, "ewma"),
    ],
    ids=str,
)
def test_a_run_that_cannot_share_is_told_why(options, words):
    with pytest.raises(UserError, match=words):
        check(replace(config("x"), **options), build(1))


def test_a_run_that_cannot_share_says_so_in_one_line_and_leaves_nothing_behind(tmp_path):
    assert "group advantage" in robo_rl(tmp_path, "train", "--task", "reach", "--share", "x").mistake
    (tmp_path / "data").mkdir()
    data = ("--sim", "none", "--algo", "bc", "--demos", "data")
    assert "group advantage" in robo_rl(tmp_path, "train", *data, "--share", "x").mistake
    assert "--share FOLDER" in robo_rl(tmp_path, "train", "--task", "reach", "--share-foreign", "1").mistake
    assert not (tmp_path / "runs").exists() and not (tmp_path / "x").exists()
