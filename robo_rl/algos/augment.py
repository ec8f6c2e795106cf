"""What a demonstrated observation could also have looked like, for supervision (`--bc.shift`, `--bc.colour`,
`--bc.forget`).

A few scenes are learnt by heart: their pictures differ in some pixels, and the exact state at the start tells
one episode from all others. Then the policy does not look where things are.

Sources: random shift with repeated borders, Kostrikov et al. 2021 (DrQ, arXiv 2004.13649); brightness,
contrast and saturation, after torchvision's ColorJitter; a state that is now and then not told, against
copying what goes with the cause (de Haan et al. 2019, arXiv 1905.11979).
"""

import torch
from torch import Tensor

from robo_rl.algos.onpolicy import Demos
from robo_rl.policies.policy import Obs


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """[B,h,w,3], each moved by whole pixels drawn from -most .. most on both axes; what comes in repeats the
    border."""
    b, h, w = images.shape[:3]
    down, right = (torch.randint(-most, most + 1, (b, 1), generator=generator) for _ in range(2))
    rows, columns = (torch.arange(h) + down).clamp(0, h - 1), (torch.arange(w) + right).clamp(0, w - 1)
    rows, columns = rows.to(images.device), columns.to(images.device)
    return images[torch.arange(b, device=images.device)[:, None, None], rows[:, :, None], columns[:, None]]


def recoloured(images: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """uint8 [B,h,w,3], brightness, contrast and saturation of each times factors drawn from 1 - most .. 1 +
    most."""

    def factor() -> Tensor:
        drawn = torch.rand(len(images), 1, 1, 1, generator=generator)
        return (1 + most * (2 * drawn - 1)).to(images.device)

    x = images.float() * factor()
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (x - mean) * factor()
    grey = x.mean(3, keepdim=True)
    return (grey + (x - grey) * factor()).round_().clamp_(0, 255).to(torch.uint8)


def forgotten(state: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """[B,S], a `share` of the rows in place of their own the mean of the batch."""
    gone = torch.rand(len(state), 1, generator=generator) < share
    return torch.where(gone.to(state.device), state.mean(0), state)


def changed(obs: Obs, shift: float, colour: float, forget: float, generator: torch.Generator) -> Obs:
    """Observations of B frames, each changed as drawn.

    shift: most of a move, as a share of the picture's side; colour: most change of each factor; forget: share
    of the rows without their state.
    """
    obs = dict(obs)
    for name in [n for n in obs if n.startswith("image/")]:
        if shift:
            obs[name] = shifted(obs[name], max(1, round(shift * obs[name].shape[1])), generator)
        if colour:
            obs[name] = recoloured(obs[name], colour, generator)
    if forget:
        obs["state"] = forgotten(obs["state"], forget, generator)
    return obs


def augmented(sample: Demos, shift: float, colour: float, forget: float) -> Demos:
    """A sampler of demonstrations whose observations are `changed`, drawn anew for every batch; `sample`
    itself where nothing is asked for."""
    if not (shift or colour or forget):
        return sample

    def draw(size: int, generator: torch.Generator):
        obs, chunk, mask = sample(size, generator)
        return changed(obs, shift, colour, forget, generator), chunk, mask

    return draw
