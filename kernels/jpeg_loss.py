"""What JPEG at a given quality does to a picture: the loss of the baseline codec without its bits.

Transform, quantisation and colours are in whole numbers, as libjpeg defines them (its slow, default transform; 4:2:0;
chroma smoothed when it is enlarged), so the result is that of libjpeg and of Pillow, bit for bit, on any device. Code
lengths never matter to a picture: they are left out, and with them the codec.

Steps: RGB to YCbCr; chroma averaged over 2x2 pixels; each 8x8 block through the transform, rounded to multiples of its
table's entries, and back; chroma enlarged with weights 3/4 and 1/4; YCbCr to RGB. A transform is two products with one
8x8 matrix of whole numbers, a cosine transform times 2^13, each rounded after a shift to the right.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fastmoll.kernels.checks import check_integer
from fastmoll.kernels.image_ops import upload

MATRIX: Final = np.array(
    [
        [8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192],
        [11363, 9633, 6437, 2260, -2260, -6437, -9633, -11363],
        [10703, 4433, -4433, -10703, -10703, -4433, 4433, 10703],
        [9633, -2259, -11362, -6436, 6436, 11362, 2259, -9633],
        [8192, -8192, -8192, 8192, 8192, -8192, -8192, 8192],
        [6437, -11362, 2261, 9633, -9633, -2261, 11362, -6437],
        [4433, -10704, 10704, -4433, -4433, 10704, -10704, 4433],
        [2260, -6436, 9633, -11363, 11363, -9633, 6436, -2260],
    ],
    np.int32,
)
"""Rows are frequencies. ``2^13 sqrt(2) cos((2j + 1) k π / 16)``, with the roundings of libjpeg's sums of constants."""

# Annex K of the standard: for brightness and for colour, at quality 50.
_BRIGHTNESS: Final = (
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)
_COLOUR: Final = (
    *(17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99),
    *(47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 32),
)


@functools.lru_cache(128)
def quantisation(quality: int) -> np.ndarray:
    """The tables of a quality from 1 to 100: int32 ``(2, 8, 8)``, for brightness and for colour."""
    check_integer("quality", quality, 1, 101)
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    base = np.array([_BRIGHTNESS, _COLOUR], np.int32).reshape(2, 8, 8)
    return np.clip((base * scale + 50) // 100, 1, 255).astype(np.int32)


def jpeg_loss(images: Tensor, quality: int) -> Tensor:
    """Compress and decompress, in plain torch.

    Args:
        images: uint8 ``(B, 3, H, W)``, on any device; scratch memory is about 70 times theirs.
        quality: 1 to 100, libjpeg's.

    Returns:
        A new tensor like ``images``.

    Raises:
        ValueError: a quality outside 1 to 100.
    """
    tables = upload(torch.from_numpy(quantisation(quality)), images.device).double()
    height, width = images.shape[2:]
    red, green, blue = images.int().unbind(1)
    y = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
    # One less than half: so that 255 stays below 256.
    middle = (128 << 16) + 32767
    cb = (-11058 * red - 21710 * green + 32768 * blue + middle) >> 16
    cr = (32768 * red - 27439 * green - 5329 * blue + middle) >> 16
    y = _through(_fill(y.unsqueeze(1), 8, 8), tables[0])[:, 0, :height, :width]
    chroma = _through(_fill(_halved(torch.stack([cb, cr], 1)), 8, 8), tables[1])
    chroma = chroma[:, :, : (height + 1) // 2, : (width + 1) // 2]
    cb, cr = (_doubled(chroma)[:, :, :height, :width] - 128).unbind(1)
    red = y + (91881 * cr + 32768 >> 16)
    green = y + (-22554 * cb - 46802 * cr + 32768 >> 16)
    blue = y + (116130 * cb + 32768 >> 16)
    return torch.stack([red, green, blue], 1).clamp_(0, 255).to(torch.uint8)


def _fill(x: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last row and column up to multiples of these numbers."""
    down, right = -x.shape[2] % rows, -x.shape[3] % columns
    # In floating point, for which padding by repetition is there on every device; these numbers are exact in it.
    return pad(x.float(), (0, right, 0, down), mode="replicate").int() if down or right else x


def _halved(x: Tensor) -> Tensor:
    """Means over 2x2 pixels, ties down in the even columns of the result and up in the odd."""
    # Columns are filled up before they are averaged, rows only to a pair, and the rest after: as libjpeg does it.
    x = _fill(x, 2, 16)
    total = x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]
    odd = torch.arange(total.shape[3], device=x.device, dtype=torch.int32) & 1
    return (total + 1 + odd) >> 2


def _doubled(x: Tensor) -> Tensor:
    """Twice the rows and columns: three parts of the nearest, one of the next nearest, in both directions."""
    if x.shape[3] <= 2:  # libjpeg repeats the pixels of pictures this narrow
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    above, below = torch.cat([x[:, :, :1], x[:, :, :-1]], 2), torch.cat([x[:, :, 1:], x[:, :, -1:]], 2)
    x = torch.stack([3 * x + above, 3 * x + below], 3).flatten(2, 3)
    left, right = torch.cat([x[..., :1], x[..., :-1]], 3), torch.cat([x[..., 1:], x[..., -1:]], 3)
    return torch.stack([(3 * x + left + 8) >> 4, (3 * x + right + 7) >> 4], 4).flatten(3, 4)


def _through(x: Tensor, table: Tensor) -> Tensor:
    """Levels ``(B, N, 8 h, 8 w)`` through the transform, the table's multiples and back.

    In float64, where these whole numbers and all sums of them are exact in any order.
    """
    batch, planes, height, width = x.shape
    matrix = upload(torch.from_numpy(MATRIX), x.device).double()

    def rows(x: Tensor, matrix: Tensor, shift: int) -> Tensor:
        return _descale(x.view(-1, 8) @ matrix, shift)

    def columns(matrix: Tensor, x: Tensor, shift: int) -> Tensor:
        return _descale(matrix @ x.view(-1, 8, width), shift)

    x = columns(matrix, rows(x.double() - 128.0, matrix.T, 11), 15).view(-1, 8, width // 8, 8)
    table = table.unsqueeze(1)
    # Three bits of scale are left in. Halves go away from zero.
    steps = ((x.abs() + 4.0 * table) / (8.0 * table)).floor_().copysign_(x)
    x = rows(columns(matrix.T, steps * table, 11), matrix, 18)
    return x.add_(128.0).clamp_(0.0, 255.0).int().view(batch, planes, height, width)


def _descale(x: Tensor, shift: int) -> Tensor:
    return x.mul_(2.0**-shift).add_(0.5).floor_()
