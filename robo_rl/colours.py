"""What colours tell before anything is learnt: pixels without correlation, and where each colour is."""

import math

import torch
from torch import Tensor

COLOURS = 16  # directions of colour that have a point each


@torch.no_grad()
def uncorrelated(pixels: Tensor) -> Tensor:
    """Pixels [B,n,3] of pictures -> L^-1 (p - m), m the mean of a picture's pixels p, and L L^T their
    covariance and a little, for a picture of one colour has none.

    What is left has neither direction nor scale of its own. A small thing of a colour of its own is far from
    the rest, and brightness and contrast make no difference.
    """
    q = pixels - pixels.mean(1, keepdim=True)
    cov = q.transpose(1, 2) @ q / q.shape[1]
    little = 1e-3 * cov.diagonal(dim1=1, dim2=2).mean(1) + 1e-6
    whole = torch.eye(3, device=q.device).expand_as(cov)
    lower = torch.linalg.cholesky_ex(cov + little[:, None, None] * whole)[0]  # asks a GPU for no verdict
    return q @ torch.linalg.solve_triangular(lower, whole, upper=False).transpose(1, 2)


@torch.no_grad()
def colour_points(pixels: Tensor) -> Tensor:
    """Where each of `COLOURS` colours is: pixels [B,3,h,w] -> x and y of each in -1..1, [B,2 COLOURS].

    A colour is a direction d of `uncorrelated` pixels q, its point their mean place under softmax(4 d q):
    that of what differs most from the rest of the picture in that colour. Nothing is learnt.
    """
    h, w, device = *pixels.shape[2:], pixels.device
    k = torch.arange(COLOURS, device=device) + 0.5  # evenly over the sphere (Fibonacci's spiral)
    up, turn = 1 - 2 * k / COLOURS, math.pi * (1 + 5**0.5) * k
    flat = (1 - up.square()).sqrt()
    directions = 4 * torch.stack([flat * turn.cos(), flat * turn.sin(), up], 1)
    rows, columns = (torch.linspace(-1, 1, n, device=device) for n in (h, w))
    grid = torch.stack([columns.repeat(h), rows.repeat_interleave(w)], 1)
    # what is made of more than a few pictures does not stay in a core's memory
    parts = [uncorrelated(x.transpose(1, 2)).transpose(1, 2) for x in pixels.flatten(2).split(8)]
    return torch.cat([torch.softmax(directions @ q, 2) @ grid for q in parts]).flatten(1)
