"""FSDP2 on two gloo ranks: the gradients and the step of one process."""

import copy
import os
import signal
import socket
import zlib

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save
from test_corrections import collect, collector_of, make
from torch.distributed.fsdp import FSDPModule

from robo_rl.checkpoint import (
    ShardedState,
    ShardedTensor,
    checkpoints,
    load_policy,
    load_train,
    recover,
    save_checkpoint,
)
from robo_rl.errors import UserError
from robo_rl.options import LoraOptions, PiRlOptions, PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.blocks import blocks_of
from robo_rl.policies.check import observations
from robo_rl.runtime.sharded import ShardedLearner, check, file_of, from_bytes, gather, shard, to_bytes
from robo_rl.stored import StoredTensor, split_rows

ROWS = 32
SEEN = ObsSpec(state=4, action=2, views=("front",), image_size=32, language=True)


def problem():
    policy = make_policy(
        PolicyOptions(horizon=4, execute=4, hidden=32, layers=2), ObsSpec(state=4, action=2), 0
    )
    g = torch.Generator().manual_seed(0)
    obs = {"state": torch.randn(ROWS, 4, generator=g)}
    return policy, obs, policy.act(obs, g, True), torch.randn(ROWS, generator=g)


def backward(policy, obs, chunk, adv, rows):
    logp, _ = policy.score(
        policy.encode({"state": obs["state"][rows]}), {k: v[rows] for k, v in chunk.trace.items()}
    )
    (-((logp.sum(-1) - chunk.logp[rows].sum(-1)).exp() * adv[rows]).mean()).backward()


def optimizer(policy):
    return torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-5)


def rank(index, world, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=index, world_size=world)
    policy, *rest = problem()
    shard(policy)
    backward(policy, *rest, torch.arange(ROWS)[index::world])
    gradients = {k: p.grad.full_tensor() for k, p in policy.named_parameters() if p.grad is not None}
    optimizer(policy).step()
    weights = gather(policy)
    if index == 0:
        torch.save((gradients, weights), f"{folder}/out.pt")
    dist.destroy_process_group()


def test_two_ranks_have_the_gradients_and_take_the_step_of_one_process(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank, (2, port, str(tmp_path)), 2)
    gradients, weights = torch.load(tmp_path / "out.pt")
    policy, *rest = problem()
    backward(policy, *rest, torch.arange(ROWS))
    mine = dict(policy.named_parameters())
    assert gradients.keys() == {k for k, p in mine.items() if p.grad is not None}
    for k, g in gradients.items():
        assert torch.allclose(g, mine[k].grad, rtol=1e-4, atol=1e-6 * float(mine[k].grad.abs().max())), k
    optimizer(policy).step()
    for k, v in policy.state_dict().items():
        assert torch.allclose(weights[k], v, atol=2e-5), k


def seen_problem():
    """A policy of blocks, with adapters in them, that keep no activations."""
    policy = make_policy(
        PolicyOptions(
            horizon=4,
            execute=4,
            hidden=32,
            layers=2,
            width=32,
            depth=2,
            recompute=True,
            lora=LoraOptions(rank=2, targets=("trunk.blocks",)),
        ),
        SEEN,
        0,
    )
    obs = observations(SEEN, 8)
    g = torch.Generator().manual_seed(0)
    return policy, obs, policy.act(obs, g, True), torch.randn(8, generator=g)


def ten_steps(policy, obs, chunk, adv, rows) -> list[float]:
    """Losses of ten steps."""
    opt, losses = (
        torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3, eps=1e-5),
        [],
    )
    for _ in range(10):
        logp, _ = policy.score(
            policy.encode({k: v[rows] for k, v in obs.items()}), {k: v[rows] for k, v in chunk.trace.items()}
        )
        loss = -((logp.sum(-1) - chunk.logp[rows].sum(-1)).exp() * adv[rows]).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


def rank_of_blocks(index, world, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=index, world_size=world)
    policy, *rest = seen_problem()
    own = sum(p.numel() for p in policy.parameters())
    shard(policy)
    blocks = blocks_of(policy)
    units = [name for name, m in policy.named_modules() if isinstance(m, FSDPModule)]
    here = sum(p.to_local().numel() for p in policy.parameters())
    losses = torch.stack(ten_steps(policy, *rest, torch.arange(8)[index::world]))
    dist.all_reduce(losses)
    changed = gather(policy, changed=True)
    if index == 0:
        assert set(units) == {"", *blocks} and here < 0.6 * own
        torch.save((losses / world, changed), f"{folder}/blocks.pt")
    else:
        assert not changed
    dist.destroy_process_group()


def test_two_ranks_that_shard_block_by_block_learn_as_one_process_does_over_ten_steps(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank_of_blocks, (2, port, str(tmp_path)), 2)
    losses, changed = torch.load(tmp_path / "blocks.pt")
    policy, *rest = seen_problem()
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    want = torch.stack(ten_steps(policy, *rest, torch.arange(8)))
    assert torch.allclose(losses, want, atol=1e-6, rtol=1e-6)
    assert "trunk.blocks.0.qkv.lora_A.weight" in changed and "trunk.blocks.0.qkv.weight" not in changed
    for k, v in changed.items():
        assert torch.allclose(v, policy.state_dict()[k], atol=2e-5), k
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items() if k not in changed)


