"""`robo_rl bench sync`: weights from the learner to the workers, on one host and over a link.

The limits are the memory's: bytes that must be moved, at the rate of a copy of warm buffers that is measured
in turns with the rest, and bare calls. The peers are what a user has without us: tensors in torch's shared
memory, a safetensors file, and plain torch calls that find, pack and write the same changes (link). One
process takes all parts in turn, so a ratio holds on a busy machine too; times are CPU times of this thread.
"""

import copy
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from robo_rl.bench.rows import (
    BARE,
    CPU,
    LEAST,
    PHYSICAL,
    Bar,
    Report,
    at_least,
    at_most,
    in_turns,
    make_row,
    versioned,
)
from robo_rl.runtime import deltas
from robo_rl.runtime.weights import WeightReader, WeightWriter

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

LARGE, LARGE_QUICK = 100, 8  # tensors of a million bf16 weights
CHANGED = 0.01  # share of weights that one update changes
LINK = 100e6  # B/s
LINE = 64  # bytes that a processor moves at least
WARM_COPY, POINTERS = "a copy into a warm buffer", "a word written for each tensor"
Calls = dict[str, Callable[[], object]]


def measure(args: "BenchOptions", report: Report) -> None:
    """All rows of `robo_rl bench sync`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    try:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            small(args, report, Path(folder))
            new = large(LARGE_QUICK if args.quick else LARGE)
            host(args, report, Path(folder), new)
        link(args, report, new)
    finally:
        torch.set_num_threads(threads)


def large(count: int) -> dict[str, Tensor]:
    """`count` tensors [1000, 1000] bfloat16 of a spread of magnitudes."""
    g = torch.Generator().manual_seed(0)
    return {
        f"layers.{i}.weight": (0.02 * torch.randn(1000, 1000, generator=g)).bfloat16() for i in range(count)
    }


def changed(tensors: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """A copy in which about `share` of the weights have another last bit."""
    rng, out = np.random.default_rng(0), {n: t.clone() for n, t in tensors.items()}
    for t in out.values():
        deltas.elements(t)[rng.integers(0, t.numel(), round(share * t.numel()))] ^= 1
    return out


def size(tensors: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


# ---- one host ----------------------------------------------------------------------------------------------


def small(args: "BenchOptions", report: Report, folder: Path) -> None:
    """A policy of 1 MB, from publish to swap, and the poll between two chunks."""
    policy = nn.Sequential(*[nn.Linear(205, 205) for _ in range(6)])
    tensors = {n: t.clone() for n, t in policy.state_dict().items()}
    writer, file = WeightWriter.create(folder / "small", tensors), folder / "small.safetensors"
    reader = WeightReader.open(folder / "small")
    a, b = np.zeros((2, size(tensors)), np.uint8)

    def ours() -> None:
        writer.publish(writer.version + 1, tensors)
        reader.fetch()
        reader.swap(policy)

    def copies() -> None:
        np.copyto(a, b)
        np.copyto(b, a)

    shared = {n: t.clone().share_memory_() for n, t in tensors.items()}
    other = copy.deepcopy(policy)
    state = other.state_dict()

    def by_file() -> None:
        safetensors.torch.save_file(tensors, file)
        other.load_state_dict(safetensors.torch.load_file(file))

    def by_shared_memory() -> None:
        with torch.no_grad():
            for n, t in tensors.items():
                shared[n].copy_(t)
            for n, t in state.items():
                t.copy_(shared[n])

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("ms", ours, 1)]

    peers = (
        {
            f"safetensors file, {versioned('safetensors')}": (by_file, 1),
            f"share_memory_ and copy_, {versioned('torch')}": (by_shared_memory, 1),
        }
        if args.peers
        else {}
    )
    for call, module in [(ours, policy), *((c, other) for c, _ in peers.values())]:
        for t in module.parameters():
            t.data.zero_()
        call()
        assert all(torch.equal(t, tensors[n]) for n, t in module.state_dict().items()), (
            "other weights arrived"
        )
    work = {"ours": (ours, 1), "two copies of the bytes": (copies, 1)} | peers
    none = "" if args.peers else "--no-peers"
    report.add(
        make_row(
            "1 MB: publish, fetch, verify, swap",
            "ms",
            in_turns(work, args.slice, time.thread_time),
            {"two copies of the bytes": PHYSICAL},
            [*peers],
            bars=bars,
            clock=CPU,
            no_peer=none,
            work="the weights of a learner in a worker's module, equal on every side; only ours can be read "
            "while it is written and finds damage",
        )
    )
    cell, counter = memoryview(bytearray(4096)).cast("Q"), multiprocessing.Value("q", 3)
    peer = "multiprocessing.Value, with its lock"
    work = {"ours": (reader.version, 1), "reading a word": (lambda: cell[8], 1)}
    work |= {peer: (lambda: counter.value, 1)} if args.peers else {}

    def poll_bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("us", ours, 2)]

    report.add(
        make_row(
            "asking for the version",
            "us",
            in_turns(work, args.slice / 10, time.thread_time),
            {"reading a word": BARE},
            [peer] if args.peers else [],
            bars=poll_bars,
            clock=CPU,
            no_peer=none,
            work="one number from shared memory",
        )
    )
    writer.close()


def host(args: "BenchOptions", report: Report, folder: Path, new: dict[str, Tensor]) -> None:
    """Many weights: fetch into the warm standby, and the pause of the swap."""
    writer, file = WeightWriter.create(folder / "large", new), folder / "large.safetensors"
    reader, module = WeightReader.open(folder / "large", verify="never"), Bag(new)
    if args.peers:
        safetensors.torch.save_file(new, file)
    calls = {"fetch": fetch_calls(args, reader, new, file), "swap": swap_calls(args, reader, module, new)}
    publishes, times, faults = publish_in_turns(args, writer, calls, module, new)
    fetched, swapped = times["fetch"], times["swap"]
    mb, full = f"{size(new) / 1e6:.0f} MB", not args.quick
    publish, none = np.median(publishes / fetched[WARM_COPY]), "" if args.peers else "--no-peers"

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_least("of limit", of_limit, 1 / 1.2)] * full + [at_most("page faults", faults, 0)]

    report.add(
        make_row(
            f"{mb}: fetch into standby",
            "ms",
            fetched,
            {WARM_COPY: PHYSICAL},
            list(fetched)[2:],
            bars=bars,
            clock=CPU,
            note=f"publish, hash included, takes {publish:.2f} x the copy",
            no_peer=none,
            work="the bytes of all weights in this process; ours were equal after every swap",
        )
    )

    def pause_bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("ms", ours, 1)]

    report.add(
        make_row(
            f"{mb}: pause of the swap",
            "ms",
            swapped,
            {POINTERS: PHYSICAL},
            list(swapped)[2:],
            bars=pause_bars,
            clock=CPU,
            no_peer=none,
            work="a module with other weights, none copied",
        )
    )
    writer.close()


def fetch_calls(args: "BenchOptions", reader: WeightReader, new: dict[str, Tensor], file: Path) -> Calls:
    """Bringing the bytes of all weights into this process: ours, a plain copy, and the peers'."""
    source, warm = np.full((2, size(new)), 1, np.uint8)
    aside, shared = ({n: t.clone() for n, t in new.items()} for _ in range(2))
    calls: Calls = {WARM_COPY: lambda: np.copyto(warm, source), "ours": reader.fetch}
    if args.peers:
        for t in shared.values():
            t.share_memory_()
        calls |= {
            f"copy_ from share_memory_, {versioned('torch')}": lambda: [
                t.copy_(shared[n]) for n, t in aside.items()
            ],
            f"safetensors file, {versioned('safetensors')}": lambda: [
                aside[n].copy_(t) for n, t in safetensors.torch.load_file(file).items()
            ],
        }
    return calls


