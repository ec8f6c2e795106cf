"""`robo_rl bench gpu`: a pi0.5 of full size with random weights on one GPU, in one call; with --twin the same
code at tiny size on the CPU.

Loading; a chunk of one robot; chunks of many; a full fine-tune; the expert alone on stored prefixes; the
memory of one iteration of PPO; the simulators that step on the device. A part that fails, or for which no
time is left, says so and the others go on: every row is in the document (--out) as soon as it is known. The
forms of a chunk (eager, torch.compile, a CUDA graph) must give the same actions, and the fastest counts.
"""

import resource
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from robo_rl.bench.rows import BARE, PHYSICAL, Bar, Report, at_least, at_most, in_turns, lacking, make_row
from robo_rl.device_names import check_device
from robo_rl.errors import UserError
from robo_rl.policies.blocks import compiled_blocks

if TYPE_CHECKING:
    from robo_rl.bench.options import BenchOptions

FAMILY = "pi05"
PRODUCT, BYTES, READ = (
    "their operations at the rate of a large product",
    "their weights at the rate of a copy",
    "the file's bytes, read",
)
NO_PEER = "openpi and LeRobot need environments of their own"
WARP, WARP_ALONE, RESETS = "MuJoCo Warp on the device", "its graph of physics alone", "with resets"
SHARE = 0.025  # of the time, for the repeats of one row
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the parts."""

    size: str
    device: str
    dtype: torch.dtype
    batch: int
    """Observations of a batch of chunks."""
    tuned: int
    """Samples of a step of the full fine-tune."""
    expert: int
    """Samples of a step of the expert alone."""
    envs: int
    product: int
    """Side of the product whose rate stands for the processor's."""
    views: int = 2
    words: int = 40


FULL = Scale(
    size="full", device="cuda", dtype=torch.bfloat16, batch=64, tuned=32, expert=256, envs=64, product=8192
)
TWIN = Scale(size="tiny", device="cpu", dtype=torch.float32, batch=4, tuned=2, expert=4, envs=4, product=128)


@dataclass
class Bench:
    """What the parts share."""

    scale: Scale
    report: Report
    seconds: float
    """For the repeats of one row."""
    quick: bool = False
    model: Any = None
    flops: dict[str, float] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether the bars of a full size hold."""
        return self.scale.size == "full"

    def bars(self, *bars: Bar) -> list[Bar]:
        """The bars, at full size."""
        return list(bars) if self.full else []

    def name(self, what: str) -> str:
        """Of a row."""
        return (
            f"{FAMILY} {self.scale.size}, {what}, "
            f"{'bf16' if self.scale.dtype == torch.bfloat16 else 'fp32'}, {self.scale.device}"
        )


def measure(args: "BenchOptions", report: Report) -> None:
    """All parts, until --minutes are over."""
    scale = TWIN if args.twin else FULL
    check_device(scale.device)
    seconds = 0.05 if args.twin else 60 * args.minutes * SHARE
    run_parts(
        PARTS, Bench(scale, report, seconds, args.quick or args.twin), time.monotonic() + 60 * args.minutes
    )


def run_parts(parts: "dict[str, Callable[[Bench], None]]", bench: Bench, end: float) -> None:
    """One part after the other until `end` [s of the monotonic clock]; one that fails is told and left."""
    for name, part in parts.items():
        if time.monotonic() > end:
            bench.report.skip(name, "the time is over")
            continue
        try:
            part(bench)
        except (RuntimeError, UserError, OSError, MemoryError, AssertionError) as e:
            # the next part does not need this one; where it failed is wanted, for it is a defect
            traceback.print_exc()
            bench.report.skip(
                name, f"it failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
            )
        if bench.scale.device != "cpu":
            torch.cuda.empty_cache()


# ---- helpers -----------------------------------------------------------------------------------------------


def waited(call: Callable[[], object], device: str) -> Callable[[], None]:
    """The call, and whatever it asked of the device."""

    def work() -> None:
        call()
        if device != "cpu":
            torch.cuda.synchronize()

    return work


def limits(scale: Scale, flops: float, size: float = 0.0) -> dict[str, tuple[Callable[[], object], float]]:
    """(call, jobs that it does) of a job of so many operations, and of reading so many bytes."""
    n = scale.product
    a, b = (torch.randn(n, n, device=scale.device).to(scale.dtype) for _ in range(2))
    out = torch.empty_like(a)
    product = waited(lambda: torch.mm(a, b, out=out), scale.device)
    made: dict[str, tuple[Callable[[], object], float]] = {PRODUCT: (product, 2 * n**3 / flops)}
    if size:
        x = torch.empty(GIB if scale.size == "full" else 1 << 20, dtype=torch.uint8, device=scale.device)
        y = torch.empty_like(x)
        made[BYTES] = (waited(lambda: y.copy_(x), scale.device), 2 * x.nbytes / size)
    return made


def inputs(bench: Bench, n: int) -> dict[str, Tensor]:
    """Random inputs of a model for n rows, all views and words there."""
    s, c = bench.scale, bench.model.config
    g = torch.Generator().manual_seed(0)
    out = {
        "images": torch.rand(n, s.views, 3, c.vision.image, c.vision.image, generator=g) * 2 - 1,
        "image_mask": torch.ones(n, s.views, dtype=torch.bool),
        "tokens": torch.randint(0, c.vocab, (n, s.words), generator=g),
        "token_mask": torch.ones(n, s.words, dtype=torch.bool),
        "state": torch.randn(n, c.state_width, generator=g),
    }
    return {k: v.to(s.device) for k, v in out.items()}


def noise_of(bench: Bench, n: int) -> Tensor:
    """Noise [n,H,W] of chunks."""
    c = bench.model.config
    return torch.randn(n, c.horizon, c.action_width, generator=torch.Generator().manual_seed(1)).to(
        bench.scale.device
    )


def count_flops(call: Callable[[], object]) -> float:
    """Operations of a call."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops())


