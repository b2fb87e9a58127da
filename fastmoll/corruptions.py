"""The corruptions of ImageNet-C, CIFAR-C and TinyImageNet-C (Hendrycks and Dietterich, ICLR 2019) on batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.checks import check_integer, check_tensor
from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS, SEVERITIES, constants
from fastmoll.kernels.draw import SEED_OFFSET, as_int64
from fastmoll.kernels.image_ops import upload
from fastmoll.pipelines.errors import did_you_mean, nearest

__all__ = ["CORRUPTIONS", "GROUPS", "SEVERITIES", "constants", "corrupt"]

_GROUP: Final = {name: group for group, names in GROUPS.items() for name in names}


def corrupt(images: Tensor, corruption: str, severity: int, *, seed: int = 0, index: Tensor | None = None) -> Tensor:
    """Corrupt each image of a batch, as the published generators of the benchmarks do.

    What is drawn for an image depends on (seed, sample id, corruption, severity) alone: the picture is the same in any
    order, batch or process, and on another device to within one grey level. The constants are those published for the
    size nearest to the images' shorter side: see :mod:`fastmoll.kernels.corruption_constants`. Code that is being
    compiled sees one operator, ``fastmoll::corrupt``, which runs the same eager code.

    Args:
        images: uint8 ``(B, 3, H, W)``, red, green, blue, on any device. For ImageNet-C's pictures they are resized to
            256 pixels and cropped to 224 before.
        corruption: one of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: int in [0, 2^64).
        index: sample ids, integer ``(B,)``, in [0, 2^48), on any device; default ``0 ... B-1``. Without them all
            batches of a loop are corrupted by the same draws.

    Returns:
        A new tensor like ``images``, contiguous.

    Raises:
        ValueError: an argument outside the ranges above; an unknown corruption.
    """
    if torch.compiler.is_compiling():
        result: Tensor = _operator(images, index, corruption=corruption, severity=severity, seed=as_int64(seed))
        return result
    return _run(images, corruption, severity, seed, index)


def _run(images: Tensor, corruption: str, severity: int, seed: int, index: Tensor | None) -> Tensor:
    check_tensor("images", images, (None, 3, None, None), (torch.uint8,), None)
    for side, size in zip(("height", "width"), images.shape[2:], strict=True):
        check_integer(f"{side} of images", size, 1)
    if corruption not in CORRUPTIONS:
        hint = did_you_mean(nearest(corruption, CORRUPTIONS))
        raise ValueError(f"corruption must be one of {', '.join(CORRUPTIONS)}, got {corruption!r}{hint}")
    check_integer("severity", severity, SEVERITIES[0], SEVERITIES[-1] + 1)
    if index is None:
        index = torch.arange(len(images), device=images.device)
    philox.check_key(seed, 0, index, len(images))
    function: Callable[..., Tensor] = getattr(
        importlib.import_module(f"fastmoll.kernels.corrupt_{_GROUP[corruption]}"), corruption
    )
    return function(images, severity, seed=seed, index=upload(index, images.device))


# CUDA graphs leave it out: some corruptions make tables on the host.
@torch.library.custom_op("fastmoll::corrupt", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _operator(images: Tensor, index: Tensor | None, *, corruption: str, severity: int, seed: int) -> Tensor:
    return _run(images, corruption, severity, seed + SEED_OFFSET, index)


@_operator.register_fake
def _(images: Tensor, index: Tensor | None, **_: Any) -> Tensor:
    return torch.empty_like(images, memory_format=torch.contiguous_format)