def swap_calls(
    args: "BenchOptions", reader: WeightReader, module: nn.Module, new: dict[str, Tensor]
) -> Calls:
    """Giving a module the weights that lie ready: ours, a word for each tensor, and the peers'."""
    table = np.zeros((2, len(new)), np.uint64)
    calls: Calls = {"ours": lambda: reader.swap(module), POINTERS: lambda: np.copyto(table[0], table[1])}
    if args.peers:
        calls |= {
            f"setting .data, {versioned('torch')}": lambda: point(module, new),
            f"load_state_dict(assign=True), {versioned('torch')}": lambda: module.load_state_dict(
                new, assign=True
            ),
        }
    return calls


def publish_in_turns(
    args: "BenchOptions",
    writer: WeightWriter,
    calls: dict[str, Calls],
    module: nn.Module,
    new: dict[str, Tensor],
) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]], int]:
    """Publish, then every call once, again and again -> (seconds of a publish [repeats], {kind: {name:
    seconds [repeats]}}, page faults of our fetches); the first two repeats warm up and do not count."""
    times: dict[str, dict[str, list[float]]] = {kind: {n: [] for n in named} for kind, named in calls.items()}
    publishes, faults, end = [], 0, time.perf_counter() + args.slice
    while len(publishes) < LEAST + 2 or time.perf_counter() < end:
        publishes.append(timed(lambda: writer.publish(writer.version + 1, new)))
        for kind, named in calls.items():
            for name, call in named.items():
                before = page_faults()
                times[kind][name].append(timed(call))
                faults += (
                    page_faults() - before if (kind, name) == ("fetch", "ours") and len(publishes) > 2 else 0
                )
                if kind == "swap" and name == "ours":
                    assert all(
                        torch.equal(p, t) for p, t in zip(module.parameters(), new.values(), strict=True)
                    )
    return (
        np.array(publishes[2:]),
        {k: {n: np.array(t[2:]) for n, t in v.items()} for k, v in times.items()},
        faults,
    )