def test_a_call_of_a_rank_travels_whole_without_pickle():
    one = make("pi_rl sde", minibatch=64)
    rollout = collect(collector_of(one, 0), one, 0)
    state = one.state_dict()
    message = to_bytes("update", (rollout, 0.5, None, state))
    what, (got, progress, version, again) = from_bytes(message)
    assert (what, progress, version) == ("update", 0.5, None) and got.stats == rollout.stats
    for name in ("obs", "trace", "last_obs", "final_obs"):
        assert all(torch.equal(getattr(got, name)[k], v) for k, v in getattr(rollout, name).items())
    for name in ("rewards", "done", "mask", "version", "logp", "outcome"):
        assert torch.equal(getattr(got, name), getattr(rollout, name))
    make("pi_rl sde", minibatch=64).load_state_dict(again)
    with pytest.raises(ValueError):
        from_bytes(b"\x80\x04" + message)


def test_blocks_that_keep_no_activations_have_the_same_gradients():
    def gradients(again: bool):
        options = PolicyOptions(horizon=4, execute=4, hidden=32, layers=2, width=32, depth=2, recompute=again)
        policy, obs = make_policy(options, SEEN, 0), observations(SEEN, 4)
        own, kept = {p.untyped_storage().data_ptr() for p in policy.parameters()}, {}

        def pack(x):
            if x.untyped_storage().data_ptr() not in own:
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        chunk = policy.act(obs, torch.Generator().manual_seed(0), True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            policy.score(policy.encode(obs), chunk.trace)[0].sum().backward()
        return (
            {k: p.grad for k, p in policy.named_parameters()},
            sum(kept.values()),
            copy.deepcopy(policy).state_dict().keys(),
        )

    (plain, much, names), (mine, less, again) = gradients(False), gradients(True)
    assert less < 0.8 * much and names == again
    assert all(torch.equal(mine[k], g) for k, g in plain.items() if g is not None)


def test_a_learner_alone_is_not_sharded():
    with pytest.raises(UserError, match="torchrun"):
        shard(problem()[0])


# ---- whole updates -----------------------------------------------------------------------------------------


def updated(learner, rollouts, first=0):
    """Weights after an update on each rollout; those of the second are stale."""
    for i, r in enumerate(rollouts, first):
        metrics = learner.update(copy.deepcopy(r), 0.1, 2 * i)
        learner.after_collect(r)
    return {k: v.clone() for k, v in learner.policy.state_dict().items()}, metrics


@pytest.mark.parametrize(
    "name,trust_kl",
    [
        ("pi_rl sde", 0.0),
        ("ppo", 0.0),
        pytest.param("dppo", 0.0, marks=pytest.mark.slow),
        ("pi_rl sde", 0.002),
    ],
)
def test_two_learners_make_the_updates_of_one_and_either_goes_on_from_the_others_state(
    name, trust_kl, tmp_path
):
    one = make(name, minibatch=64, normalise_obs=True, trust_kl=trust_kl)
    rollouts = [copy.deepcopy(collect(collector_of(one, seed), one, 0)) for seed in range(3)]
    algo, options = name.split()[0], one.options
    fresh = {k: v.clone() for k, v in one.policy.state_dict().items()}
    want, told = updated(one, rollouts[:2])
    at, alone = tmp_path / "step_2", tmp_path / "step_1"
    save_checkpoint(alone, one.policy, {"learner": one.state_dict()}, {})
    last, _ = updated(one, rollouts[2:], 2)

    policy = make(name).policy
    policy.load_state_dict(fresh)
    two = ShardedLearner(algo, policy, options, 0, 2, tmp_path / "ranks")
    try:
        got, metrics = updated(two, rollouts[:2])
        me = psutil.Process()
        here = {
            c.laddr.ip
            for p in (me, *me.children(recursive=True))
            for c in p.net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        }
        assert here and here <= {"127.0.0.1", "::1"}, here  # nothing that another machine reaches
        assert_close(got, want, fresh)
        assert metrics.keys() == told.keys() and metrics["staleness_max"] == told["staleness_max"] == 2
        assert metrics["kl"] == pytest.approx(told["kl"], rel=0.05, abs=1e-5)
        save_checkpoint(at, two.policy, {"learner": two.state_dict()}, {})
        on, _ = updated(two, rollouts[2:], 2)
        assert_close(on, last, fresh)
        two.policy.load_state_dict(load_policy(at)[0].state_dict())
        two.load_state_dict(load_train(at, ("learner",))[0]["learner"])  # from two to two
        again, _ = updated(two, rollouts[2:], 2)
        assert all(torch.equal(again[k], v) for k, v in on.items())
        two.policy.load_state_dict(want)
        two.load_state_dict(load_train(alone, ("learner",))[0]["learner"])  # from one to two
        assert_close(updated(two, rollouts[2:], 2)[0], last, fresh)
    finally:
        two.close()
    back = make(name, minibatch=64, normalise_obs=True, trust_kl=trust_kl)  # from two to one
    back.policy.load_state_dict(got)
    back.load_state_dict(load_train(at)[0]["learner"])
    assert_close(updated(back, rollouts[2:], 2)[0], last, fresh)
    shards = [at / f"learner.{k}-of-2.safetensors" for k in range(2)]
    moments = 8 * sum(p.numel() for p in policy.parameters())
    assert all(0.4 * moments < f.stat().st_size < 0.6 * moments + 20_000 for f in shards)
    assert {x.name for x in tmp_path.iterdir()} == {at.name, alone.name}


def assert_close(got, want, start):
    """As near to each other as to a hundredth of the way they went."""
    a, b, s = (torch.cat([v.double().flatten() for v in x.values()]) for x in (got, want, start))
    way, apart = float((b - s).norm()), float((a - b).norm())
    assert got.keys() == want.keys() and way > 1e-3 and apart < 0.01 * way, (apart, way)


@pytest.mark.parametrize(
    "kw,words",
    [
        ({"algo": "nft"}, "pi_rl, ppo, dppo, got --algo nft"),
        ({"minibatch": 63}, "multiple of --learners 2, got 63"),
        ({"proximal": "ewma"}, "recompute or interpolate"),
        ({"bc_coef": 0.1}, "without --rl.bc-coef"),
    ],
    ids=str,
)
def test_what_cannot_be_spread_is_refused(kw, words):
    kw = dict(kw)
    with pytest.raises(UserError, match=words):
        check(kw.pop("algo", "pi_rl"), PiRlOptions(**kw), 2)


# ---- a checkpoint that several processes write -------------------------------------------------------------


def sharded(x: torch.Tensor, world: int, die: bool = False) -> ShardedState:
    """A state as `world` ranks have it; `die`: the process is killed in the middle of the second file."""
    files = tuple(file_of(k, world) for k in range(world))
    parts = split_rows(len(x), world)

    def write(folder):
        out = {}
        for k, (a, b) in enumerate(parts):
            blob = save({"learner/m": x[a:b].contiguous()})
            (folder / files[k]).write_bytes(blob[: len(blob) // 2] if die and k else blob)
            if die and k:
                os.kill(os.getpid(), signal.SIGKILL)
            out[files[k]] = zlib.crc32(blob)
        return out

    split = ShardedTensor("learner/m", tuple(x.shape), tuple(b - a for a, b in parts), files)
    return ShardedState({"m": split, "k": [1, x[:1] + 1]}, write)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_that_some_ranks_wrote_are_read_by_any_other_number_of_ranks(n, world, tmp_path):
    x = torch.randn(n, 3)
    save_checkpoint(tmp_path / "c", problem()[0], {"learner": sharded(x, world), "feed": torch.ones(2)}, {})
    whole, _ = load_train(tmp_path / "c")
    assert torch.equal(whole["learner"]["m"], x) and torch.equal(whole["learner"]["k"][1], x[:1] + 1)
    tree, _ = load_train(tmp_path / "c", ("learner",))
    assert isinstance(tree["feed"], torch.Tensor) and isinstance(tree["learner"]["k"][1], StoredTensor)
    again = from_bytes(to_bytes("load", (tree["learner"],)))[1][0]["m"]  # as a rank gets it
    for ranks in range(1, 6):
        parts = [again.rows(a, b) for a, b in split_rows(n, ranks)]
        assert torch.equal(torch.cat(parts), x)
        assert [len(p) for p in parts] == [len(p) for p in x.chunk(ranks)] + [0] * (
            ranks - len(x.chunk(ranks))
        )


def test_a_kill_while_shards_are_written_leaves_the_checkpoint_before(tmp_path):
    x, root = torch.arange(6.0)[:, None], tmp_path / "checkpoints"
    policy = problem()[0]
    save_checkpoint(root / "step_000000000001", policy, {"learner": sharded(x, 2)}, {})
    for path in ("step_000000000002", "step_000000000001"):  # a new one, and one in place of another
        if not (child := os.fork()):
            save_checkpoint(root / path, policy, {"learner": sharded(x + 1, 2, die=True)}, {})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        recover(tmp_path)
        assert [p.name for p in root.iterdir()] == ["step_000000000001"]
        assert torch.equal(load_train(checkpoints(tmp_path)[-1])[0]["learner"]["m"], x)


def test_a_shard_that_is_damaged_or_absent_is_named(tmp_path):
    save_checkpoint(tmp_path / "c", problem()[0], {"learner": sharded(torch.ones(4, 2), 2)}, {})
    shard = tmp_path / "c" / file_of(1, 2)
    blob = shard.read_bytes()
    shard.write_bytes(blob[:-1] + b"x")
    for stored in ((), ("learner",)):
        with pytest.raises(UserError, match=r"learner\.1-of-2\.safetensors is damaged"):
            load_train(tmp_path / "c", stored)
    shard.unlink()
    with pytest.raises(UserError, match=r"learner\.1-of-2\.safetensors cannot be read"):
        load_train(tmp_path / "c")