def peak_memory(device: str) -> int:
    """Bytes at the largest so far."""
    return (
        torch.cuda.max_memory_allocated()
        if device != "cpu"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


# ---- the parts ---------------------------------------------------------------------------------------------


def loading(bench: Bench) -> None:
    """Weights of a seed, written once, read straight to the device."""
    from safetensors.torch import save_file

    from robo_rl.files import require_free
    from robo_rl.policies.vla.make import METADATA, load_model, make_model, model_metadata, vla_config
    from robo_rl.policies.vla.weights import as_metadata

    s = bench.scale
    bench.model = make_model(vla_config(FAMILY, s.size), 0, s.device, s.dtype)
    weights = {k: v.cpu().contiguous() for k, v in bench.model.state_dict().items()}
    size = sum(x.nbytes for x in weights.values())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        require_free(file, size)
        save_file(weights, file, as_metadata(**{METADATA: model_metadata(bench.model.config)}))
        del weights

        def read() -> None:
            with open(file, "rb", buffering=0) as f:
                while f.read(1 << 24):
                    pass

        times: dict[str, list[float]] = {"ours": [], READ: []}
        for _ in range(2):
            for name, call in (("ours", lambda: load_model(file, s.device, s.dtype)), (READ, read)):
                begin = time.perf_counter()
                waited(call, s.device)()
                times[name].append(time.perf_counter() - begin)
    bench.report.add(
        make_row(
            bench.name(f"load {size / 1e9:.1f} GB"),
            "s",
            {k: np.array(v) for k, v in times.items()},
            {READ: BARE},
            bars=lambda ours, of_limit, over_peer: bench.bars(at_most("s", ours, 20)),
            no_peer=NO_PEER,
            work="headers, layout and every tensor, to the device; the file was read before",
        )
    )


def need_model(bench: Bench) -> None:
    """Make the model where loading did not."""
    if bench.model is None:
        from robo_rl.policies.vla.make import make_model, vla_config

        bench.model = make_model(
            vla_config(FAMILY, bench.scale.size), 0, bench.scale.device, bench.scale.dtype
        )


def chunk_forms(bench: Bench, n: int, k: int) -> tuple[dict[str, Callable[[], Tensor]], dict[str, str]]:
    """({form: call -> chunks [n,H,W] of k steps}, {form: why it is not here}); the inputs lie on the
    device. `policies.vla.quick` is what serve and deploy act by."""
    from robo_rl.policies.vla.policy import ExpertHead
    from robo_rl.policies.vla.quick import QuickSampler
    from robo_rl.sampling import time_grid

    model, cpu = bench.model, bench.scale.device == "cpu"
    x, noise = inputs(bench, n), noise_of(bench, n)
    grid = time_grid(k)
    plain = [(1.0, float(after - t)) for t, after in zip(grid[:-1], grid[1:], strict=True)]

    @torch.no_grad()
    def eager() -> Tensor:
        return model.sample(model.prefix(**x, drop=False), noise, k)

    def quick(compiled: bool) -> Callable[[], Tensor]:
        head = ExpertHead(model.expert, model.action_width)
        sampler = QuickSampler(model.trunk, head, plain, grid[:-1].to(noise.device), compiled)
        return lambda: sampler(x, noise.flatten(1)).view_as(noise)

    one = "one pass" if cpu else "one launch"
    forms: dict[str, Callable[[], Tensor]] = {"eager": eager, one: quick(False)}
    missing: dict[str, str] = {}
    if bench.quick:
        missing[f"{one}, compiled"] = "it compiles for half a minute"
    else:
        forms[f"{one}, compiled"] = quick(True)
    for name, form in list(forms.items()):
        try:
            form()
        except Exception as e:  # a compiler that cannot is no reason to measure nothing
            forms.pop(name)
            missing[name] = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:200]
    return forms, missing


