"""The definition of :mod:`fastmoll.kernels.batch_tail` in plain torch, and its faster way on a CPU by Numba."""

from __future__ import annotations

import torch
from torch import Tensor

from fastmoll.kernels.batch_tail import Tail
from fastmoll.kernels.checks import installed
from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, NOISE, PURE_NOISE
from fastmoll.kernels.heat_blur import heat_blur
from fastmoll.kernels.mix import mix_images


def batch_tail_torch(tail: Tail, *, compiled: bool = False) -> Tensor:
    """Compute :func:`fastmoll.kernels.batch_tail.batch_tail` in float32, rounded once at the end.

    Waits for the device if that is a GPU.

    Args:
        tail: the checked arguments.
        compiled: use :mod:`fastmoll.kernels.mollify_cpu` if the images are on the CPU and Numba is installed: the same
            to 1e-5 for standardised images, and several times faster.
    """
    if compiled and tail.images.device.type == "cpu" and installed("numba"):
        return _batch_tail_numba(tail)
    x = _standardised(tail)
    if tail.role is not None and tail.t is not None and tail.index is not None:
        t = torch.where(tail.role == PURE_NOISE, 1.0, tail.t)
        noised = torch.isin(tail.role, torch.tensor((NOISE, PURE_NOISE), device=x.device)).nonzero().squeeze(1)
        blurred = (tail.role == BLUR).nonzero().squeeze(1)
        x[noised] = cosine_noise(x[noised], t[noised], seed=tail.seed, epoch=tail.epoch, index=tail.index[noised])
        x[blurred] = heat_blur(x[blurred], t[blurred], sigma_min=tail.sigma_min, sigma_max=tail.sigma_max)
    return _finish(x, tail)


def _standardised(tail: Tail) -> Tensor:
    """Flipped, standardised and mixed images, float32, in memory of their own."""
    images = tail.images
    x = images.permute(0, 3, 1, 2).float() / 255.0 if images.dtype == torch.uint8 else images.float()
    mean, std = (
        torch.tensor(value, dtype=torch.float32, device=x.device).view(-1, 1, 1) for value in (tail.mean, tail.std)
    )
    x = (x - mean) / std
    if tail.flip is not None:
        x = torch.where(tail.flip.view(-1, 1, 1, 1), x.flip(3), x)
    if tail.partner is not None:
        x = mix_images(x, tail.partner, lam=tail.lam, box=tail.box)
    return x


def _batch_tail_numba(tail: Tail) -> Tensor:
    from fastmoll.kernels.mollify_cpu import mollify_cpu, standardise_cpu

    if tail.images.dtype == torch.uint8:
        x = standardise_cpu(
            tail.images, tail.mean, tail.std, tail.flip, tail.partner, tail.lam, tail.box, tail.memory_format
        )
    else:
        x = _standardised(tail)
    if tail.role is not None and tail.t is not None and tail.index is not None:
        # In place: standardisation has made x, whatever the images were.
        mollify_cpu(
            x,
            tail.role,
            tail.t,
            seed=tail.seed,
            epoch=tail.epoch,
            index=tail.index,
            sigma_min=tail.sigma_min,
            sigma_max=tail.sigma_max,
            out=x,
        )
    if x.dtype == tail.dtype and x.is_contiguous(memory_format=tail.memory_format):
        return x
    return _finish(x, tail)


def _finish(x: Tensor, tail: Tail) -> Tensor:
    return torch.empty(x.shape, dtype=tail.dtype, device=x.device, memory_format=tail.memory_format).copy_(x)
