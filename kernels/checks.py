"""Checks shared by the operations: bad input raises ``ValueError`` with the argument's name and the offending value.

Shapes, dtypes, devices and plain numbers are known to the host and raise at once. The *values* of a tensor raise at
once on the CPU; on a GPU, looking at them would stall the host in every training step, so there they become a
device-side assertion, which surfaces as a CUDA error at the next synchronisation.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import numbers
import operator
from collections.abc import Sequence, Sized
from typing import Any, SupportsIndex

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGER = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@functools.cache
def installed(package: str) -> bool:
    """Whether a package can be imported, looked up once and without importing it."""
    return importlib.util.find_spec(package) is not None


def check_values(name: str, values: Tensor, ok: Tensor, wanted: str) -> None:
    """Demand that ``ok`` (bool, the shape of ``values``) holds everywhere.

    Args:
        name: the argument to name in the error.
        values: the tensor whose first offending value is shown.
        ok: which values are good; a comparison with NaN is false, so NaN is bad wherever a range is asked for.
        wanted: ends the sentence "<name> must ...".

    Raises:
        ValueError: on the CPU, with the first bad value and its position. On other devices (and inside code that is
            being compiled, where a branch on data would break the graph) an assertion on the device is queued instead.
    """
    if values.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(ok.all(), f"{name} must {wanted}")
    elif not ok.all():
        position = tuple(int(i) for i in (~ok).nonzero()[0])
        where = position[0] if len(position) == 1 else position
        raise ValueError(f"{name} must {wanted}, got {values[position].item()} at position {where}")


def check_number(name: str, value: Any, *, above: float | None = None, at_least: float | None = None) -> float:
    """Return ``value`` as a float, or raise ``ValueError`` unless it is finite and in the range asked for."""
    wanted = "a finite number"
    wanted += f" above {above}" if above is not None else ""
    wanted += f" of at least {at_least}" if at_least is not None else ""
    number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    low = (above is None or number > above) and (at_least is None or number >= at_least)
    # Not `math.isfinite`: a compiler cannot trace it where the number is a symbol, as sizes are once they changed.
    if not (-math.inf < number < math.inf and low):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return number


def has_length(values: Any, length: int) -> bool:
    """Whether ``values`` are a sequence or a one-dimensional array of that many."""
    return isinstance(values, Sized) and getattr(values, "ndim", 1) == 1 and len(values) == length


def check_triple(name: str, values: Sequence[float], *, above: float | None = None) -> tuple[float, float, float]:
    """Return a number per colour channel as floats, or raise ``ValueError``; ``above`` as in :func:`check_number`."""
    if not has_length(values, 3):
        raise ValueError(f"{name} must be three numbers, got {values!r}")
    red, green, blue = (check_number(f"{name}[{i}]", value, above=above) for i, value in enumerate(values))
    return red, green, blue


def check_integer(name: str, value: SupportsIndex, low: int, high: int | None = None) -> int:
    """Return ``value`` as an int, or raise ``ValueError`` unless it is a whole number with ``low <= value < high``."""
    wanted = f"at least {low}" if high is None else f"in [{low}, {high})"
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer {wanted}, got {value!r}") from None
    if isinstance(value, bool) or number < low or (high is not None and number >= high):
        raise ValueError(f"{name} must be an integer {wanted}, got {value!r}")
    return number


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


Shape = tuple[int | None, ...]


def check_tensor(
    name: str, value: Tensor, shape: Shape | None, dtypes: Sequence[torch.dtype], device: torch.device | None
) -> None:
    """Raise ``ValueError`` unless ``value`` is a tensor of this shape, one of ``dtypes``, on this device.

    A size, a whole shape or a device of None may be anything.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.is_nested or value.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got {'a nested one' if value.is_nested else value.layout}")
    if shape is not None and not (
        value.dim() == len(shape) and all(want in (None, size) for size, want in zip(value.shape, shape, strict=True))
    ):
        letters = "BK" if len(shape) < 4 else "BHWC" if shape[3] is not None else "BCHW"
        wanted = ", ".join(letter if size is None else str(size) for size, letter in zip(shape, letters, strict=False))
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(value.shape)}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} like the other arguments, got {value.device}")


def check_images(name: str, images: Tensor) -> None:
    """Raise ``ValueError`` unless ``images`` is a floating-point batch ``(B, C, H, W)`` without gradient.

    Three columns of eight or more rows and channels are taken for channels that come last.
    """
    if isinstance(images, Tensor) and not images.is_floating_point():
        raise ValueError(
            f"{name} must be floating point, got {images.dtype}: standardise the images first "
            "(zero mean, unit variance per channel); noise and labels are scaled for that"
        )
    check_tensor(name, images, (None, None, None, None), FLOATING, None)
    if min(images.shape[1:]) < 1:
        raise ValueError(f"{name} must have at least one channel, row and column, got shape {tuple(images.shape)}")
    if images.shape[3] == 3 and min(images.shape[1:3]) >= 8:
        raise ValueError(
            f"{name} must have shape (B, C, H, W), got {tuple(images.shape)}, which looks like (B, H, W, C): pass "
            f"{name}.permute(0, 3, 1, 2)"
        )
    check_no_grad(name, images)


def check_no_grad(name: str, value: Tensor) -> None:
    """Raise ``ValueError`` if a tensor on the way of the images asks for a gradient: nothing would give it one."""
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require grad, got requires_grad=True: mollification is a data augmentation and "
            f"has no backward; pass {name}.detach()"
        )


def overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory, as those of expanded tensors and of sliding windows do, by the strides."""
    reach = 0  # the last place of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def check_temperature(name: str, t: Tensor, shape: Shape | None, device: torch.device | None) -> None:
    """Raise ``ValueError`` unless ``t`` is a floating-point tensor of this shape with values in [0, 1]."""
    check_tensor(name, t, shape, FLOATING, device)
    check_values(name, t, (t >= 0) & (t <= 1), "lie in [0, 1]")


def check_labels(labels: Tensor, num_classes: int, batch: int | None, device: torch.device | None) -> None:
    """Raise ``ValueError`` unless ``labels`` are classes ``(B,)`` int64 in [0, K) or non-negative soft ``(B, K)``."""
    if isinstance(labels, Tensor) and labels.dim() == 2:
        check_tensor("labels", labels, (batch, num_classes), FLOATING, device)
        check_values("labels", labels, (labels >= 0) & labels.isfinite(), "be finite and not negative")
    else:
        check_tensor("labels", labels, (batch,), (torch.int64,), device)
        check_values("labels", labels, (labels >= 0) & (labels < num_classes), f"lie in [0, {num_classes})")
