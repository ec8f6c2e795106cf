"""`robo_rl wm train DATASET --kind encoded`: learn latent dynamics of encoded pictures."""

from dataclasses import dataclass, field
from pathlib import Path

from robo_rl.cli.wm import WmTrain
from world_models.options import EncodedFitOptions, EncodedOptions


@dataclass(frozen=True, kw_only=True)
class WmTrainEncoded(WmTrain):
    """Learn the dynamics of encoded camera frames from recorded episodes (robo_rl collect --obs rgb): faster than video, less sharp."""

    kind: str = "encoded"
    net: EncodedOptions = field(default_factory=EncodedOptions)
    fit: EncodedFitOptions = field(default_factory=EncodedFitOptions)


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
        inner, report = wm.calibrated(made.dynamics, fitter.coded, args.horizon, args.tolerance)
        made.spec = made.spec.calibrated(inner.spec.horizon, inner.spec.threshold)
        return made, report
    return in_parts(args, folder, data, fitter, args.fit.pictures + args.fit.dynamics.updates,
                    lambda: fitter.update + (fitter.dynamics.update if fitter.dynamics else 0), finish)
