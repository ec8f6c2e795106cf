import os
import resource
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from robo_rl.errors import UserError
from robo_rl.runtime import deltas
from robo_rl.runtime.deltas import BadDelta, Costs, DeltaReceiver, DeltaSender
from robo_rl.runtime.weights import LOCKS, PAGE, REGISTER, WeightReader, WeightWriter, content_hash, layout_of

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]
POINTS = ["open", "copied", "hashed", "closed", "moved"]


def random_bits(rng, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern: -0.0, infinities and NaNs with payloads among them."""
    count = int(np.prod(shape))
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, count).astype(bool)).view(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return (
        torch.from_numpy(rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    )


def random_weights(rng, scale: int = 1) -> dict[str, torch.Tensor]:
    out = {
        f"t{i}.{str(d)[6:]}": random_bits(rng, d, (int(rng.integers(1, 40)) * scale, 7))
        for i, d in enumerate(DTYPES)
    }
    return out | {
        "scalar": random_bits(rng, torch.float32, ()),
        "empty": torch.zeros(0, 3),
        "one": torch.ones(1, 1),
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and np.array_equal(deltas.elements(a[n]), deltas.elements(b[n]))
        for n in a
    )


def child(work) -> int:
    """Run `work` in a forked process -> its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def ended(pid: int) -> None:
    os.waitpid(pid, 0)


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights"


# ---- one host: what is read is what was published ----------------------------------------------------------


def test_the_first_weights_are_waited_for_until_a_whole_copy_came(path, rng):
    tensors = random_weights(rng)
    writer, reader = WeightWriter.create(path, tensors), WeightReader.open(path)
    with pytest.raises(UserError, match="no whole weights came within 0 s"):
        reader.first(limit=0)
    publishing = threading.Timer(0.02, writer.publish, (0, tensors))
    publishing.start()
    mine: dict = {}
    assert reader.first() == 0 and reader.swap(mine) == 0 and same(mine, tensors)
    publishing.join()


def test_every_bit_of_every_dtype_arrives_with_its_version(path, rng):
    first = random_weights(rng)
    writer, reader = WeightWriter.create(path, first), WeightReader.open(path)
    assert reader.version() == -1 and reader.fetch() is None and reader.swap({}) == -1
    mine: dict = {}
    reader = WeightReader.open(path)
    for version in (0, 1, 2, 7, 8, 10):
        tensors = {n: random_bits(rng, t.dtype, tuple(t.shape)) for n, t in first.items()}
        assert writer.publish(version, tensors) == content_hash(tensors)
        assert (reader.version(), reader.fetch(), reader.standby) == (version, version, version)
        assert reader.current != version and reader.swap(mine) == reader.current == version
        assert same(mine, tensors) and same(reader.weights, tensors)
        assert reader.fetch() is None


def test_the_order_of_names_does_not_matter_and_every_other_difference_changes_the_hash(rng):
    a = random_weights(rng)
    assert content_hash(a) == content_hash(dict(reversed(a.items())))
    hashes = {content_hash(a)}
    for n in a:
        if a[n].numel():
            b = {k: t.clone() for k, t in a.items()}
            deltas.elements(b[n])[-1] ^= 1
            hashes.add(content_hash(b))
    hashes |= {
        content_hash(a | {"one": torch.ones(1)}),
        content_hash(a | {"one": torch.ones(1, 1).int()}),
        content_hash({("two" if n == "one" else n): t for n, t in a.items()}),
    }
    assert len(hashes) == 1 + len(a) - 1 + 3
    x, y = torch.zeros(4), torch.ones(4)
    odd = {
        "a": torch.arange(6.0)[4::5],
        "b": torch.from_numpy(np.zeros(0, np.float32)),
        "c": torch.ones(3, 2).t(),
    }
    assert content_hash(odd) == content_hash({n: torch.tensor(t.tolist()) for n, t in odd.items()})
    assert content_hash({"a": x, "b": y}) != content_hash({"a": y, "b": x})


def test_weights_of_another_kind_are_refused_with_the_tensor_that_differs(path):
    writer = WeightWriter.create(path, {"w": torch.zeros(2, 3)})
    for wrong, text in (
        ({"w": torch.zeros(3, 2)}, "'w' is torch.float32 .3, 2."),
        ({}, "'w' is none"),
        ({"w": torch.zeros(2, 3).int()}, "torch.int32"),
        ({"w": torch.zeros(2, 3), "v": torch.zeros(1)}, "'v'.*have none"),
    ):
        with pytest.raises(UserError, match=text):
            writer.publish(0, wrong)
    writer.publish(0, {"w": torch.zeros(2, 3)})
    reader = WeightReader.open(path)
    reader.fetch()
    with pytest.raises(UserError, match="'bias'"):
        reader.swap(nn.Linear(3, 2))
    writer.close()
    with pytest.raises(UserError, match="'w'"):
        WeightWriter.open(path, {"w": torch.zeros(6)})
    WeightWriter.open(path, {"w": torch.zeros(2, 3)}).close()


def test_a_module_acts_with_the_old_weights_until_the_swap_and_keeps_its_parameters(path):
    torch.manual_seed(0)
    learner, worker = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), tied, tied)
        for tied in (nn.Linear(4, 4), nn.Linear(4, 4))
    )
    writer, reader = WeightWriter.create(path, learner.state_dict()), WeightReader.open(path)
    x, names = torch.randn(9, 4), [id(t) for t in worker.state_dict(keep_vars=True).values()]
    learner.eval(), worker.eval()
    for version in range(4):
        with torch.no_grad():
            for p in learner.parameters():
                p += 0.1
            learner[1].running_mean += 0.1
        writer.publish(version, learner.state_dict())
        before = worker(x)
        assert reader.fetch() == version
        assert torch.equal(worker(x), before)
        assert reader.swap(worker) == version
        assert torch.equal(worker(x), learner(x))
    assert [id(t) for t in worker.state_dict(keep_vars=True).values()] == names
    assert all(p.requires_grad for p in worker.parameters())
    assert worker[3].weight is worker[4].weight


