"""`robo_rl bench serve`: a policy server of openpi's wire with 16 clients at once, against the same questions
one after the other.

The policies are vision-language-action models of the small size with random weights; clients are threads of
this process, on one connection each. One after the other is what openpi's own server does with any number of
clients. The limit is the policy alone on the 16 observations. Under more clients than it can answer, answers
must come within the deadline all the same.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from robo_rl.bench.rows import BARE, PHYSICAL, Report, at_least, at_most, in_turns, lacking, make_row
from robo_rl.errors import UserError
from robo_rl.files import cores
from robo_rl.options import PolicyOptions
from robo_rl.policies import ObsSpec, make_policy

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

FAMILIES = ("smolvla", "pi05")
CLIENTS, CROWD = 16, 48
PIXELS = 64
TOKEN = b"a-token-of-this-bench"
ALONE, IN_TURN, KEPT = (
    "the policy alone, one batch",
    "one after the other (openpi's own server)",
    "the deadline",
)


def measure(args: "BenchOptions", report: Report) -> None:
    """Two rows of each family."""
    for module in ("websockets", "msgpack"):
        if why := lacking(module, module, "console"):
            return report.skip("serve", why)
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        for family in FAMILIES[:1] if args.quick else FAMILIES:
            family_rows(args, report, family)
    finally:
        torch.set_num_threads(threads)


def family_rows(args: "BenchOptions", report: Report, family: str) -> None:
    """16 clients at once; a crowd against a deadline."""
    from robo_rl.experiment.openpi import policy_actor

    size: Any = "tiny" if args.quick else "small"
    n = args.envs or CLIENTS
    spec = ObsSpec(state=20, action=7, views=("front",), image_size=PIXELS, language=True, text=64)
    act = policy_actor(make_policy(PolicyOptions(kind=family, size=size), spec, 0).eval(), 0)
    rng = np.random.default_rng(0)
    asked = [
        {
            "state": rng.standard_normal(20).astype(np.float32),
            "prompt": "pick up the cube",
            "image/front": rng.integers(0, 256, (PIXELS, PIXELS, 3), np.uint8),
        }
        for _ in range(n)
    ]
    batch = [{k: v for k, v in x.items() if k != "prompt"} | {"task": x["prompt"]} for x in asked]
    with serving(act, spec, 60.0, n) as url, ThreadPoolExecutor(n) as pool, contextlib.ExitStack() as stack:
        wires = [stack.enter_context(client(url)) for _ in range(n)]

        def at_once() -> None:
            list(pool.map(ask, wires, asked))

        def in_turn() -> None:
            for x in asked:
                ask(wires[0], x)

        times = in_turns(
            {"ours": (at_once, n), ALONE: (lambda: act(batch), n), IN_TURN: (in_turn, n)}, args.slice
        )
        took = in_turns(
            {"ours": (at_once, n), IN_TURN: (in_turn, n)}, 0.0, time.process_time, least=2, slice_s=0.0
        )
    report.add(
        make_row(
            f"{family} {size}, {n} clients at once, {cores()} cores",
            "obs/s",
            times,
            {ALONE: BARE},
            [IN_TURN],
            bars=lambda ours, of_limit, over_peer: (
                [] if args.quick else [at_least("over one after the other", over_peer, 4)]
            ),
            work=f"a state of 20 numbers, a picture of {PIXELS} x {PIXELS}, a prompt; a chunk of 8 x 7 in 4 "
            "steps, by a websocket on loopback",
            note="CPU time of a question: "
            + ", ".join(
                f"{1e3 * float(np.median(took[k])):.1f} ms {what}"
                for k, what in (("ours", "at once"), (IN_TURN, "one after the other"))
            ),
        )
    )
    deadline = 4 * float(np.median(times[ALONE])) * n + 0.05
    crowd(report, f"{family} {size}", act, spec, asked, deadline, 3 if args.quick else CROWD, args.slice)


def crowd(
    report: Report, name: str, act, spec, asked: list[dict], deadline: float, n: int, seconds: float
) -> None:
    """One row: the 99th percentile of what `n` clients wait who ask again at once, of the questions that are
    answered."""
    waits: list[float] = []
    refused: list[int] = []

    def go_on(wire, x: dict, end: float) -> None:
        while (began := time.monotonic()) < end:
            try:
                ask(wire, x)
                waits.append(time.monotonic() - began)
            except UserError:
                refused.append(1)

    with (
        serving(act, spec, deadline, n) as url,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(n) as pool,
    ):
        wires = [stack.enter_context(client(url)) for _ in range(n)]
        for length in (seconds / 4, seconds):  # the first is not counted: nothing is known of durations yet
            waits.clear()
            refused.clear()
            end = time.monotonic() + length
            list(pool.map(go_on, wires, [asked[i % len(asked)] for i in range(n)], [end] * n))
    if not waits:
        return report.skip(
            f"{name}, a deadline", f"none of {len(refused)} questions was answered within {deadline:.3f} s"
        )
    late = float(np.percentile(waits, 99))
    report.add(
        make_row(
            f"{name}, {n} clients who ask without a pause, deadline {1e3 * deadline:.0f} ms: 99 % of the "
            "answers within",
            "ms",
            {"ours": np.array([late]), KEPT: np.array([deadline])},
            {KEPT: PHYSICAL},
            bars=lambda ours, of_limit, over_peer: [at_most("of the deadline", late / deadline, 1)],
            no_peer="openpi's own server has no deadlines",
            note=f"{len(waits)} answered, {len(refused)} refused; the longest wait {1e3 * max(waits):.0f} ms",
        )
    )


@contextlib.contextmanager
def serving(act, spec, deadline: float, clients: int) -> Iterator[str]:
    """The address of a server that answers with `act`."""
    from robo_rl.experiment.batching import Batcher
    from robo_rl.experiment.openpi import open_server
    from robo_rl.experiment.policy_server import ServeOptions

    options = ServeOptions(run="", wire="openpi", port=0, clients=clients, deadline=deadline)
    batcher = Batcher(act, options.batch).start()
    server = open_server(options, TOKEN, batcher, spec, "", lambda line: None)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
    finally:
        server.shutdown()
        batcher.close()
        thread.join(10)


@contextlib.contextmanager
def client(url: str) -> Iterator[Any]:
    """A connection that has heard the server's first message."""
    from websockets.sync.client import connect

    with connect(
        url, compression=None, additional_headers={"Authorization": f"Api-Key {TOKEN.decode()}"}
    ) as wire:
        wire.recv(timeout=30)
        yield wire


def ask(wire, obs: dict) -> np.ndarray:
    """The chunk for an observation. UserError: it was refused."""
    from controllers.openpi import packb, unpackb

    wire.send(packb(obs))
    said = wire.recv(timeout=120)
    if isinstance(said, str):
        raise UserError(said)
    return unpackb(said)["actions"]
