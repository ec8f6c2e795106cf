"""`robo_rl wm train DATASET --kind encoded`: learn latent dynamics of encoded pictures."""

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from robo_rl.errors import choose, in_range
from world_models.options import EncodedFitOptions, EncodedOptions


@dataclass(frozen=True, kw_only=True)
class WmTrainEncoded:
    """Learn the dynamics of encoded camera frames from recorded episodes (robo_rl collect --obs rgb): faster, less sharp than video."""

    data: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders of LeRobot v3 data sets, of the same env."""
    kind: str = "encoded"
    out: str = ""
    """Run folder; empty: runs/wm-<task>-s<seed>-<time>."""
    resume: str = ""
    """Go on with the run in this folder; every other option then comes from it."""
    seed: int = 0
    horizon: int = 64
    """Control steps to which the error of state and codes is measured on held-out episodes (one in ten)."""
    tolerance: float = 0.75
    """Error of state and codes [std of the data] that the threshold of the uncertainty keeps nine in ten predictions below."""
    torch_threads: int = 1
    net: EncodedOptions = field(default_factory=EncodedOptions)
    fit: EncodedFitOptions = field(default_factory=EncodedFitOptions)

    def __post_init__(self) -> None:
        choose("--kind", self.kind, ("encoded",))
        for name, low, high in (("seed", 0, 2**31 - 1), ("horizon", 2, 10**4), ("torch_threads", 1, 4096)):
            in_range(f"--{name.replace('_', '-')}", getattr(self, name), low, high)
        in_range("--tolerance", self.tolerance, 0, 100, open_low=True)


def run(args: WmTrainEncoded) -> int:
    """Learn, calibrate on held-out episodes, write OUT/model."""
    from robo_rl.cli import wm
    return wm.train(args, learn, images=True)


def learn(args: WmTrainEncoded, folder: Path, data) -> int:
    """The run itself, in its locked folder."""
    from robo_rl.cli import wm
    from robo_rl.cli.wm_video import in_parts
    from world_models.encoded import Encoded
    from world_models.encoded_fit import EncodedFitter

    fitter = EncodedFitter(Encoded(wm.world_spec(data, args.kind, " ".join(args.data)), args.net, args.seed), data, args.fit, args.seed)

    def finish():
        made = fitter.result()
        inner, report = wm.calibrated(made.dynamics, fitter.coded(), args.horizon, args.tolerance)
        made.spec = made.spec.calibrated(inner.spec.horizon, inner.spec.threshold)
        return made, report
    return in_parts(args, folder, data, fitter, args.fit.pictures + args.fit.dynamics.updates,
                    lambda: fitter.update + (fitter.dynamics.update if fitter.dynamics else 0), finish)
