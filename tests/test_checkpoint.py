"""Checkpoints: any tree comes back as it went in, bit for bit, without pickle, and damage has a name."""

import json
import math
import os
import resource
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from robo_rl import checkpoint
from robo_rl.errors import UserError
from robo_rl.experiment.config import TrainConfig
from robo_rl.experiment.run import Run
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy
from robo_rl.policies.policy import describe
from robo_rl.selection import Look
from robo_rl.stored import TYPES, file_crc, write_tensors

KINDS = {
    "flow": {},
    "flow with learned noise": {"noise": "learned", "noise_steps": "all"},
    "gaussian": {"kind": "gaussian"},
    "diffusion with a frozen base": {
        "kind": "diffusion",
        "denoise_steps": 5,
        "train_steps": 20,
        "finetune_steps": 2,
    },
}


def build(seed: int = 0, views: tuple = (), **options):
    """A small policy whose weights, statistics and base are all different from a fresh one's."""
    policy = make_policy(
        PolicyOptions(
            **{"horizon": 4, "execute": 2, "hidden": 16, "layers": 2, "width": 16, "depth": 1} | options
        ),
        ObsSpec(
            state=5,
            action=3,
            action_names=("x", "y", "grip"),
            views=views,
            image_size=32 if views else 0,
            language=bool(views),
        ),
        seed,
    )
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
        policy.obs_norm.fit(torch.randn(50, 5, generator=g) * 3 + 1)
        policy.action_norm.fit(torch.randn(50, 3, generator=g) * 0.2)
    return policy