def test_the_version_is_that_of_the_weights_swapped_in_not_the_newest(path):
    t = {"w": torch.zeros(5)}
    writer, reader, mine = WeightWriter.create(path, t), WeightReader.open(path), {}
    writer.publish(1, {"w": torch.ones(5)})
    assert reader.fetch() == 1
    writer.publish(2, {"w": 2 * torch.ones(5)})
    assert reader.version() == 2 and reader.swap(mine) == 1 and mine["w"][0] == 1
    assert reader.swap(mine) == 1, "nothing was fetched"
    assert reader.fetch() == 2 and mine["w"][0] == 1 and reader.swap(mine) == 2 and mine["w"][0] == 2


def test_a_fetch_brings_a_newer_standby_and_one_reader_serves_one_policy(path):
    writer = WeightWriter.create(path, {"w": torch.zeros(5)})
    reader, mine = WeightReader.open(path), {}
    for v in (1, 2, 3):
        writer.publish(v, {"w": v * torch.ones(5)})
        assert reader.fetch() == v
    assert reader.swap(mine) == 3 and mine["w"][0] == 3
    with pytest.raises(UserError, match="a reader for each"):
        reader.swap({})


# ---- one host: writers -------------------------------------------------------------------------------------


def test_versions_only_grow_and_one_version_is_one_set_of_weights(path):
    writer, reader = WeightWriter.create(path, {"w": torch.zeros(5)}), WeightReader.open(path)
    for bad in (-1, 2**62):
        with pytest.raises(UserError, match="versions only grow"):
            writer.publish(bad, {"w": torch.zeros(5)})
    one = writer.publish(5, {"w": torch.ones(5)})
    assert writer.publish(5, {"w": torch.ones(5)}) == one
    with pytest.raises(UserError, match="other weights"):
        writer.publish(5, {"w": torch.zeros(5)})
    with pytest.raises(UserError, match="versions only grow"):
        writer.publish(4, {"w": torch.zeros(5)})
    assert reader.fetch() == 5 and reader.weights is not None and reader.swap({}) == 5
    assert torch.equal(reader.weights["w"], torch.ones(5)) and writer.version == 5
    assert writer.publish(6, {"w": torch.zeros(5)}) != one


def test_a_second_writer_is_refused_in_this_process_and_in_another(path, tmp_path):
    t = {"w": torch.zeros(5)}
    writer = WeightWriter.create(path, t)
    with pytest.raises(UserError, match="another process publishes"):
        WeightWriter.open(path, t)
    with pytest.raises(UserError, match="exists"):
        WeightWriter.create(path, t)

    def rival():
        try:
            WeightWriter.open(path, t)
        except UserError:
            (tmp_path / "refused").touch()

    ended(child(rival))
    assert (tmp_path / "refused").exists()
    writer.close()
    reader = WeightReader.open(path)  # a reader is no hindrance
    WeightWriter.open(path, t).close()
    assert reader.version() == -1
    with pytest.raises(UserError, match="does not exist"):
        WeightWriter.open(tmp_path / "none", t)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["refused", "weights"]


