"""``fastmoll preview``: a picture of what mollification does to an image, with the numbers beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError
from torch import Tensor

from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, NOISE
from fastmoll.kernels.heat_blur import blur_scale, heat_blur
from fastmoll.kernels.soft_labels import label_decay
from fastmoll.pipelines import MEAN, STD

TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0)
SUFFIXES = (".png", ".jpg", ".jpeg")

_QUALITY = 85
_INK, _PAPER = "#1f2328", "#ffffff"

# Pieces of text, each normal or a subscript.
_Text = Sequence[tuple[str, bool]]


def write_preview(
    image: Path,
    output: Path,
    *,
    size: int = 224,
    temperatures: Sequence[float] = TEMPERATURES,
    sigma_min: float = 0.3,
    sigma_max: float | None = None,
    k_noise: float = 1.0,
    k_blur: float = 1.0,
    seed: int = 0,
) -> None:
    """Draw an image clean, noised and blurred at several temperatures, and write the picture.

    Each tile is what a network would see, with the standardisation undone and clipped to what a screen shows. Below it
    stand the scale, ``σ_t`` of the noise (in units of the standardised image) or ``σ_B`` of the blur (in pixels), and
    the label decay ``γ`` (paper, equations 4 to 6, 12 and 13).

    Args:
        image: File of any format Pillow reads; its largest centred square is used, scaled to ``size``. 16-bit integers
            and floating point in [0, 1] are scaled to 8 bits, as DALI's decoder does.
        output: Picture to write, ``.png``, ``.jpg`` or ``.jpeg``.
        size: Side of a tile, in pixels.
        temperatures: One column each, in [0, 1].
        sigma_min: Blur scale at ``t = 0``, in pixels.
        sigma_max: Blur scale at ``t = 1``, in pixels; by default ``size``.
        k_noise: Exponent of the noise's label decay.
        k_blur: Exponent of the blur's label decay.
        seed: Seed of the noise.

    Raises:
        ValueError: An argument out of range, an image that is missing, none, or too large for Pillow's guard against
            decompression bombs, pixels out of range, or an output that can't be written or is the image itself.
    """
    if output.suffix.lower() not in SUFFIXES:
        raise ValueError(f"output must end in one of {', '.join(SUFFIXES)}, got {output}")
    if not output.parent.is_dir():
        raise ValueError(f"output: folder {output.parent} does not exist")
    if output.is_dir():
        raise ValueError(f"output: {output} is a folder")
    if output.exists() and image.exists() and output.samefile(image):
        raise ValueError(f"output: {output} is the image itself, which would be lost")
    picture = _load(image, size)
    if not temperatures:
        raise ValueError("temperatures must not be empty")
    for value in temperatures:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"temperatures must be in [0, 1], got {value}")
    t = torch.tensor(list(temperatures), dtype=torch.float32, device="cpu")
    x = _standardise(picture).expand(len(t), -1, -1, -1).contiguous()
    scale_max = float(size) if sigma_max is None else sigma_max
    sigma_noise = torch.sin(t * (math.pi / 2))
    sigma_blur = blur_scale(t, sigma_min, scale_max)
    gamma_noise, gamma_blur = (
        label_decay(torch.full(t.shape, role, dtype=torch.int8, device="cpu"), t, k_noise=k_noise, k_blur=k_blur)
        for role in (NOISE, BLUR)
    )
    # One sample id for all: the same noise grows from left to right.
    noised = cosine_noise(x, t, seed=seed, index=torch.zeros(len(t), dtype=torch.int64, device="cpu"))
    blurred = heat_blur(x, t, sigma_min=sigma_min, sigma_max=scale_max)
    rows = [
        ("noise", [_show(tile) for tile in noised], _captions("t", sigma_noise, gamma_noise)),
        ("blur", [_show(tile) for tile in blurred], _captions("B", sigma_blur, gamma_blur)),
    ]
    drawn = _compose(_show(x[0]), [_number(value) for value in t.tolist()], rows)
    drawn.save(output, quality=_QUALITY, optimize=True)  # PNG has no quality and ignores it


def _load(path: Path, size: int) -> Image.Image:
    if not 16 <= size <= 2048:
        raise ValueError(f"size must be between 16 and 2048 pixels, got {size}")
    try:
        with Image.open(path) as file:
            return ImageOps.fit(eight_bits(file).convert("RGB"), (size, size), Image.Resampling.BICUBIC)
    except FileNotFoundError:
        raise ValueError(f"image {path} does not exist") from None
    except UnidentifiedImageError:
        raise ValueError(f"image {path} is not an image") from None
    except Exception as error:  # Pillow raises whatever its plugins do, and DecompressionBombError, which is no OSError
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ValueError(f"image {path} can't be read: {reason}") from error


def eight_bits(image: Image.Image) -> Image.Image:
    """Deeper pixels scaled by what DALI scales them by; Pillow's own conversion clips them at 255."""
    if image.mode[0] not in "IF":
        return image
    top = 1 if image.mode == "F" else 65535
    pixels = np.asarray(image).astype(np.float32)
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= top):
        raise ValueError(f"pixels of mode {image.mode} must be in [0, {top}], these are in [{low:g}, {high:g}]")
    return Image.fromarray((pixels * (255 / top)).round().astype(np.uint8))


