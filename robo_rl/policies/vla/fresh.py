"""Weights of a model that knows nothing yet, so that what lies near each other begins alike.

A public model has learnt from millions of pictures where a patch is, that 127 follows 126, and which entries
of an action a robot has. A small model that learns from a few hundred demonstrations has no time for that:

    places, numbers    e(u) = gain cos(u W + b), W ~ N(0, s²), b ~ U(0, 2 pi): random Fourier features (Rahimi
                       and Recht 2007), so e(u)·e(u') is a Gaussian kernel of their distance. u: row and
                       column of a patch in -1..1, or the value of a number in the prompt that tells the
                       state.
    filters of patches sums of cosines over the patch, high frequencies less: what a picture has is mostly low
    ones
    padded entries     of an action are neither heard nor moved
    words              of the instruction are attended to by every picture token in the first layer of the
                       trunk, so a patch is told at once which of many things is asked for. Without it a word
                       is one of some hundred tokens that a patch attends to alike, and red for green changes
                       next to nothing: FiLM (Perez et al. 2018, arXiv 1709.07871) in an attention layer

Names, shapes and what the network computes are the public model's.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

# s: two places of a grid of eight, and numbers a quarter of their range apart, are alike still
PLACE, NUMBER = 3.0, 4.0
PLACE_STD, FILTER_NORM = 0.5, 0.3
HEARD = 5.0  # logit of a picture token's attention to a word of the instruction, beside others around 0
CUTOFF = 2.0  # half waves over a patch, from which on a filter has little


def waves(u: Tensor, width: int, s: float, generator: torch.Generator) -> Tensor:
    """Points u [N,d] -> random Fourier features [N,width], of standard deviation 1."""
    rate = s * torch.randn(u.shape[1], width, generator=generator, device=u.device)
    phase = 2 * math.pi * torch.rand(width, generator=generator, device=u.device)
    return math.sqrt(2) * torch.cos(u @ rate + phase)


def grid_points(side: int, device: "torch.device | str" = "cpu") -> Tensor:
    """Row and column in -1..1 of the patches of a square picture, row by row: [side²,2]."""
    line = (torch.arange(side, device=device) + 0.5) * 2 / side - 1
    return torch.cartesian_prod(line, line)


def smooth_filters(
    shape: "torch.Size", generator: torch.Generator, device: "torch.device | str" = "cpu"
) -> Tensor:
    """Filters [out,in,p,p] of norm 1, drawn in the frequencies of a patch (DCT-II) with weight 1/(1 + (k² +
    l²)/CUTOFF²)."""
    k = torch.arange(shape[-1], device=device, dtype=torch.float32)
    cosines = torch.cos(math.pi * (k + 0.5) * k[:, None] / shape[-1]) * math.sqrt(2 / shape[-1])
    cosines[0] *= math.sqrt(0.5)
    size = torch.randn(shape, generator=generator, device=device) / (1 + (k[:, None] ** 2 + k**2) / CUTOFF**2)
    filters = torch.einsum("oikl,kx,ly->oixy", size, cosines, cosines)
    return filters / filters.flatten(1).norm(dim=1)[:, None, None, None]


@torch.no_grad()
def order_pictures(patch: nn.Conv2d, place: nn.Embedding, generator: torch.Generator) -> None:
    """Smooth filters of patches, and places that are alike where they are near."""
    side, device = math.isqrt(place.num_embeddings), place.weight.device
    patch.weight.copy_(FILTER_NORM * smooth_filters(patch.weight.shape, generator, device))
    place.weight.copy_(PLACE_STD * waves(grid_points(side, device), place.embedding_dim, PLACE, generator))


@torch.no_grad()
def order_numbers(words: nn.Embedding, first: int, count: int, generator: torch.Generator) -> None:
    """Words `first` .. `first + count - 1` are numbers of a range: those that are near are alike."""
    u = torch.linspace(-1, 1, count)[:, None]
    words.weight[first : first + count] = (
        waves(u, words.embedding_dim, NUMBER, generator) * words.embedding_dim**-0.5
    )


@torch.no_grad()
def order_actions(inward: nn.Linear, outward: nn.Linear, entries: int, generator: torch.Generator) -> None:
    """What is made of an action's entries, and what gives them back.

    Entries after the first `entries` have no target, so what a fresh layer did to them would be noise to the
    others. The norms of the layers between divide a token by its length, and with it how large the noise was:
    beside a constant they know it still.
    """
    inward.weight[:, entries:] = 0
    outward.weight[entries:] = 0
    inward.bias.copy_(torch.randn(inward.bias.shape, generator=generator))


@torch.no_grad()
def hear_instruction(
    vision: Any,
    projector: nn.Module,
    words: nn.Embedding,
    attention: Any,
    told: list[int],
    generator: torch.Generator,
) -> None:
    """Let picture tokens attend to the words `told` (rows of the embedding) with a logit of HEARD.

    Pictures get a constant u in common (of the norm that ends the vision tower), those words w, both as large
    as what else they are. In the plane that rotary positions turn slowest, with RMS norms before them:

        query = beta u·x/|u|²,   key = beta w·y/|w|²,   beta² / (2 sqrt(d)) = HEARD
    """
    width, d = words.embedding_dim, attention.head_dim
    vision.norm.bias.copy_(torch.randn(vision.norm.bias.shape, generator=generator))
    constant = vision.norm.bias.expand(1, vision.place.num_embeddings, -1)
    u = (projector(constant) - projector(torch.zeros_like(constant)))[0, 0]
    size = u.square().mean().sqrt()
    vision.norm.bias.div_(size)
    w = torch.randn(width, generator=generator).sign()
    words.weight[told] += w * width**-0.5
    beta = math.sqrt(2 * HEARD * math.sqrt(d))
    for projection, common in ((attention.q_proj, u / size), (attention.k_proj, w)):
        heads = projection.weight.view(-1, d, width)
        heads[:, d // 2 - 1], heads[:, d - 1] = beta * common / width, 0