def test_of_two_writers_that_create_one_store_one_wins(path):
    t, wins = {"w": torch.zeros(5)}, path.with_name("wins")

    def create():
        try:
            WeightWriter.create(path, t)
        except UserError:
            return
        with open(wins, "a") as f:
            f.write("x")

    for _ in range(10):
        for pid in [child(create) for _ in range(4)]:
            ended(pid)
        assert wins.read_text() == "x"
        wins.unlink(), path.unlink()


def test_a_register_moved_by_somebody_else_is_noticed(path):
    writer = WeightWriter.create(path, {"w": torch.zeros(5)})
    writer.publish(1, {"w": torch.ones(5)})
    with open(path, "r+b") as f:
        f.seek(8 * REGISTER)
        f.write((2 * 9).to_bytes(8, "little"))
    with pytest.raises(UserError, match="another process publishes"):
        writer.publish(10, {"w": torch.ones(5)})


def test_an_orphan_of_the_writer_does_not_keep_the_store(path):
    t = {"w": torch.zeros(5)}
    writer = WeightWriter.create(path, t)
    alive, tell = os.pipe()
    pid = child(lambda: (os.write(tell, b"x"), time.sleep(60)))
    try:
        os.read(alive, 1)
        writer.close()
        WeightWriter.open(path, t).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)


def test_a_store_that_does_not_fit_or_is_damaged_is_said_at_once(path, tmp_path):
    t = {"w": torch.zeros(5000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(UserError, match="no room for 0 MB"):
            WeightWriter.create(path, t)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="start the learner first"):
        WeightReader.open(path)
    writer = WeightWriter.create(path, t)
    writer.publish(3, t)
    writer.close()
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], b"x" + whole[1:], whole[:PAGE] + b"x" + whole[PAGE + 1 :]):
        path.write_bytes(damaged)
        for use in (WeightReader.open, lambda p: WeightWriter.open(p, t)):
            with pytest.raises(UserError, match="no sound store"):
                use(path)
    start = int(np.frombuffer(whole, np.uint64)[3])
    for at in (start + 8, start + 16, start + 3000):  # combined hash, hash of a tensor, a weight
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UserError, match="damaged"):
            WeightWriter.open(path, t)
        reader = WeightReader.open(path)
        assert reader.fetch() is None and reader.torn == 8 and reader.swap({}) == -1
        assert WeightReader.open(path, verify="never").fetch() == 3


@pytest.mark.parametrize("verify, checked", [("always", 6), ("never", 0), (1, 6), (2, 3), (4, 2)])
def test_verification_is_as_often_as_asked(path, verify, checked):
    t = {"w": torch.zeros(100)}
    writer, reader = WeightWriter.create(path, t), WeightReader.open(path, verify=verify)
    start = int(np.fromfile(path, np.uint64, 4)[3])
    half = int(np.fromfile(path, np.uint64, 5)[4])
    caught = 0
    for v in range(6):
        writer.publish(v, t)
        at = start + (v % 2) * half + writer.layout.offsets[0]
        with open(path, "r+b") as f:
            f.seek(at)
            f.write(b"\1")
        if reader.fetch() is None:
            caught += 1
            with open(path, "r+b") as f:
                f.seek(at)
                f.write(b"\0")
            assert reader.fetch() == v
    assert caught == checked
    for bad in ("sometimes", 0, -1, 0.5):
        with pytest.raises(UserError, match="verify"):
            WeightReader.open(path, verify=bad)


# ---- one host: crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("empty", [False, True])
def test_a_writer_that_dies_anywhere_leaves_the_version_before_and_publishes_again(path, rng, point, empty):
    old = random_weights(rng)
    new = {n: random_bits(rng, t.dtype, tuple(t.shape)) for n, t in old.items()}
    writer = WeightWriter.create(path, old)
    if not empty:
        writer.publish(3, old)
        writer.publish(4, old)
    writer.close()
    reader, mine = WeightReader.open(path), {}
    ended(
        child(
            lambda: WeightWriter.open(path, old).publish(
                5, new, at=lambda p: os._exit(1) if p == point else None
            )
        )
    )
    seen = 5 if point == "moved" else -1 if empty else 4
    assert reader.version() == seen
    assert reader.fetch() == (None if seen < 0 else seen)
    assert reader.swap(mine) == seen and (seen < 0 or same(mine, new if seen == 5 else old))
    writer = WeightWriter.open(path, old)
    assert writer.version == seen and writer.publish(5, new) == content_hash(new)
    assert reader.fetch() == (None if seen == 5 else 5) and reader.swap(mine) == 5 and same(mine, new)
    assert writer.publish(6, old) and reader.fetch() == 6 and reader.swap(mine) == 6 and same(mine, old)
    assert writer.publish(7, new) and reader.fetch() == 7


