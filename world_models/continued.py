"""Models that are gone on with: `robo_rl wm train DATA --init MODEL`, when there are more episodes."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from robo_rl.errors import UserError
from world_models.windows import treated

if TYPE_CHECKING:
    from world_models.model import WorldSpec
    from world_models.options import WorldModelConfig
    from world_models.recorded import Recorded


def init_of(config: "WorldModelConfig") -> tuple[Any, Any]:
    """(the options with the networks of `config.init`, that model); UserError where they ask for others."""
    from world_models.model import load
    from world_models.own_pictures import names_in

    model: Any = load(config.init)
    if model.spec.kind != config.kind:
        raise UserError(
            f"--init {config.init} is a model of kind {model.spec.kind}, got --kind {config.kind}; leave "
            "--kind out"
        )
    if config.image_size not in (0, model.spec.image_size):
        raise UserError(
            f"--init {config.init} has pictures of {model.spec.image_size} pixels, got --image-size "
            f"{config.image_size}; leave --image-size out"
        )
    if config.cameras and names_in(config.cameras) != model.spec.control.views:
        raise UserError(
            f"--init {config.init} has the cameras {','.join(model.spec.control.views) or 'none'}, got "
            f"--cameras {config.cameras}; leave --cameras out"
        )
    net, plain = model.options, type(config.net)()
    if (dtype := getattr(config.net, "dtype", "auto")) != "auto":  # the one thing that may change
        net, plain = replace(net, dtype=dtype), replace(plain, dtype=dtype)
    if config.net not in (plain, net):
        raise UserError(
            f"--init {config.init} keeps its networks: leave --net… out (but --net.dtype), or learn a model "
            "anew without --init"
        )
    model.options = net
    return replace(config, net=net, init=str(Path(config.init).absolute())), model


def known_to(model: Any, data: "Recorded", where: str) -> "Recorded":
    """The data in terms of the model at `where`: its instructions, and its held-out episodes. UserError for
    data that do not fit it."""
    from world_models.recorded import check_fits

    check_fits(model.spec, data, where)
    if model.spec.tasks == ("",):
        data = replace(data, tasks=("",), task=np.zeros_like(data.task))
    data = replace(data.in_terms_of(model.spec.tasks), before=treated(model, data.state[data.first]))
    if not (data.before == 0).any():
        warnings.warn(
            f"no episode that --init {where} learnt from is among the data: what only those showed will be "
            "forgotten. Give them too: robo_rl wm train OLD NEW --init …",
            stacklevel=2,
        )
    return data


def continued(model: Any, data: "Recorded", spec: "WorldSpec") -> Any:
    """The model, with the weights and units it has, for `data`, of which `spec` is: not calibrated any more.
    Its fitter lets states go as far as either recording."""
    arm, model.spec = model.proprio if spec.kind == "video" else model, spec
    arm.spec = replace(spec, state=arm.spec.state)
    arm.gate = None  # it would be of the dynamics before
    return model.requires_grad_(True)  # an arm that was learnt to its end had none
