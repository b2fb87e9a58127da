"""What a compiler sees of :class:`fastmoll.Mollify`: one operator, which finds the module by a number."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastmoll.mollify_batch import Settings, mollify_batch

_modules: MutableMapping[int, Settings] = weakref.WeakValueDictionary()
_handles: Iterator[int] = itertools.count()


def register(module: Settings) -> int:
    """A number by which the operator finds the module, as long as that lives. A copy of it needs another one."""
    handle = next(_handles)
    _modules[handle] = module
    return handle


# CUDA graphs leave it out: it looks at the host's numbers, and the torch backend at the device's.
@torch.library.custom_op("fastmoll::mollify", mutates_args=("seen",), tags=(torch.Tag.cudagraph_unsafe,))
def mollify_operator(
    images: Tensor,
    labels: Tensor,
    index: Tensor | None,
    seen: Tensor | None,
    flip: Tensor | None,
    epoch_tensor: Tensor | None,
    *,
    module: int,
    epoch: int,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    dtype: torch.dtype,
    channels_last: bool,
    classes: int,
    mixed: bool,
    draws: int,
) -> tuple[Tensor, Tensor, Tensor]:
    pixels = {"mean": mean, "std": std, "flip": flip, "dtype": dtype} if images.dtype == torch.uint8 else None
    which = epoch if epoch_tensor is None else epoch_tensor
    out, made, lam = mollify_batch(_modules[module], images, labels, index, which, seen, pixels=pixels)
    # As the compiler was told, also where a size of 1 lets several orders of memory pass for the same.
    layout = torch.channels_last if channels_last else torch.contiguous_format
    strides = torch.empty(out.shape, memory_format=layout, device="meta").stride()
    if out.stride() != strides:
        out = torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)
    return out, made, lam


@mollify_operator.register_fake
def _(
    images: Tensor,
    *_: Tensor | None,
    dtype: torch.dtype,
    channels_last: bool,
    classes: int,
    mixed: bool,
    draws: int,
    **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    if torch.compiler.is_exporting():  # asked in code that Dynamo traces, older versions of torch always say yes
        # The program would know the module by a number that is another's elsewhere.
        raise ValueError("Mollify can't be exported: export the network, which needs none outside of training")
    batch, *size = images.shape
    batch *= draws
    shape = (batch, size[2], size[0], size[1]) if images.dtype == torch.uint8 else (batch, *size)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(shape, dtype=dtype, device=images.device, memory_format=layout)
    made = images.new_empty((batch, classes) if classes else batch, dtype=torch.float32)
    return out, made, images.new_empty(batch if mixed else 0, dtype=torch.float32)