def counting(version: int) -> dict[str, torch.Tensor]:
    """Weights in which every element tells the version."""
    return {
        "f": torch.full((700, 700), float(version)),
        "b": torch.full((300_000,), version % 128).bfloat16(),
        "i": torch.full((3,), version),
        "u": torch.full((100_000,), version % 256, dtype=torch.uint8),
    }


def told(tensors: dict[str, torch.Tensor]) -> set[int]:
    """The versions that the elements tell; one only in whole weights."""
    v = int(tensors["i"][0])
    return {v} | {-1 for n, t in counting(v).items() if not torch.equal(t, tensors[n])}


def test_killing_the_writer_at_any_moment_leaves_a_whole_version(path):
    rng = np.random.default_rng(1)
    WeightWriter.create(path, counting(0)).close()
    reader, mine, last = WeightReader.open(path, verify="always"), {}, -1

    def publish():
        writer = WeightWriter.open(path, counting(0))
        while True:
            writer.publish(writer.version + 1, counting(writer.version + 1))

    for _ in range(12):
        pid = child(publish)
        wait_for(lambda last=last: reader.version() > last)
        time.sleep(0.03 * rng.random())
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        reader.fetch(attempts=1)
        version = reader.swap(mine)
        assert reader.version() == version >= last and (version < 0 or told(mine) == {version})
        last = version
    assert last >= 11 and reader.torn == 0


@pytest.mark.parametrize("verify", ["always", "never"])
def test_a_reader_never_sees_two_versions_mixed_however_fast_the_writer_is(path, verify):
    WeightWriter.create(path, counting(0)).close()

    def publish():
        writer, blob = WeightWriter.open(path, counting(0)), counting(0)
        for version in range(10**9):
            for name, mod in (("f", 2**24), ("b", 128), ("i", 2**60), ("u", 256)):
                blob[name].fill_(version % mod)
            writer.publish(version, blob)

    pid = child(publish)
    try:
        reader, mine, seen = WeightReader.open(path, verify=verify), {}, []
        end = time.monotonic() + 2
        while time.monotonic() < end or len(seen) <= 10 and time.monotonic() < end + 60:
            if reader.fetch() is not None:
                seen.append(reader.swap(mine))
                assert told(mine) == {seen[-1]}
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)
    assert len(seen) > 10 and seen == sorted(set(seen))


def test_a_copy_that_is_overtaken_is_made_again_and_a_bounded_number_of_times(path):
    """The writer publishes twice inside the reader's copy, as often as it is told."""
    writer = WeightWriter.create(path, counting(0))
    writer.publish(0, counting(0))
    reader = WeightReader.open(path, verify="never")

    class Overtaken(np.ndarray):
        """A half whose reading lets the writer publish twice."""

        left = 0

        def __getitem__(self, key):
            part = np.asarray(self)[key].copy()
            if Overtaken.left:
                Overtaken.left -= 1
                for _ in range(2):
                    writer.publish(writer.version + 1, counting(writer.version + 1))
            return part

    reader._halves = [h.view(Overtaken) for h in reader._halves]
    Overtaken.left = 3
    assert reader.fetch() == 6 and reader.torn == 3 and reader.swap({}) == 6 and told(reader.weights) == {6}
    writer.publish(7, counting(7))
    Overtaken.left = 100
    assert reader.fetch(attempts=4) is None and reader.torn == 7 and 100 - Overtaken.left == 4
    assert reader.swap(reader._target) == 6 and told(reader.weights) == {6}, "the current copy is untouched"
    Overtaken.left = 0
    assert reader.fetch() == reader.standby == writer.version
    writer.publish(writer.version + 1, counting(writer.version + 1))
    Overtaken.left = 100
    assert reader.fetch(attempts=2) is None and reader.standby == reader.swap(reader._target) == 6
    assert told(reader.weights) == {6}, (
        "a standby that was fetched, then spoilt by the next fetch, is not swapped in"
    )


