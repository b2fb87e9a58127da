"""The textures of frost: the published pictures where they are installed, others made here where they are not.

The published ones are photographs that are not ours to pass on. Those made here are fields of feathered crystals with
the same sizes, and for each the same mean and contrast of the channels and the same slope of the spectrum:

=======  ==============  =============  ===============================  ===================
picture  rows, columns   grey mean, sd  red, green, blue: mean (sd)      slope, log-log power
=======  ==============  =============  ===============================  ===================
1        600, 900        130, 18        78 (27), 149 (16), 166 (15)      -1.75
2 and 3  315, 560        205, 22        201 (21), 205 (22), 214 (23)     -1.62
4        350, 527        150, 29        138 (28), 153 (28), 165 (30)     -1.15
5        495, 660        121, 43        112 (44), 123 (43), 135 (42)     -1.76
=======  ==============  =============  ===============================  ===================

Pictures 2 and 3 are one and the same, and the published generators never draw their sixth.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.draw import uniform_double

VARIABLE: Final = "FASTMOLL_FROST"
"""Name of the environment variable with the folder of the published pictures."""

FILES: Final = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
_PACKAGES: Final = ("imagecorruptions", "imagecorruptions_imaug", "imagenet_c")

Floats = np.ndarray[Any, np.dtype[np.float64]]


class _Look(NamedTuple):
    size: tuple[int, int]
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    slope: float
    length: int
    crystals: float
    """Crystals a pixel."""


_WHITE = _Look((315, 560), (201, 205, 214), (21, 22, 23), -1.62, 36, 0.02)
_LOOKS: Final = (
    _Look((600, 900), (78, 149, 166), (27, 16, 15), -1.75, 40, 0.006),
    _WHITE,
    _WHITE,
    _Look((350, 527), (138, 153, 165), (28, 28, 30), -1.15, 16, 0.02),
    _Look((495, 660), (112, 123, 135), (44, 43, 42), -1.76, 28, 0.006),
)
_DIRECTIONS: Final = 12


def frost_textures() -> tuple[Tensor, ...]:
    """The five textures that frost draws from, uint8 ``(3, rows, columns)`` on the CPU; not to be written to.

    They are read from the folder that the environment variable ``FASTMOLL_FROST`` names; else from an installed package
    `imagecorruptions` or `imagecorruptions_imaug` (which is not imported); else they are made: see the module.

    Raises:
        ValueError: the folder lacks a picture, or has one of another size than the published one.
    """
    folder = _folder(os.environ.get(VARIABLE, ""))
    return _made() if folder is None else _read(folder)


def frost_source(*, used: bool = True) -> str:
    """``"published"`` if :func:`frost_textures` has the published pictures, otherwise ``"made"``.

    Args:
        used: whether any frost will be made; if not, a folder that lacks the pictures is passed over, as none.

    Raises:
        ValueError: as there.
    """
    named = os.environ.get(VARIABLE, "")
    if named and not used and _wrong(Path(named)):
        named = ""
    return "made" if _folder(named) is None else "published"


@functools.cache
def _folder(named: str) -> Path | None:
    if named:
        wrong = _wrong(Path(named))
        if wrong:
            raise ValueError(f"{VARIABLE} must be a folder with the published frost pictures, got {named!r}: {wrong}")
        return Path(named)
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            if not _wrong(Path(place) / "frost"):
                return Path(place) / "frost"
    return None


def _wrong(folder: Path) -> str:
    """What keeps the pictures in a folder from being the published ones, empty if nothing does."""
    from PIL import Image, UnidentifiedImageError

    for name, look in zip(FILES, _LOOKS, strict=True):
        rows, columns = look.size
        try:
            with Image.open(folder / name) as picture:
                if picture.size != (columns, rows):
                    return f"{name} has {picture.size[1]} rows and {picture.size[0]} columns, not {rows} and {columns}"
        except UnidentifiedImageError:
            return f"{name} is not a picture"
        except OSError as error:
            return f"{name}: {error.strerror or error}"
    return ""


@functools.cache
def _read(folder: Path) -> tuple[Tensor, ...]:
    from PIL import Image

    textures = []
    for name in FILES:
        with Image.open(folder / name) as picture:
            # An alpha channel is dropped, not applied, as published.
            textures.append(torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).contiguous())
    return tuple(textures)


@functools.cache
def _made() -> tuple[Tensor, ...]:
    textures = [_crystals(look, number) for number, look in enumerate(_LOOKS) if number != 2]
    return (*textures[:2], textures[1], *textures[2:])


def _crystals(look: _Look, number: int) -> Tensor:
    """Crystals of all directions at drawn places, their sum's spectrum bent to the power law, in the colours wanted."""
    rows, columns = look.size
    blocks = -(-rows * columns // 2)
    words = philox.sample_words(torch.tensor([number], device="cpu"), 0, seed=0, purpose=philox.CORRUPT, blocks=blocks)
    uniform = uniform_double(torch.stack(words)).view(2, -1)[:, : rows * columns]
    where, what = uniform.view(2, rows, columns).numpy()
    direction = (what * _DIRECTIONS).astype(int)
    height = np.where(where < look.crystals, (what * _DIRECTIONS) % 1.0 - 0.3, 0.0)
    spectrum = np.zeros((rows, columns // 2 + 1), complex)
    for k in range(_DIRECTIONS):
        seeds = np.where(direction == k, height, 0.0)
        spectrum += np.fft.rfft2(seeds) * np.fft.rfft2(_feather(look, 2 * math.pi * (k + 0.5) / _DIRECTIONS))
    frequency = np.hypot(np.fft.fftfreq(rows)[:, None], np.fft.rfftfreq(columns))
    frequency[0, 0] = 1.0
    ring = np.round(12 * np.log2(frequency * max(rows, columns))).astype(int)
    ring -= ring.min()
    power = np.bincount(ring.ravel(), (abs(spectrum) ** 2).ravel()) / np.maximum(np.bincount(ring.ravel()), 1)
    spectrum *= frequency ** (look.slope / 2) / np.sqrt(power[ring])
    spectrum[0, 0] = 0.0
    field: Floats = np.fft.irfft2(spectrum, s=(rows, columns))
    field = np.clip(field / field.std(), -3.0, 3.0)
    field = (field - field.mean()) / field.std()
    mean, deviation = (np.array(values, float)[:, None, None] for values in (look.mean, look.deviation))
    return torch.from_numpy(np.rint(np.clip(mean + deviation * field, 0.0, 255.0)).astype(np.uint8))


def _feather(look: _Look, angle: float) -> Floats:
    """A crystal: a spine from the picture's corner along ``angle``, with branches at 60 degrees on either side."""
    (rows, columns), length = look.size, look.length
    y, x = np.meshgrid(np.fft.fftfreq(rows, 1 / rows), np.fft.fftfreq(columns, 1 / columns), indexing="ij")
    near = np.hypot(x, y) < length + 3
    y, x = y[near], x[near]

    def line(x0: float, y0: float, turn: float, size: float) -> Floats:
        along = (x - x0) * math.cos(turn) + (y - y0) * math.sin(turn)
        across = (y - y0) * math.cos(turn) - (x - x0) * math.sin(turn)
        beyond = np.maximum(np.maximum(-along, along - size), 0.0)
        height: Floats = np.exp(-(across**2 + beyond**2) / 1.0) * np.clip(1.2 - along / size, 0.0, 1.0)
        return height

    total = line(0.0, 0.0, angle, length)
    for step in range(3, length - 2, 4):
        for side in (-1, 1):
            turn = angle + side * math.pi / 3
            total = np.maximum(
                total, 0.7 * line(step * math.cos(angle), step * math.sin(angle), turn, 0.45 * (length - step))
            )
    kernel = np.zeros((rows, columns))
    kernel[near] = total
    return kernel