class Bag(nn.Module):
    """A module with these tensors and nothing to compute."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        for name, t in tensors.items():
            at: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(last, nn.Parameter(t.clone(), requires_grad=False))


def point(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for p, t in zip(module.parameters(), tensors.values(), strict=True):
        p.data = t


def timed(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def page_faults() -> int:
    use = resource.getrusage(resource.RUSAGE_THREAD)
    return use.ru_minflt + use.ru_majflt


# ---- a link ------------------------------------------------------------------------------------------------


def link(args: "BenchOptions", report: Report, base: dict[str, Tensor]) -> None:
    """Deltas of bf16 weights of which 1 % changed: find and pack, unpack and apply, bytes."""
    new, mb, full = changed(base, CHANGED), f"{size(base) / 1e6:.0f} MB", not args.quick
    result = deltas.content_hash(new)
    pairs = [(deltas.elements(base[n]), deltas.elements(new[n])) for n in base]
    words = [(a.view(np.uint64), b.view(np.uint64)) for a, b in pairs]
    mask, step = np.empty(deltas.BLOCK, bool), deltas.BLOCK

    def pack() -> np.ndarray:
        return deltas.to_bytes(deltas.diff(base, new, 1, 2, link=LINK, result=result))

    def read_both() -> None:
        for a, b in words:
            for s in range(0, len(a), step):
                np.not_equal(a[s : s + step], b[s : s + step], out=mask[: len(a[s : s + step])])

    def plain() -> list[tuple[Tensor, Tensor]]:
        out = []
        for a, b in ((base[n].view(torch.int16).view(-1), new[n].view(torch.int16).view(-1)) for n in base):
            index = (a != b).nonzero().view(-1)
            out.append((index.int(), b[index]))
        return out

    message, lists = pack(), plain()
    share, none = len(message) / size(base), "" if args.peers else "--no-peers"
    for (n, t), (index, values) in zip(new.items(), lists, strict=True):
        flat = base[n].view(torch.int16).view(-1).clone()
        flat[index.long()] = values
        assert torch.equal(flat, t.view(torch.int16).view(-1)), "the peer found other changes"
    source, target = np.full((2, size(base)), 1, np.uint8)
    read, compare = "reading both, at the rate of a copy", "comparing both in blocks"
    peers = {f"plain torch calls, {versioned('torch')}": (plain, 1)} if args.peers else {}
    work = {"ours": (pack, 1), read: (lambda: np.copyto(target, source), 1), compare: (read_both, 1)} | peers

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        wanted = [at_most("ms", ours, 40), at_least("of limit", of_limit, 12.7 / 40)] if full else []
        return [*wanted, at_most("bytes of full", share, 0.04)]

    report.add(
        make_row(
            f"{mb}, 1 % changed: diff and pack",
            "ms",
            in_turns(work, args.slice, time.thread_time),
            {read: PHYSICAL, compare: BARE},
            [*peers],
            bars=bars,
            clock=CPU,
            no_peer=none,
            note=f"message {share:.2%} of the full weights",
            work="every changed weight with its place, the same on every side; ours also packs and hashes",
        )
    )
    apply_rows(args, report, base, new, message, lists)


def apply_rows(
    args: "BenchOptions",
    report: Report,
    base: dict[str, Tensor],
    new: dict[str, Tensor],
    message: np.ndarray,
    lists: list[tuple[Tensor, Tensor]],
) -> None:
    """Unpacking a delta and writing it into the weights."""
    mb, full = f"{size(base) / 1e6:.0f} MB", not args.quick
    there = {n: t.clone() for n, t in base.items()}
    layout = deltas.layout_of(there)
    ready = [
        (deltas.elements(t), i.numpy().astype(np.int64), v.numpy().view(np.uint16))
        for t, (i, v) in zip(there.values(), lists, strict=True)
    ]
    lines = np.mean([len(np.unique(i // (LINE // 2))) / (len(t) * 2 / LINE) for t, i, _ in ready])
    source, target = np.full((2, size(base)), 1, np.uint8)

    def ours() -> None:
        deltas.apply(there, deltas.from_bytes(message, layout))

    def scatter() -> None:
        for t, index, values in ready:
            t[index] = values

    def plain_apply() -> None:
        for t, (index, values) in zip(there.values(), lists, strict=True):
            t.view(torch.int16).view(-1)[index.long()] = values

    limit = "the cache lines that change, at the rate of a copy"
    peers = (
        {
            f"plain torch calls, {versioned('torch')}": (plain_apply, 1),
            f"NumPy's scatter of unpacked places, {versioned('numpy')}": (scatter, 1),
        }
        if args.peers
        else {}
    )
    for call in (ours, *(c for c, _ in peers.values())):
        for n, t in there.items():
            t.copy_(base[n])
        call()
        assert all(torch.equal(there[n], t) for n, t in new.items()), "other weights"
    work = {"ours": (ours, 1), limit: (lambda: np.copyto(target, source), 1 / lines)} | peers

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("ms", ours, 8)] * full

    report.add(
        make_row(
            f"{mb}, 1 % changed: unpack and apply",
            "ms",
            in_turns(work, args.slice, time.thread_time),
            {limit: PHYSICAL},
            [*peers],
            bars=bars,
            clock=CPU,
            no_peer="" if args.peers else "--no-peers",
            note=f"{lines:.0%} of the cache lines change",
            work="the new weights, equal on every side; the peers' places lie unpacked",
        )
    )