def test_weights_that_replace_the_registered_ones_before_the_copy_are_not_taken_for_them(path):
    """The writer publishes twice between the reader's look at the register and at the lock."""
    writer = WeightWriter.create(path, counting(0))
    writer.publish(0, counting(0))
    reader = WeightReader.open(path, verify="never")

    class Late:
        def __init__(self, words):
            self.words, self.left = words, 1

        def __getitem__(self, key):
            if key in LOCKS and self.left:
                self.left -= 1
                for _ in range(2):
                    writer.publish(writer.version + 1, counting(writer.version + 1))
            return self.words[key]

    reader._words = Late(reader._words)
    assert reader.fetch() == 2 and reader.swap({}) == 2 and told(reader.weights) == {2} and reader.torn == 1


def test_a_half_that_is_being_written_is_not_read(path):
    writer = WeightWriter.create(path, {"w": torch.zeros(5)})
    writer.publish(1, {"w": torch.zeros(5)})
    reader = WeightReader.open(path, verify="never")
    writer._words[LOCKS[0]] += 1
    assert reader.fetch() is None and reader.torn == 8
    writer._words[LOCKS[0]] += 1
    assert reader.fetch() == 1


def test_a_reader_killed_in_a_fetch_harms_nobody(path):
    writer = WeightWriter.create(path, counting(0))

    def read():
        while True:
            reader = WeightReader.open(path)
            reader.fetch(), reader.swap({})

    rng = np.random.default_rng(2)
    for version in range(6):
        pid = child(read)
        time.sleep(0.05 * rng.random())
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        writer.publish(version, counting(version))
        reader = WeightReader.open(path)
        assert reader.fetch() == version and reader.swap({}) == version and told(reader.weights) == {version}


def test_a_fetch_into_the_warm_standby_takes_no_page_faults_and_a_swap_is_quick(path):
    t = {f"w{i}": torch.zeros(250_000) for i in range(20)}  # 20 MB
    writer, reader, module = WeightWriter.create(path, t), WeightReader.open(path, "never"), nn.Module()
    for n, x in t.items():
        module.register_parameter(n, nn.Parameter(x.clone()))
    assert reader.swap(module) == -1
    faults, pauses = [], []
    for v in range(8):
        writer.publish(v, t)
        before = resource.getrusage(resource.RUSAGE_THREAD)
        assert reader.fetch() == v
        after = resource.getrusage(resource.RUSAGE_THREAD)
        faults.append(after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt)
        began = time.thread_time()
        assert reader.swap(module) == v
        pauses.append(time.thread_time() - began)
    assert max(faults[:2]) < 100 and min(faults) == 0 and sorted(faults)[4] <= 1  # 5,000 pages
    assert sorted(pauses)[4] < 1e-3


def test_the_poll_costs_less_than_two_microseconds(path):
    reader = WeightReader.open(WeightWriter.create(path, {"w": torch.zeros(5)})._path)
    best = 1.0
    for _ in range(5):
        began = time.thread_time()
        for _ in range(1000):
            reader.version()
        best = min(best, (time.thread_time() - began) / 1000)
    assert best < 2e-6


# ---- deltas: what arrives is what was sent -----------------------------------------------------------------

SLOW, FAST = 1.0, float("inf")  # B/s: only bytes count; only time does


def change(rng, base: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """A copy in which about `share` of the elements of every tensor have other bits, any bits."""
    out = {n: t.clone() for n, t in base.items()}
    for t in out.values():
        other = deltas.elements(random_bits(rng, t.dtype, tuple(t.shape)))
        where = rng.random(len(other)) < share
        deltas.elements(t)[where] = other[where]
    return out


def test_every_changed_bit_arrives_at_any_density_dtype_and_link(rng):
    for _trial in range(60):
        base = random_weights(rng, scale=int(rng.choice([1, 30])))
        new = change(rng, base, float(rng.choice([0, 1e-3, 1e-2, 0.1, 0.5, 1])))
        delta = deltas.diff(base, new, 4, 5, link=float(rng.choice([SLOW, 1e8, 4e9, FAST])))
        message = deltas.to_bytes(delta)
        there = {n: t.clone() for n, t in base.items()}
        for _ in range(2):  # twice is once
            deltas.apply(there, deltas.from_bytes(bytes(message), layout_of(there)))
            assert same(there, new)
        assert delta.result == content_hash(new) == content_hash(there)


def test_the_sign_of_zero_and_the_payload_of_a_nan_are_sent_and_equal_nans_are_not():
    bits = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F81], np.uint16)
    base = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).repeat(500)
    new = base.clone()
    assert deltas.diff({"w": base}, {"w": new}, 0, 1, link=SLOW).modes == ["same"]
    deltas.elements(new)[[0, 800, 1604]] ^= np.array([0x8000, 0x8000, 0x0011], np.uint16)
    delta = deltas.diff({"w": base}, {"w": new}, 0, 1, link=SLOW)
    assert delta.modes == ["sparse"] and len(delta.parts[0].values) == 3
    deltas.apply({"w": base}, delta)
    assert np.array_equal(deltas.elements(base), deltas.elements(new))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("gap", [1, 15, 16, 17, 254, 255, 256, 65534, 65535, 65536, 200_000])
