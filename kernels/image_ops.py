"""The image operations of RandAugment, AutoAugment, TrivialAugment and AugMix on batches of uint8 photographs, each
image with an operation and a magnitude of its own, and the one resampling behind flip, crop and rotation.

The definitions are those of torchvision's v2 operations on tensors; a magnitude means what it means there:

============================  ====================================================================================
operation                     magnitude ``m``
============================  ====================================================================================
Identity, AutoContrast,       none, ignored
Equalize, Invert
ShearX, ShearY                slope; the upper left corner stays where it is
TranslateX, TranslateY        pixels, truncated to whole ones
Rotate                        degrees, counter-clockwise about the centre
Brightness, Color, Contrast,  ``out = d + (1 + m) (x - d)`` with ``d`` black, the image in grey, its mean grey, or the
Sharpness                     image under a 3x3 smoothing filter (the rim stays); in [-1, 1]
Posterize                     bits to keep, 0 to 8
Solarize                      values from ``255 m`` on are inverted
============================  ====================================================================================

On a CPU with Numba the operations are compiled (:mod:`fastmoll.kernels.image_ops_numba`); otherwise they are plain
torch, on any device, and give the same bits. Nothing here is drawn: see :mod:`fastmoll.augment`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastmoll.kernels.checks import INTEGER, check_integer, check_tensor, check_values, installed

OPERATIONS: Final = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Posterize", "Solarize", "AutoContrast", "Equalize", "Invert"),
    *("Color", "Contrast", "Sharpness"),
)
"""Names of the operations; ``op`` is a position here."""

SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = range(1, 6)
BRIGHTNESS, POSTERIZE, SOLARIZE, AUTO_CONTRAST, EQUALIZE, INVERT = range(6, 12)
COLOR, CONTRAST, SHARPNESS = range(12, 15)

# Pixels that are worth a second thread.
_SHARE: Final = 2**17


def warp(images: Tensor, matrix: Tensor, window: Tensor | None = None, *, bilinear: bool = False) -> Tensor:
    """Resample each image once: ``out[i, j] = image[y, x]`` with ``(x, y) = matrix (j, i, 1)``, black outside.

    Args:
        images: uint8 ``(B, H, W, 3)``.
        matrix: floating point ``(B, 2, 3)``, on images' device: from columns and rows of the result to columns and
            rows of the image; used in float32.
        window: int64 ``(B, 4)``, ``y0, y1, x0, x1``: the rows and columns that there are, the whole image by default;
            those beyond the image are black in any case.
        bilinear: interpolate between four pixels and round; by default the nearest pixel is taken.

    Returns:
        A new uint8 tensor ``(B, H, W, 3)``. As ``torchvision.transforms.v2.functional.affine`` on tensors, but for
        pixels whose place is a tie within float32.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    check_pixels("images", images)
    batch, height, width, _ = images.shape
    floating = (torch.float32, torch.float64)
    check_tensor("matrix", matrix, (batch, 2, 3), floating, images.device)
    if window is None:
        edges = upload(torch.tensor([0, height, 0, width], device="cpu"), images.device).expand(batch, 4)
    else:
        check_tensor("window", window, (batch, 4), (torch.int64,), images.device)
        # A list as an index would be a tensor of the host, for which a GPU waits.
        edges = torch.minimum(
            window, upload(torch.tensor([height, height, width, width], device="cpu"), images.device)
        ).clamp(min=0)
    if _compiled(images):
        return _run_warp(images, matrix.float(), edges, bilinear)
    return _warp(images, matrix.float(), edges, bilinear)


def apply(images: Tensor, op: Tensor, magnitude: Tensor, *, bilinear: bool = False) -> Tensor:
    """Do to each image its own operation.

    Args:
        images: uint8 ``(B, H, W, 3)``.
        op: int64 ``(B,)``, positions in `OPERATIONS`, on images' device or on the CPU. A GPU works faster if the host
            knows: then each operation sees only the images that are its own, otherwise all. Neither waits.
        magnitude: float32 ``(B,)``, as in the table above, where ``op`` is.
        bilinear: how shears and rotations interpolate; by default they take the nearest pixel.

    Returns:
        A new uint8 tensor ``(B, H, W, 3)``: what torchvision's v2 operations give for tensors, up to ties of places
        and one grey level where a sum falls within float32 of a whole number.

    Raises:
        ValueError: a wrong shape, dtype or device, an operation that does not exist, a magnitude that is not finite.
    """
    check_pixels("images", images)
    batch = images.shape[0]
    where = torch.device("cpu") if isinstance(op, Tensor) and op.device.type == "cpu" else images.device
    check_tensor("op", op, (batch,), INTEGER, where)
    check_values("op", op, (op >= 0) & (op < len(OPERATIONS)), f"lie in [0, {len(OPERATIONS)})")
    check_tensor("magnitude", magnitude, (batch,), (torch.float32,), where)
    check_values("magnitude", magnitude, magnitude.isfinite(), "be finite")
    if _compiled(images):
        return _run_apply(images, op.long(), magnitude, bilinear)
    return _apply(images, op.long(), magnitude, bilinear)


