"""`robo_rl bench sync`: weights from the learner to the workers, on one host and over a link.

The limits are what the memory allows: a copy into a warm buffer, reading both copies. The peers are a safetensors
file (one host) and plain torch calls that find, pack and write the same changes (link). One process takes all parts
in turn, so a ratio holds on a busy machine too; times are CPU times of this thread but for rows of several threads.
"""

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

from robo_rl.cli.bench_rows import Bar, Report, at_least, at_most, in_turns, make_row
from robo_rl.runtime import deltas
from robo_rl.runtime.weights import WeightReader, WeightWriter

if TYPE_CHECKING:
    from robo_rl.cli.bench import Bench

LARGE, LARGE_QUICK = 100, 8  # tensors of a million bf16 weights
CHANGED = 0.01  # share of weights that one update changes
LINK = 100e6  # B/s


def measure(args: "Bench", report: Report) -> None:
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
    return {f"layers.{i}.weight": (0.02 * torch.randn(1000, 1000, generator=g)).bfloat16() for i in range(count)}


def changed(tensors: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """A copy in which about `share` of the weights have another last bit."""
    rng, out = np.random.default_rng(0), {n: t.clone() for n, t in tensors.items()}
    for t in out.values():
        deltas.elements(t)[rng.integers(0, t.numel(), round(share * t.numel()))] ^= 1
    return out


def size(tensors: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


# ---- one host ----------------------------------------------------------------------------------------------------


def small(args: "Bench", report: Report, folder: Path) -> None:
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

    def by_file() -> None:
        safetensors.torch.save_file(tensors, file)
        policy.load_state_dict(safetensors.torch.load_file(file))

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("ms", ours, 1)]
    work = {"ours": (ours, 1), "two copies": (copies, 1)} | ({"safetensors file": (by_file, 1)} if args.peers else {})
    report.add(make_row("1 MB: publish, fetch, verify, swap", "ms", in_turns(work, args.slice, time.thread_time),
                        "two copies", "safetensors file" if args.peers else "", bars))
    cell = memoryview(bytearray(4096)).cast("Q")
    work = {"ours": (reader.version, 1), "reading a word": (lambda: cell[8], 1)}

    def poll_bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("us", ours, 2)]
    report.add(make_row("asking for the version", "us", in_turns(work, args.slice / 10, time.thread_time),
                        "reading a word", "", poll_bars))


def host(args: "Bench", report: Report, folder: Path, new: dict[str, Tensor]) -> None:
    """Many weights: fetch into the warm standby, and the pause of the swap."""
    writer, file = WeightWriter.create(folder / "large", new), folder / "large.safetensors"
    reader, module = WeightReader.open(folder / "large", verify="never"), Bag(new)
    if args.peers:
        safetensors.torch.save_file(new, file)
    source, warm = np.full((2, size(new)), 1, np.uint8)
    aside = {n: t.clone() for n, t in new.items()}
    calls: dict[str, Callable[[], object]] = {
        "copy into a warm buffer": lambda: np.copyto(warm, source), "ours": reader.fetch,
        "pause": lambda: reader.swap(module), "assigning": lambda: point(module, new)}
    if args.peers:
        calls["safetensors file"] = lambda: [aside[n].copy_(t) for n, t in safetensors.torch.load_file(file).items()]
    times: dict[str, list[float]] = {n: [] for n in ("publish", *calls)}
    faults, end = 0, time.perf_counter() + args.slice
    while len(times["ours"]) < 4 or time.perf_counter() < end:
        times["publish"].append(timed(lambda: writer.publish(writer.version + 1, new)))
        for name, call in calls.items():
            before = page_faults()
            times[name].append(timed(call))
            faults += page_faults() - before if name == "ours" and len(times["ours"]) > 2 else 0
    columns = {n: np.array(t[2:]) for n, t in times.items()}
    mb, full = f"{size(new) / 1e6:.0f} MB", not args.quick
    publish = np.median(columns["publish"] / columns["copy into a warm buffer"])

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_least("of limit", of_limit, 1 / 1.2)] * full + [at_most("page faults", faults, 0)]
    report.add(make_row(f"{mb}: fetch into standby", "ms", columns, "copy into a warm buffer",
                        "safetensors file" if args.peers else "", bars,
                        note=f"publish, hash included, takes {publish:.2f} x the copy"))

    def pause_bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("ms", ours, 1)]
    report.add(make_row(f"{mb}: pause of the swap", "ms", columns | {"ours": columns["pause"]}, "assigning", "",
                        pause_bars))
    writer.close()


class Bag(nn.Module):
    """A module with these tensors and nothing to compute."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__()
        for name, t in tensors.items():
            at = self
            *path, last = name.split(".")
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at._modules[part]
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


# ---- a link ------------------------------------------------------------------------------------------------------


def link(args: "Bench", report: Report, base: dict[str, Tensor]) -> None:
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
                np.not_equal(a[s:s + step], b[s:s + step], out=mask[:len(a[s:s + step])])

    def plain() -> list[tuple[Tensor, Tensor]]:
        out = []
        for a, b in ((base[n].view(torch.int16).view(-1), new[n].view(torch.int16).view(-1)) for n in base):
            index = (a != b).nonzero().view(-1)
            out.append((index.int(), b[index]))
        return out
    message, lists = pack(), plain()
    share = len(message) / size(base)

    def bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("ms", ours, 40), at_least("of limit", of_limit, 12.7 / 40)] * full + [at_most("bytes of full", share, 0.04)]
    peers = {"plain torch": (plain, 1)} if args.peers else {}
    work = {"ours": (pack, 1), "reading both copies": (read_both, 1)} | peers
    report.add(make_row(f"{mb}, 1 % changed: diff and pack, 1 thread", "ms", in_turns(work, args.slice, time.thread_time),
                        "reading both copies", "".join(peers), bars, note=f"message {share:.2%} of the full weights"))
    there = {n: t.clone() for n, t in base.items()}
    layout = deltas.layout_of(there)
    ready = [(deltas.elements(t), i.numpy().astype(np.int64), v.numpy().view(np.uint16))
             for t, (i, v) in zip(there.values(), lists, strict=True)]

    def scatter() -> None:
        for t, index, values in ready:
            t[index] = values

    def plain_apply() -> None:
        for t, (index, values) in zip(there.values(), lists, strict=True):
            t.view(torch.int16).view(-1)[index.long()] = values

    def apply_bars(ours: float, of_limit: float, over_peer: float) -> list[Bar]:
        return [at_most("ms", ours, 8)] * full
    work = {"ours": (lambda: deltas.apply(there, deltas.from_bytes(message, layout)), 1), "writing alone": (scatter, 1)}
    work |= {"plain torch": (plain_apply, 1)} if args.peers else {}
    report.add(make_row(f"{mb}, 1 % changed: unpack and apply", "ms", in_turns(work, args.slice, time.thread_time),
                        "writing alone", "plain torch" if args.peers else "", apply_bars))