def test_gaps_of_any_width_and_changes_at_block_edges_arrive(dtype, gap):
    block = deltas.BLOCK * 8 // dtype.itemsize
    n = min(block + 3, 10**6 + 3)
    places = {0, n - 1, *range(gap, n, gap)} if gap > 1 else {0, 5, 6, 7, n - 2, n - 1}
    places |= {p for p in (block - 1, block, block + 1, deltas.CHUNK * gap) if p < n}
    base = {"w": torch.zeros(n, dtype=dtype)}
    new = {"w": torch.zeros(n, dtype=dtype)}
    new["w"][sorted(places)] = 1
    delta = deltas.diff(base, new, 0, 1, link=SLOW)
    assert delta.modes == ["sparse"] and len(delta.parts[0].values) == len(places)
    deltas.apply(base, deltas.from_bytes(deltas.to_bytes(delta), layout_of(base)))
    assert torch.equal(base["w"], new["w"])


def test_a_chain_of_deltas_is_the_delta_of_its_ends(rng):
    states = [random_weights(rng, scale=20)]
    for _ in range(5):
        states.append(change(rng, states[-1], 0.02))
    chain, once = ({n: t.clone() for n, t in states[0].items()} for _ in range(2))
    for v in range(5):
        deltas.apply(chain, deltas.diff(states[v], states[v + 1], v, v + 1, link=SLOW))
        assert content_hash(chain) == content_hash(states[v + 1])
    deltas.apply(once, deltas.diff(states[0], states[-1], 0, 5, link=SLOW))
    assert same(chain, once)