def same(a, b) -> bool:
    """Equal trees: types (tuples count as lists), dtypes, shapes, bits."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.numpy().tobytes() == b.numpy().tobytes()
        )
    if isinstance(a, np.ndarray):
        if a.dtype.kind == "U":
            return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and (a == b).all()
        return (
            isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and a.tobytes() == b.tobytes()
        )
    if isinstance(a, dict):
        return (
            isinstance(b, dict)
            and list(a) == list(b)
            and [type(k) for k in a] == [type(k) for k in b]
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, (list, tuple)):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return type(a) is type(b) and a == b


def through_files(tree, folder) -> object:
    """`tree` as a checkpoint brings it back."""
    checkpoint.save_checkpoint(folder / "step_1", build(), tree, {"step": 1})
    return checkpoint.load_train(folder / "step_1")[0]


DTYPES = [np.float64, np.float32, np.int64, np.int32, np.uint8, np.bool_]
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    TEXT,
    ARRAYS,
    ARRAYS.map(lambda a: torch.from_numpy(np.array(a))),
    ARRAYS.filter(lambda a: a.ndim >= 2).map(lambda a: a.T),
    hnp.arrays(
        "U5",
        hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
        elements=TEXT.map(lambda s: s[:5]),
    ),
)
KEYS = st.one_of(
    st.integers(0, 5), TEXT, st.sampled_from(["0", "1", "0/0", "__tensor__", "__dict__", "__list__", "a/b"])
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TREES)
def test_any_tree_comes_back_from_json_and_safetensors(tree):
    from safetensors.torch import load, save

    tensors = {}
    packed = checkpoint.pack(tree, tensors)
    again = checkpoint.unpack(json.loads(json.dumps(packed, allow_nan=False)), load(save(tensors)))
    assert same(tree, again), (tree, again)


def test_keys_that_print_alike_stay_apart(tmp_path):
    tree = {
        "a/b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        1: torch.full((1,), 2.0),
        "1": torch.full((1,), 3.0),
    }
    assert same(tree, through_files(tree, tmp_path))


def test_what_is_saved_is_a_copy_of_the_moment():
    tensor, array, tensors = torch.zeros(3), np.zeros(3), {}
    packed = checkpoint.pack([tensor, array], tensors)
    tensor += 1
    array += 1
    assert same([torch.zeros(3), np.zeros(3)], checkpoint.unpack(packed, tensors))


def test_what_cannot_be_saved_is_refused_with_its_place():
    for thing in (object(), {1, 2}, b"raw", np.array([object()]), np.array([b"raw"])):
        with pytest.raises(TypeError, match="/opt/0"):
            checkpoint.pack({"opt": [thing]}, {})


def test_optimizers_and_generators_go_on_where_they_were(tmp_path):
    g, p = torch.Generator().manual_seed(3), torch.nn.Parameter(torch.zeros(4))
    opt = torch.optim.AdamW([p], lr=0.1)
    rng = np.random.default_rng(5)

    def step(p, opt, g, rng) -> torch.Tensor:
        p.grad = torch.randn(4, generator=g) + float(rng.normal())
        opt.step()
        return p.detach().clone()

    step(p, opt, g, rng)
    tree = {
        "p": p.detach(),
        "opt": opt.state_dict(),
        "g": g.get_state(),
        "rng": json.dumps(rng.bit_generator.state),
    }
    back = through_files(tree, tmp_path)
    g2, p2, rng2 = torch.Generator(), torch.nn.Parameter(back["p"].clone()), np.random.default_rng()
    opt2 = torch.optim.AdamW([p2], lr=0.5)
    opt2.load_state_dict(back["opt"])
    g2.set_state(back["g"])
    rng2.bit_generator.state = json.loads(back["rng"])
    for _ in range(3):
        assert torch.equal(step(p, opt, g, rng), step(p2, opt2, g2, rng2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_comes_back_bit_for_bit(kind, tmp_path):
    policy = build(**KINDS[kind])
    checkpoint.save_checkpoint(tmp_path / "step_1", policy, {}, {"step": 1})
    again, meta = checkpoint.load_policy(tmp_path / "step_1")
    mine, theirs = policy.state_dict(), again.state_dict()
    assert list(mine) == list(theirs) and all(same(mine[k], theirs[k]) for k in mine)
    assert {"obs_norm.mean", "obs_norm.std", "action_norm.mean", "action_norm.std"} <= {*mine}
    assert describe(again) == describe(policy) and meta["step"] == 1 and again.spec == policy.spec
    obs = {"state": torch.randn(6, 5)}
    for explore in (False, True):
        a, b = (p.act(obs, torch.Generator().manual_seed(1), explore) for p in (policy, again))
        assert torch.equal(a.actions, b.actions) and torch.equal(a.logp, b.logp)


def test_the_frozen_base_of_a_diffusion_policy_comes_back_frozen_and_apart(tmp_path):
    policy = build(**KINDS["diffusion with a frozen base"])
    checkpoint.save_checkpoint(tmp_path / "step_1", policy, {}, {"step": 1})
    again, _ = checkpoint.load_policy(tmp_path / "step_1")
    weights = {n: p for n, p in again.named_parameters() if n.startswith("base.")}
    assert weights and not any(p.requires_grad for p in weights.values())
    assert any(
        not torch.equal(p, again.state_dict()[n.replace("base.", "head.")]) for n, p in weights.items()
    )
    from robo_rl.algos import dppo
    from robo_rl.options import DppoOptions

    before = {n: p.clone() for n, p in weights.items()}
    learner = dppo.make(again, DppoOptions(), 0)  # as a resumed run makes it
    assert all(torch.equal(before[n], p) for n, p in weights.items())
    assert not {id(p) for p in weights.values()} & {id(p) for p in learner.actor_params}


def test_a_policy_that_sees_and_reads_comes_back(tmp_path):
    policy = build(views=("front", "wrist"))
    checkpoint.save_checkpoint(tmp_path / "step_1", policy, {}, {"step": 1})
    again, _ = checkpoint.load_policy(tmp_path / "step_1")
    assert again.spec == policy.spec
    assert all(same(v, again.state_dict()[k]) for k, v in policy.state_dict().items())


def test_the_files_hold_tensors_and_json_and_no_pickle(tmp_path):
    from safetensors.torch import load

    tree = {"opt": {"state": {0: torch.ones(2)}}, "task": np.array(["reach"])}
    checkpoint.save_checkpoint(tmp_path / "step_1", build(), tree, {"step": 1})
    files = {p.name: p.read_bytes() for p in (tmp_path / "step_1").iterdir()}
    assert set(files) == {"policy.safetensors", "train.safetensors", "meta.json"}
    json.loads(files.pop("meta.json"))
    for blob in files.values():
        load(blob)  # refuses anything but plain tensors
        assert not blob.startswith((b"PK", b"\x80"))  # a zip of pickles, a pickle


# ---- what is kept of a run


def saved_run(folder, plan: list[tuple[int, float]]) -> list[str]:
    """Save a checkpoint per (step, success) as the trainer does -> names that are left."""
    env = SimpleNamespace()  # a run from a data set alone has none, and no supervised checkpoint apart
    run = Run(
        TrainConfig(video=False), folder, env, SimpleNamespace(lines=0, tell=lambda *args, **more: None)
    )
    run.policy = build()
    for step, success in plan:
        run.step = step
        if success >= 0:
            run.looks.append(Look(step, round(10 * success), 10, success))
        run.save({}, finished=False)
    return [p.name for p in checkpoint.checkpoints(folder)]


def test_the_last_two_the_best_and_the_supervised_one_are_kept(tmp_path):
    names = saved_run(tmp_path, [(0, 0.1), (10, 0.2), (20, 0.9), (30, 0.3), (40, 0.4), (50, 0.5)])
    assert names == [checkpoint.name(s) for s in (0, 20, 40, 50)]
    assert checkpoint.best(tmp_path).name == checkpoint.name(20)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == sorted(names)


def test_the_best_checkpoint_is_the_last_where_none_was_evaluated(tmp_path):
    assert saved_run(tmp_path, [(0, -1.0), (10, -1.0)]) and checkpoint.best(tmp_path).name == checkpoint.name(
        10
    )


def test_saving_again_at_one_step_replaces(tmp_path):
    assert saved_run(tmp_path, [(0, 0.1), (10, 0.2), (10, 0.3)]) == [checkpoint.name(0), checkpoint.name(10)]
    assert checkpoint.read_meta(tmp_path / "checkpoints" / checkpoint.name(10))["best"]["success"] == 0.3
    assert not list((tmp_path / "checkpoints").glob(".*"))


# ---- damage


@pytest.fixture
def sound(tmp_path):
    checkpoint.save_checkpoint(
        tmp_path / "checkpoints" / "step_000000000007",
        build(),
        {"a": torch.ones(3)},
        {"step": 7, "best": {"step": -1}},
    )
    return tmp_path / "checkpoints" / "step_000000000007"


def read(path) -> None:
    checkpoint.load_policy(path)
    checkpoint.load_train(path)


@pytest.mark.parametrize("name", ["policy.safetensors", "train.safetensors", "meta.json"])
def test_every_flipped_byte_and_every_cut_names_the_file_and_the_remedy(name, sound):
    read(sound)
    whole = (sound / name).read_bytes()
    rng = np.random.default_rng(0)
    damaged = [whole[:n] for n in (0, 1, len(whole) // 2, len(whole) - 1)]
    # the last byte of meta.json is a newline
    for at in [*rng.integers(0, len(whole) - 1, 60), 0, 8, len(whole) - 2]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(flipped))
    for blob in damaged:
        (sound / name).write_bytes(blob)
        try:
            read(sound)
        except UserError as e:
            text = str(e)
            assert "\n" not in text
            assert (name in text and f"rm -r {sound}" in text) or "checkpoint format" in text
        else:
            # a space of meta.json may become another one that JSON ignores
            assert name == "meta.json" and json.loads(blob) == json.loads(whole)
    (sound / name).unlink()
    with pytest.raises(UserError, match=name):
        read(sound)


def test_a_policy_of_another_version_says_so(sound):
    meta = json.loads((sound / "meta.json").read_text())
    meta["policy"]["options"]["new_option"] = 1
    meta["seal"] = checkpoint._seal(meta)
    (sound / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="another version"):
        checkpoint.load_policy(sound)
    meta["policy"]["options"].pop("new_option")
    meta["policy"]["options"]["hidden"] = 24
    meta["seal"] = checkpoint._seal(meta)
    (sound / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="weights do not fit"):
        checkpoint.load_policy(sound)


def test_a_policy_for_another_env_is_refused_with_what_differs():
    policy = build()
    good = policy.spec
    checkpoint.check_fits(policy, good, "here")
    from dataclasses import replace

    for change, text in (
        ({"state": 6}, "state size is 5, the env's 6"),
        ({"action": 4}, "action size is 3, the env's 4"),
        ({"action_names": ("x", "y", "z")}, "action axes are x, y, grip, the env's x, y, z"),
        ({"views": ("front",)}, "camera views are none, the env's front"),
        ({"image_size": 64}, "image size is 0, the env's 64"),
    ):
        with pytest.raises(UserError, match=f"here: the policy's {text}.*trained with"):
            checkpoint.check_fits(policy, replace(good, **change), "here")


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_half_written(sound):
    before = {p.name: p.read_bytes() for p in sound.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        for name in (sound.name, "step_000000000008"):
            with pytest.raises(UserError, match="the last checkpoint is intact.*--resume") as e:
                checkpoint.save_checkpoint(sound.parent / name, build(1), {}, {"step": 8})
            assert "\n" not in str(e.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in sound.parent.iterdir()] == [sound.name]
    assert {p.name: p.read_bytes() for p in sound.iterdir()} == before
    read(sound)


def test_recover_puts_back_what_was_moved_aside_and_sweeps_the_rest(sound):
    root, run = sound.parent, sound.parent.parent
    os.rename(sound, root / ".step_000000000007.old99")  # killed between two renames
    (root / ".step_000000000007.tmp99").mkdir()
    (root / ".step_000000000007.tmp99" / "policy.safetensors").write_bytes(b"half")
    (root / "step_000000000003").mkdir()  # killed while it deleted an old one
    (root / "step_000000000003" / "train.safetensors").write_bytes(b"rest")
    checkpoint.recover(run)
    assert [p.name for p in root.iterdir()] == [sound.name]
    read(sound)
    # killed after both
    checkpoint.save_checkpoint(root / ".step_000000000007.old99", build(), {}, {"step": 7})
    checkpoint.recover(run)
    assert [p.name for p in root.iterdir()] == [sound.name]
    assert checkpoint.load_train(sound)[0], "the newer one stays"


def test_tensors_are_written_one_by_one_as_safetensors_reads_them(tmp_path):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=g)
    tensors = {f"x{i}": x.to(t) for i, t in enumerate(TYPES)}
    tensors |= {"turned": x.T, "a part": x[1:3], "nothing": x[:0], "one": torch.tensor(3.5), "again": x}
    tensors["no stride"] = torch.tensor([2.0]).as_strided((1,), (0,))
    crc = write_tensors(tmp_path / "t.safetensors", tensors)
    assert crc == file_crc(tmp_path / "t.safetensors")
    had = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert had.keys() == tensors.keys()
    for name, y in tensors.items():
        assert had[name].dtype == y.dtype and had[name].shape == y.shape
        assert torch.equal(had[name].double(), y.double()), name