def chunks(bench: Bench, n: int, k: int, unit: str, bar: Callable[[float], Bar]) -> None:
    """One row: chunks of n observations with k denoise steps, in the fastest form."""
    need_model(bench)
    s, model = bench.scale, bench.model
    forms, missing = chunk_forms(bench, n, k)
    right = next(iter(forms.values()))().float().clone()
    for name, form in forms.items():
        apart = float((form().float() - right).norm() / right.norm())
        assert apart < 0.02, f"{name} gives other chunks than eager ({apart:.3f} apart)"
    units = n if unit == "obs/s" else 1
    flops = count_flops(forms["eager"]) / units
    size = sum(p.nbytes for p in model.parameters()) - model.trunk.words.weight.nbytes
    bounds = limits(s, flops, size / units)
    times = in_turns(
        {name: (waited(form, s.device), units) for name, form in forms.items()} | bounds, bench.seconds
    )
    best = min(forms, key=lambda name: float(np.median(times[name])))
    bench.report.add(
        make_row(
            bench.name(f"{n} observation{'s' * (n > 1)} of {s.views} cameras, K = {k}"),
            unit,
            times | {"ours": times[best]},
            dict.fromkeys(bounds, PHYSICAL),
            [],
            missing,
            lambda ours, of_limit, over_peer: bench.bars(bar(ours)),
            no_peer=NO_PEER,
            work="pictures and words through the trunk, K steps of the expert; the inputs lie on the device",
            note="the fastest of "
            f"{', '.join(f'{name} {1e3 * float(np.median(times[name])) * units:.2f} ms' for name in forms)}: {best}",  # noqa: E501
        )
    )


def latency(bench: Bench) -> None:
    """A chunk of one robot."""
    chunks(bench, 1, 10, "ms", lambda ours: at_most("ms", ours, 15))


def throughput(bench: Bench) -> None:
    """Chunks of many."""
    chunks(bench, bench.scale.batch, 4, "obs/s", lambda ours: at_least("obs/s", ours, 170))