def test_a_small_update_of_bf16_weights_takes_under_four_percent(rng):
    base = {"w": torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    new = {"w": base["w"].clone()}
    deltas.elements(new["w"])[rng.integers(0, 2_000_000, 20_000)] ^= 1
    assert len(deltas.to_bytes(deltas.diff(base, new, 0, 1, link=1e8))) < 0.02 * 4_000_000
    deltas.elements(new["w"])[rng.integers(0, 2_000_000, 80_000)] ^= 1
    (part,) = deltas.diff(base, new, 0, 1, link=1e8).parts
    assert part.gaps.dtype == np.uint8, "gaps of 20 on average fit one byte"


# ---- deltas: sparse or dense -------------------------------------------------------------------------------


def test_a_tensor_is_sent_as_what_arrives_first():
    def pays(rho, link, **kw):
        return deltas.sparse_pays(10**8, 2, rho, link, Costs(), **kw)

    assert pays(0.01, 1e8) and pays(0.1, 1e8) and not pays(0.9, 1e8), "thin link: few changes"
    assert not pays(0.9, SLOW) and pays(0.3, SLOW), "bytes alone"
    assert not pays(0.01, FAST) and not pays(0.01, 1e11), "memory: comparing costs more than copying"
    for rho in (1e-4, 1e-2, 0.2):  # one change of mind at most, from sparse to dense, as the link gets faster
        choices = [pays(rho, link) for link in np.logspace(5, 12, 60)]
        assert choices == sorted(choices, reverse=True) and choices[0]
    assert pays(0.01, 8e9, compared=True) and not pays(0.01, 8e9), "a comparison made already costs nothing"


def test_the_density_that_counts_is_the_tensors_own(rng):
    base = {n: torch.zeros(100_000).bfloat16() for n in ("few", "many", "none", "late")}
    new = {n: t.clone() for n, t in base.items()}
    new["few"][rng.integers(0, 100_000, 500)] = 1
    new["many"][:90_000] = 1
    step = 100_000 // 32
    for s in range(32):  # where the sample does not look: found out by the comparison
        new["late"][s * step + 256 : (s + 1) * step] = 1
    assert deltas.sampled_density(*(deltas.elements(x["late"]) for x in (base, new))) == 0
    delta = deltas.diff(base, new, 0, 1, link=1e8)
    assert dict(zip(sorted(base), delta.modes, strict=True)) == {
        "few": "sparse",
        "many": "dense",
        "none": "same",
        "late": "dense",
    }
    deltas.apply(base, delta)
    assert same(base, new)


def test_the_sampled_density_is_near_the_true_one(rng):
    base = rng.integers(0, 2**16, 10**6, dtype=np.uint16)
    for rho in (0.01, 0.1, 0.5):
        new = np.where(rng.random(10**6) < rho, base ^ 1, base)
        assert deltas.sampled_density(base, new) == pytest.approx(rho, rel=0.5)
    assert (
        deltas.sampled_density(base[:0], base[:0]) == 0
        and deltas.sampled_density(base[:1], base[:1] ^ 1) == 1
    )


def test_a_thin_link_carries_changes_and_memory_the_whole_tensor(rng):
    base = {"w": torch.randn(1_000_000).bfloat16()}
    new = {"w": base["w"].clone()}
    deltas.elements(new["w"])[rng.integers(0, 1_000_000, 50_000)] ^= 1
    layout = layout_of(base)
    for rate, want in ((1e8, "sparse"), (2e10, "dense")):
        there = {"w": base["w"].clone()}
        delta = deltas.diff(base, new, 0, 1, link=rate, result=content_hash(new))
        assert delta.modes == [want]
        deltas.apply(there, deltas.from_bytes(deltas.to_bytes(delta), layout))
        assert same(there, new)


# ---- deltas: the protocol ----------------------------------------------------------------------------------


def link(rng, scale: int = 1):
    """(sender at version 0, receiver that has it, function that changes the weights and sends)."""
    weights = random_weights(rng, scale)
    sender = DeltaSender(weights, 0, link=1e6)
    receiver = DeltaReceiver({n: torch.zeros_like(t) for n, t in weights.items()})
    assert receiver.receive(sender.full()) == "applied" and same(receiver.tensors, weights)
    state = {"w": weights}

    def step(version):
        state["w"] = change(rng, state["w"], 0.05)
        return sender.send(version, state["w"]), state["w"]

    return sender, receiver, step


def test_a_receiver_follows_version_by_version_with_the_publishers_hash(rng):
    sender, receiver, step = link(rng, 20)
    for v in (1, 2, 5, 6):
        message, weights = step(v)
        assert receiver.receive(message) == "applied" and receiver.version == v
        there = {n: t.clone() for n, t in receiver.tensors.items()}
        other = DeltaReceiver(there)
        assert other.receive(sender.full()) == "applied"  # validation mode: sparse equals full
        assert same(receiver.tensors, weights) and content_hash(there) == content_hash(receiver.tensors)
        assert receiver.receive(message) == "old" and same(receiver.tensors, weights)
        with pytest.raises(UserError, match="versions only grow"):
            sender.send(v, weights)


def test_without_a_first_full_copy_and_after_a_missing_or_swapped_delta_the_full_one_is_asked_for(rng):
    sender, receiver, step = link(rng)
    empty = DeltaReceiver({n: t.clone() for n, t in receiver.tensors.items()})
    one, at_one = step(1)
    assert empty.receive(one) == "need_full" and empty.version is None and "here is None" in empty.why
    two, at_two = step(2)
    before = {n: t.clone() for n, t in receiver.tensors.items()}
    assert receiver.receive(two) == "need_full" and "from version 1, here is 0" in receiver.why
    assert receiver.version == 0 and same(receiver.tensors, before), "refused whole"
    assert receiver.receive(one) == "applied" and same(receiver.tensors, at_one)
    assert (
        receiver.receive(sender.full()) == "applied"
        and receiver.version == 2
        and same(receiver.tensors, at_two)
    )
    assert receiver.receive(one) == receiver.receive(two) == "old" and same(receiver.tensors, at_two)


def test_every_flipped_byte_and_every_cut_is_refused_and_changes_nothing(rng):
    _, receiver, step = link(rng)
    message, weights = step(1)
    message, before = bytes(message), {n: t.clone() for n, t in receiver.tensors.items()}
    cuts = [
        message[:n] for n in {0, 1, 8, 47, 48, 55, 56, len(message) // 2, len(message) - 8, len(message) - 1}
    ]
    flips = [bytearray(message) for _ in range(300)]
    for k, f in enumerate(flips):
        f[k if k < 60 else int(rng.integers(len(f)))] ^= 1 << int(rng.integers(8))
    for bad in [*cuts, *flips, message + b"\0", b"nonsense" * 20]:
        assert receiver.receive(bad) == "need_full" and receiver.version == 0 and receiver.why
    for cut in cuts:
        assert receiver.receive(cut) == "need_full" and "cut" in receiver.why
    assert same(receiver.tensors, before)
    assert receiver.receive(message) == "applied" and same(receiver.tensors, weights)


def test_other_tensors_and_impossible_tables_are_refused(rng):
    base = {"w": torch.zeros(1000)}
    new = {"w": torch.zeros(1000)}
    new["w"][[3, 900]] = 1
    delta = deltas.diff(base, new, 0, 1, link=SLOW)
    for other in ({"v": torch.zeros(1000)}, {"w": torch.zeros(999)}, {"w": torch.zeros(1000).int()}, {}):
        with pytest.raises(BadDelta, match="other tensors"):
            deltas.from_bytes(deltas.to_bytes(delta), layout_of(other))
        with pytest.raises(BadDelta, match="other tensors"):
            deltas.apply(other, delta)
    with pytest.raises(UserError, match="same tensors"):
        deltas.diff({"v": torch.zeros(1)}, base, 0, 1, link=SLOW)
    part = delta.parts[0]
    for wrong in (
        replace(part, gaps=part.gaps + 90),
        replace(part, mode=deltas.DENSE),
        replace(part, mode=7),
        replace(part, values=part.values[:1]),
        replace(part, values=part.values.astype(np.uint16)),
        replace(part, gaps=np.full(2, 255, np.uint8), wide=np.ones(1, np.uint32)),
        replace(part, gaps=np.full(2, 65535, np.uint16), wide=np.full(2, 2**31, np.uint32)),
    ):
        message = deltas.to_bytes(replace(delta, parts=(wrong,)))
        receiver = DeltaReceiver({"w": torch.zeros(1000)})
        assert receiver.receive(deltas.to_bytes(deltas.full(base, 0))) == "applied"
        assert receiver.receive(message) == "need_full" and receiver.version is None
        assert receiver.receive(deltas.to_bytes(deltas.full(new, 1))) == "applied"
        assert torch.equal(receiver.tensors["w"], new["w"])
    with pytest.raises(UserError, match="contiguous"):
        deltas.apply({"w": torch.zeros(1000, 2)[:, 0]}, delta)


def test_weights_that_come_out_with_another_hash_are_not_used(rng):
    sender, receiver, step = link(rng)
    deltas.elements(receiver.tensors["t0.float32"])[0] ^= 1 << 20  # a bit of the worker's memory flips
    deltas.elements(receiver.tensors["t4.int64"])[0] ^= 1 << 20
    message, _ = step(1)
    lax = DeltaReceiver({n: t.clone() for n, t in receiver.tensors.items()}, verify="never")
    lax.version = 0
    assert lax.receive(message) == "applied"
    assert (
        receiver.receive(message) == "need_full"
        and receiver.version is None
        and "another hash" in receiver.why
    )
    assert receiver.receive(step(2)[0]) == "need_full"
    assert receiver.receive(sender.full()) == "applied" and receiver.version == 2


def test_a_receiver_interrupted_in_apply_has_no_version_until_a_full_copy(rng):
    sender, receiver, step = link(rng)
    message, _ = step(1)
    whole = receiver.tensors

    class Fails(dict):
        def __getitem__(self, name):
            if name == "t5.int32" and self.broken:
                raise MemoryError
            return super().__getitem__(name)

    receiver.tensors = Fails(whole)
    receiver.tensors.broken = True
    with pytest.raises(MemoryError):
        receiver.receive(message)
    receiver.tensors.broken = False
    assert receiver.version is None and receiver.receive(message) == "need_full"
    assert receiver.receive(sender.full()) == "applied" and receiver.version == 1


def test_a_relay_killed_in_apply_leaves_the_hosts_workers_a_whole_version(path):
    """A relay receives deltas and publishes on its host; its half-written copy dies with it."""
    WeightWriter.create(path, counting(0)).close()
    reader, mine, rng, last = WeightReader.open(path), {}, np.random.default_rng(3), -1

    def relay():
        writer = WeightWriter.open(path, counting(0))
        start = max(writer.version, 0)
        sender = DeltaSender(counting(start), start, link=1e6)
        receiver = DeltaReceiver(counting(0))
        receiver.receive(sender.full())
        while True:
            version = receiver.version + 1
            if receiver.receive(sender.send(version, counting(version))) == "applied":
                writer.publish(version, receiver.tensors)

    for _ in range(6):
        pid = child(relay)
        wait_for(lambda last=last: reader.version() > last)
        time.sleep(0.05 * rng.random())
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        reader.fetch()
        version = reader.swap(mine)
        assert version >= last and (version < 0 or told(mine) == {version})
        last = version
    assert last >= 5


def test_a_link_without_speed_is_refused():
    for bad in (0, -1, float("nan")):
        with pytest.raises(UserError, match="link"):
            DeltaSender({}, 0, link=bad)