def mix(images: Tensor, chains: Tensor, weights: Tensor) -> Tensor:
    """AugMix's mixture: each image and what chains of operations made of it, summed in float32 and truncated.

    Args:
        images: uint8 ``(B, H, W, 3)``.
        chains: uint8 ``(chains, B, H, W, 3)``, on images' device.
        weights: float32 ``(1 + chains, B)``, of the images themselves first, there or on the CPU; an image's sum to 1.

    Returns:
        A new uint8 tensor ``(B, H, W, 3)``, as torchvision's ``AugMix`` sums.
    """
    if _compiled(images):
        return _run_mix(images, chains, weights)
    shares = upload(weights, images.device).view(*weights.shape, 1, 1, 1)
    total = images * shares[0]
    for share, chain in zip(shares[1:], chains, strict=True):
        total += chain * share
    return total.to(torch.uint8)


def crop_flip_rotate(
    flip: Tensor, top: Tensor, left: Tensor, angle: Tensor, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """Matrix and window for :func:`warp` of a horizontal flip, then a crop of the same size, then a rotation.

    As the three one after the other, with zeros padded for the crop and nearest pixels in the rotation: what the crop
    cut off does not come back in the corners.

    Args:
        flip: bool ``(B,)``.
        top: int64 ``(B,)``: first row of the crop in the image, negative above it.
        left: int64 ``(B,)``: likewise, first column.
        angle: float ``(B,)``, degrees, counter-clockwise about the centre of the crop.
        height: rows of image and crop.
        width: columns of image and crop.

    Returns:
        matrix: float64 ``(B, 2, 3)``.
        window: int64 ``(B, 4)``.
    """
    sine, cosine = _sine_cosine(angle)
    mirror = torch.where(flip, -1.0, 1.0).double()
    x0, y0 = (width - 1) / 2, (height - 1) / 2
    # Through the centre: the crop's own, then its place in the flipped image, then the flip, which keeps the centre.
    x = x0 + mirror * (left - cosine * x0 + sine * y0)
    y = y0 + top - sine * x0 - cosine * y0
    matrix = torch.stack([mirror * cosine, mirror * -sine, x, sine, cosine, y], 1).view(-1, 2, 3)
    first = torch.where(flip, -left, left)
    return matrix, torch.stack([top, top + height, first, first + width], 1)


def _sine_cosine(degrees: Tensor) -> tuple[Tensor, Tensor]:
    radians = degrees.double() * (math.pi / 180)
    return radians.sin(), radians.cos()


def check_pixels(name: str, images: Tensor) -> None:
    """Raise ``ValueError`` unless ``images`` is a batch of uint8 photographs ``(B, H, W, 3)``."""
    check_tensor(name, images, (None, None, None, 3), (torch.uint8,), None)
    for size in images.shape[1:3]:
        check_integer(f"size of {name}", size, 1)


def _compiled(images: Tensor) -> bool:
    return images.device.type == "cpu" and installed("numba") and not torch.compiler.is_compiling()


def _matrices(op: Tensor, magnitude: Tensor, height: int, width: int) -> Tensor:
    """The affine maps of the first six operations, ``(B, 2, 3)`` float64; the identity for all others."""
    m = magnitude.double()
    zero = torch.zeros((), dtype=torch.float64, device=op.device)
    shear_x, shear_y = torch.where(op == SHEAR_X, m, zero), torch.where(op == SHEAR_Y, m, zero)
    sine, cosine = _sine_cosine(torch.where(op == ROTATE, m, zero))
    shift_x, shift_y = (torch.where(op == number, m.trunc(), zero) for number in (TRANSLATE_X, TRANSLATE_Y))
    x0, y0 = (width - 1) / 2, (height - 1) / 2
    # A shear is measured from the upper left corner of the image, half a pixel before the first pixel's centre.
    x = x0 - cosine * x0 + sine * y0 + shear_x / 2 - shift_x
    y = y0 - sine * x0 - cosine * y0 + shear_y / 2 - shift_y
    return torch.stack([cosine, shear_x - sine, x, sine + shear_y, cosine, y], 1).view(-1, 2, 3)


# Plain torch. Float32 products and sums are rounded one by one, so that compiled code can do the same: no `addcmul`,
# and no `add` with a factor, which some devices fuse.


def _warp(images: Tensor, matrix: Tensor, window: Tensor, bilinear: bool) -> Tensor:
    batch, height, width, channels = images.shape
    row = torch.arange(height, device=images.device, dtype=torch.float32).view(1, -1, 1)
    column = torch.arange(width, device=images.device, dtype=torch.float32).view(1, 1, -1)
    ax, bx, cx, ay, by, cy = (entry.view(-1, 1, 1) for entry in matrix.reshape(-1, 6).unbind(1))
    x = ax * column + bx * row + cx
    y = ay * column + by * row + cy
    y0, y1, x0, x1 = (edge.view(-1, 1, 1) for edge in window.unbind(1))
    flat = images.reshape(batch, height * width, channels)

    def pixels(x: Tensor, y: Tensor) -> Tensor:
        inside = (x >= x0) & (x < x1) & (y >= y0) & (y < y1)
        place = torch.where(inside, y * width + x, 0.0).long().view(batch, -1, 1).expand(-1, -1, channels)
        return torch.where(inside.unsqueeze(3), flat.gather(1, place).view_as(images), 0)

    if not bilinear:
        return pixels(x.round(), y.round())
    left, top = x.floor(), y.floor()
    right, below = (x - left).unsqueeze(3), (y - top).unsqueeze(3)
    total = pixels(left, top) * ((1.0 - right) * (1.0 - below))
    total = total + pixels(left + 1.0, top) * (right * (1.0 - below))
    total = total + pixels(left, top + 1.0) * ((1.0 - right) * below)
    total = total + pixels(left + 1.0, top + 1.0) * (right * below)
    return total.round_().to(torch.uint8)


def _apply(images: Tensor, op: Tensor, magnitude: Tensor, bilinear: bool) -> Tensor:
    device, known = images.device, op.device.type == "cpu"

    def warped(images: Tensor, op: Tensor, magnitude: Tensor) -> Tensor:
        height, width = images.shape[1:3]
        edges = upload(torch.tensor([0, height, 0, width], device="cpu"), device).expand(len(images), 4)
        return _warp(images, _matrices(op, magnitude, height, width).float(), edges, bilinear)

    # Operations that share most of their work are one group where the host does not know which are wanted.
    groups: list[tuple[range, Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
        (range(SHEAR_X, ROTATE + 1), warped),
        (range(BRIGHTNESS, INVERT + 1), _mapped),
        (range(COLOR, SHARPNESS + 1), _blended),
    ]
    out = images.clone()
    for numbers, function in groups:
        chosen = (op >= numbers[0]) & (op <= numbers[-1])
        if known:
            rows = chosen.nonzero().squeeze(1)
            if len(rows):
                on_device = [upload(part, device) for part in (rows, op[rows], magnitude[rows])]
                out[on_device[0]] = function(images[on_device[0]], *on_device[1:])
        else:
            out = torch.where(chosen.view(-1, 1, 1, 1), function(images, op, magnitude), out)
    return out


def upload(values: Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``, without the host waiting."""
    if values.device == device or device.type != "cuda":
        return values.to(device)
    # From pinned memory a copy waits neither for the stream nor for the host.
    return values.pin_memory().to(device, non_blocking=True)


def _mapped(images: Tensor, op: Tensor, magnitude: Tensor) -> Tensor:
    """The operations on single values: a table of 256 entries for each image and channel."""
    batch, height, width, channels = images.shape
    values = images.reshape(batch, -1, channels).transpose(1, 2).long()
    level = torch.arange(256, device=images.device)
    m, op = magnitude.double().view(-1, 1, 1), op.view(-1, 1, 1)
    table = torch.where(op == INVERT, 255 - level, level)
    brighter = (level.float() * (1.0 + m).float()).clamp_(0.0, 255.0).long()
    table = torch.where(op == BRIGHTNESS, brighter, table)
    kept = torch.bitwise_left_shift(255, 8 - m.long().clamp(0, 8)) & level
    table = torch.where(op == POSTERIZE, kept, table)
    table = torch.where(op == SOLARIZE, torch.where(level.float() >= (255.0 * m).float(), 255 - level, level), table)

    low, high = (edge.unsqueeze(2).float() for edge in values.aminmax(dim=2))
    scale = (high - low) * (1.0 / 255.0)
    flat = high == low
    stretched = (level.float() - torch.where(flat, 0.0, low)) / torch.where(flat, 1.0, scale)
    table = torch.where(op == AUTO_CONTRAST, stretched.clamp_(0.0, 255.0).long(), table)

    counts = torch.zeros(batch, channels, 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    # All pixels but those of the largest value there is.
    step = (height * width - counts.gather(2, high.long())) // 255
    before = counts.cumsum(2) - counts
    equal = ((before + step // 2) // step.clamp(min=1)).clamp_(0, 255)
    table = torch.where((op == EQUALIZE) & (step > 0), equal, table)
    return table.expand(-1, channels, -1).gather(2, values).transpose(1, 2).reshape(images.shape).to(torch.uint8)


def _blended(images: Tensor, op: Tensor, magnitude: Tensor) -> Tensor:
    """The operations between the image and a duller one."""
    x = images.float()
    factor, op = 1.0 + magnitude.double().view(-1, 1, 1, 1), op.view(-1, 1, 1, 1)
    near, far = factor.float(), (1.0 - factor).float()
    red, green, blue = x[..., :1], x[..., 1:2], x[..., 2:]
    grey = (red * 0.2989 + green * 0.587 + blue * 0.114).floor_()
    mean = grey.sum((1, 2, 3), keepdim=True, dtype=torch.float64).float() / (images.shape[1] * images.shape[2])
    out = x * near + torch.where(op == COLOR, grey, mean) * far
    if min(images.shape[1:3]) > 2:
        whole = images.int()
        rows = whole[:, :-2] + whole[:, 1:-1] + whole[:, 2:]
        inner = whole[:, 1:-1, 1:-1]
        smooth = (rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * inner + 6) // 13
        sharp = x.clone()
        sharp[:, 1:-1, 1:-1] += (smooth - inner).float() * far
    else:
        sharp = x
    return torch.where(op == SHARPNESS, sharp, out).clamp_(0.0, 255.0).to(torch.uint8)


# The compiled functions.


def _run_warp(images: Tensor, matrix: Tensor, window: Tensor, bilinear: bool) -> Tensor:
    from fastmoll.kernels import image_ops_numba as compiled

    source, out = images.contiguous(), torch.empty(images.shape, dtype=torch.uint8, device="cpu")
    arrays = (source.numpy(), out.numpy(), matrix.contiguous().numpy(), window.contiguous().numpy())
    _in_threads(lambda first, last: compiled.warp(*arrays, bilinear, first, last), images)
    return out


def _run_apply(images: Tensor, op: Tensor, magnitude: Tensor, bilinear: bool) -> Tensor:
    from fastmoll.kernels import image_ops_numba as compiled

    source, out = images.contiguous(), torch.empty(images.shape, dtype=torch.uint8, device="cpu")
    matrix = _matrices(op, magnitude, images.shape[1], images.shape[2]).float()
    arrays = (source.numpy(), out.numpy(), op.contiguous().numpy(), magnitude.contiguous().numpy(), matrix.numpy())
    _in_threads(lambda first, last: compiled.apply(*arrays, bilinear, first, last), images)
    return out


def _run_mix(images: Tensor, chains: Tensor, weights: Tensor) -> Tensor:
    from fastmoll.kernels import image_ops_numba as compiled

    source, out = images.contiguous(), torch.empty(images.shape, dtype=torch.uint8, device="cpu")
    arrays = (source.flatten(1).numpy(), out.flatten(1).numpy(), chains.contiguous().flatten(2).numpy())
    shares = weights.contiguous().numpy()
    _in_threads(lambda first, last: compiled.mix(*arrays, shares, first, last), images)
    return out


def _in_threads(work: Callable[[int, int], Any], images: Tensor) -> None:
    batch = images.shape[0]
    threads = min(torch.get_num_threads(), batch, images.numel() // 3 // _SHARE)
    if threads <= 1:
        work(0, batch)
        return
    # Several shares a thread: the operations differ in cost, and the system may hold a thread up.
    ends = np.linspace(0, batch, min(batch, 4 * threads) + 1).astype(int).tolist()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, ends[:-1], ends[1:]))