def trainer(bench: Bench, params: list[Tensor], loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A step of AdamW (its states and masters in float32) along the gradient of a loss."""
    from robo_rl.algos.credit import make_adam

    optimizer = make_adam(params, 1e-5)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def learning(
    bench: Bench,
    what: str,
    n: int,
    params: list[Tensor],
    loss: Callable[[], Tensor],
    work: str,
    bars: Callable[[float, float], list[Bar]],
) -> None:
    """One row: samples per second of a step of n of them."""
    s = bench.scale
    # a backward pass is twice a forward pass; what is computed again does not count
    flops = 3 * count_flops(loss) / n
    step = waited(trainer(bench, params, loss), s.device)
    bounds, told = limits(s, flops), ""
    if not bench.quick:
        eager = in_turns({"eager": (step, n)}, 0.0)["eager"]
        told = f"; without --bc.compile {1 / float(np.median(eager)):.4g} samples/s"
    with nullcontext() if bench.quick else compiled_blocks(bench.model):
        step()
        if s.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        times = in_turns({"ours": (step, n)} | bounds, bench.seconds)
    bench.report.add(
        make_row(
            bench.name(f"{what}, {n} samples a step"),
            "samples/s",
            times,
            dict.fromkeys(bounds, PHYSICAL),
            bars=lambda ours, of_limit, over_peer: bench.bars(*bars(ours, of_limit)),
            no_peer=NO_PEER,
            work=work,
            note=f"{flops / 1e12:.3g} TFLOP per sample; peak memory {peak_memory(s.device) / GIB:.1f} GiB"
            + told,
        )
    )
    for p in params:
        p.grad = None


def fine_tune(bench: Bench) -> None:
    """All weights learn; the ratio to the limit is the MFU."""
    from robo_rl.policies.blocks import recompute
    from robo_rl.policies.vla.make import make_model, vla_config

    need_model(bench)
    s, kept = bench.scale, bench.model
    bench.model = None
    kept.to("meta")  # one model at a time
    model: Any = recompute(make_model(vla_config(FAMILY, s.size), 0, s.device, s.dtype))
    bench.model = model
    x, noise = inputs(bench, s.tuned), noise_of(bench, s.tuned)
    actions, t = torch.zeros_like(noise), torch.linspace(0.1, 0.9, s.tuned, device=s.device)
    try:
        learning(
            bench,
            "full fine-tune",
            s.tuned,
            list(model.parameters()),
            lambda: model.loss_map(model.prefix(**x, drop=False), actions, noise, t).mean(),
            "forward, backward with activations of blocks computed again, AdamW",
            lambda ours, of_limit: [at_least("MFU", of_limit, 0.5)],
        )
    finally:
        bench.model = None


def expert_alone(bench: Bench) -> None:
    """The expert learns on contexts that were stored."""
    need_model(bench)
    s, model = bench.scale, bench.model
    model.requires_grad_(False)
    model.expert.requires_grad_(True)
    with torch.no_grad():
        context = model.prefix(**inputs(bench, s.expert), drop=False)
    noise = noise_of(bench, s.expert)
    actions, t = torch.zeros_like(noise), torch.linspace(0.1, 0.9, s.expert, device=s.device)
    learning(
        bench,
        "expert alone on stored prefixes",
        s.expert,
        list(model.expert.parameters()),
        lambda: model.loss_map(context, actions, noise, t).mean(),
        "forward and backward of the expert, AdamW; prefixes lie on the device",
        lambda ours, of_limit: [at_least("samples/s", ours, 2000)],
    )
    bench.model = None


def ppo_memory(bench: Bench) -> None:
    """One iteration of pi_rl: rollouts of all envs, then an update of all weights."""
    from robo_rl.bench.pictures import PictureEnv
    from robo_rl.experiment.methods import find_method
    from robo_rl.options import PiRlOptions, PolicyOptions
    from robo_rl.policies import ObsSpec, make_policy
    from robo_rl.rollout import Collector

    s = bench.scale
    bench.model = None
    env = PictureEnv(s.envs, s.views, 224 if bench.full else 28)
    spec = ObsSpec(
        state=env.state, action=env.action, views=env.views, image_size=env.size, language=True, text=64
    )
    size: Any = s.size
    options = PolicyOptions(
        kind=FAMILY,
        size=size,
        horizon=50 if bench.full else 10,
        execute=10,
        recompute=True,
        dtype="bf16" if s.dtype == torch.bfloat16 else "fp32",
    )
    if s.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    policy = make_policy(options, spec, 0).to(s.device)
    made = time.perf_counter() - begin
    learner = find_method("pi_rl")(
        policy, PiRlOptions(decisions=2, minibatch=s.envs, epochs=1, critic_warmup=0), 0
    )
    collector = Collector(env, policy, 0.99, 0)
    begin = time.perf_counter()
    rollout = collector.collect(policy, 2)
    acted = time.perf_counter() - begin
    begin = time.perf_counter()
    learner.update(rollout, 0.0, 0)
    learnt = time.perf_counter() - begin
    peak = peak_memory(s.device) / GIB
    weights = sum(p.nbytes for p in policy.parameters()) / GIB
    bench.report.add(
        make_row(
            bench.name(f"memory of one iteration of pi_rl, {s.envs} envs of 2 decisions"),
            "GiB",
            {"ours": np.array([peak]), "the weights": np.array([weights])},
            {"the weights": PHYSICAL},
            bars=lambda ours, of_limit, over_peer: bench.bars(at_most("GiB", ours, 130)),
            no_peer=NO_PEER,
            work="act with all envs, re-score and learn with all weights (AdamW in float32)",
            note=f"policy made in {made:.1f} s, acting {acted:.1f} s, learning {learnt:.1f} s",
        )
    )


def maniskill(bench: Bench) -> None:
    """ManiSkill's GPU backend against its own steps."""
    what = "ManiSkill on the device"
    if bench.scale.device == "cpu":
        return bench.report.skip(
            what, "the device is a CPU (tests/test_sims_maniskill.py runs this backend there)"
        )
    if why := lacking("mani_skill", "ManiSkill", "maniskill"):
        return bench.report.skip(what, why)
    import sims

    n = 1024
    env: Any = sims.make("maniskill", "PickCube-v1", n, device=bench.scale.device)
    env.reset(seed=0)
    actions = torch.zeros(n, env.single_action_space.shape[0], device=bench.scale.device)
    raw = env.env
    times = in_turns(
        {
            "ours": (waited(lambda: env.step(actions), "cuda"), n),
            "its own step": (waited(lambda: raw.step(raw.action_space.sample()), "cuda"), n),
        },
        bench.seconds,
    )
    bench.report.add(
        make_row(
            f"ManiSkill PickCube-v1, N = {n}, on the device",
            "steps/s",
            times,
            {"its own step": BARE},
            bars=lambda ours, of_limit, over_peer: [at_least("of limit", of_limit, 0.85)],
            no_peer="it is its own",
        )
    )
    env.close()


def warp(bench: Bench) -> None:
    """The adapter of MuJoCo Warp against the bare launches of its own graph of physics."""
    device = bench.scale.device
    if why := lacking("mujoco_warp", "MuJoCo Warp", "warp"):
        return bench.report.skip(WARP, why)
    import sims

    n, steps = (4096, 16) if device != "cpu" else (4, 2)
    env: Any = sims.make("mujoco_warp", "ant", n, device=device)
    actions = (
        torch.rand(steps, n, env.model.nu, generator=torch.Generator().manual_seed(0)).to(device) * 2 - 1
    )
    env.reset(seed=0)
    for a in actions:  # down to the floor
        env.step(a)
    begin, few = env.get_state(), np.arange(n) % 128 == 0

    def play(step: Callable[[Tensor], object]) -> Callable[[], None]:
        def work() -> None:
            env.set_state(begin)
            for a in actions:
                step(a)

        return waited(work, device)

    def bare(a: Tensor) -> None:
        env.physics.ctrl.copy_(a)
        env.physics.step()

    def with_resets(a: Tensor) -> None:
        env.step(a)
        env.reset(options={"reset_mask": few})

    loops = {"ours": env.step, WARP_ALONE: bare, RESETS: with_resets}
    times = in_turns({k: (play(step), n * steps) for k, step in loops.items()}, bench.seconds)
    reset = n * float(np.median(times.pop(RESETS)))
    bench.report.add(
        make_row(
            f"MuJoCo Warp Ant-v5, N = {n}, {device}",
            "steps/s",
            times,
            {WARP_ALONE: BARE},
            bars=lambda ours, of_limit, over_peer: bench.bars(at_least("of limit", of_limit, 0.85)),
            no_peer="it is its own",
            work=f"control steps of {env.walker.frame_skip} physics steps from the same states",
            note=f"a step and a reset of one env in 128 take {1e3 * reset:.2f} ms",
        )
    )
    env.close()


PARTS: dict[str, Callable[[Bench], None]] = {
    "loading": loading,
    "a chunk of one robot": latency,
    "chunks of many": throughput,
    "expert on stored prefixes": expert_alone,
    "full fine-tune": fine_tune,
    "memory of an iteration": ppo_memory,
    "ManiSkill on the device": maniskill,
    WARP: warp,
}