def _standardise(image: Image.Image) -> Tensor:
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(1, image.height, image.width, 3).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(x, device="cpu").view(3, 1, 1) for x in (MEAN, STD))
    return (pixels.float() / 255 - mean) / std


def _show(x: Tensor) -> Image.Image:
    mean, std = (torch.tensor(value, device="cpu").view(3, 1, 1) for value in (MEAN, STD))
    pixels = x * std + mean
    return Image.fromarray((pixels * 255).round().clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy())


def _captions(subscript: str, sigma: Tensor, gamma: Tensor) -> list[_Text]:
    return [
        [("σ", False), (subscript, True), (f" = {_number(s)}    γ = {_number(g)}", False)]
        for s, g in zip(sigma.tolist(), gamma.tolist(), strict=True)
    ]


def _number(value: float) -> str:
    """Three digits at most, without trailing zeros."""
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class _Pen:
    """Writes centred text with subscripts."""

    def __init__(self, draw: ImageDraw.ImageDraw, size: int) -> None:
        self.draw = draw
        self.size = size
        self.greek = True
        self.fonts = [self._font(size), self._font(round(size * 0.7))]

    def _font(self, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        try:
            return ImageFont.truetype("DejaVuSans.ttf", size)
        except OSError:
            # The font inside Pillow is always there, but has no Greek letters.
            self.greek = False
            return ImageFont.load_default(size)

    def _spelled(self, text: _Text) -> _Text:
        return text if self.greek else [(part.replace("σ", "sigma ").replace("γ", "gamma"), sub) for part, sub in text]

    def width(self, text: _Text) -> int:
        return math.ceil(sum(self.draw.textlength(part, self.fonts[sub]) for part, sub in self._spelled(text)))

    def write(self, text: _Text, x: int, y: int) -> None:
        """Centre on ``x``, baseline at ``y``."""
        at = x - self.width(text) / 2
        for part, sub in self._spelled(text):
            self.draw.text((at, y + sub * self.size * 0.2), part, _INK, self.fonts[sub], anchor="ls")
            at += self.draw.textlength(part, self.fonts[sub])


def _compose(
    clean: Image.Image, headings: Sequence[str], rows: Sequence[tuple[str, list[Image.Image], list[_Text]]]
) -> Image.Image:
    tile_width, tile_height = clean.size
    text_size = max(12, round(min(clean.size) / 13))
    gap = max(6, text_size // 2)
    line = round(text_size * 2.1)
    probe = _Pen(ImageDraw.Draw(clean), text_size)
    # Small tiles stand as far apart as their captions need.
    column = max([tile_width, *(probe.width(caption) for _, _, captions in rows for caption in captions)]) + gap
    side = line + gap  # room for the rows' names, written upright on the left
    first = column + 2 * gap  # the clean image stands apart
    canvas = Image.new(
        "RGB",
        (first + side + column * len(headings) + gap, gap + line + len(rows) * (tile_height + line) + gap),
        _PAPER,
    )
    pen = _Pen(ImageDraw.Draw(canvas), text_size)

    def place(tile: Image.Image, centre: int, top: int, heading: _Text | None, caption: _Text) -> None:
        canvas.paste(tile, (centre - tile_width // 2, top))
        if heading is not None:
            pen.write(heading, centre, top - round(text_size * 0.6))
        pen.write(caption, centre, top + tile_height + round(text_size * 1.3))

    top = gap + line
    middle = top + ((len(rows) - 1) * (tile_height + line)) // 2
    place(clean, gap + column // 2, middle, [("clean", False)], [("γ = 0", False)])
    for number, (name, tiles, captions) in enumerate(rows):
        y = top + number * (tile_height + line)
        length = max(tile_height, pen.width([(name, False)]) + 2)  # of a small tile, beyond it
        label = Image.new("RGB", (length, line), _PAPER)
        _Pen(ImageDraw.Draw(label), text_size).write([(name, False)], length // 2, round(line * 0.7))
        canvas.paste(label.rotate(90, expand=True), (first + gap // 2, y - (length - tile_height) // 2))
        for index, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
            heading = [(f"t = {headings[index]}", False)] if number == 0 else None
            place(tile, first + side + column * index + column // 2, y, heading, caption)
    return canvas
