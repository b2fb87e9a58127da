"""What the figures of the method measure or compute: spectra, information against blur, label distributions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from scipy.fft import dctn
from scipy.stats import dirichlet
from torch import Tensor

from fastmoll.kernels.heat_blur import heat_blur
from fastmoll.pipelines.small import read_small
from fastmoll.preview import eight_bits

Array = NDArray[np.float64]

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")


def read_images(images: str | Path, size: int, limit: int) -> Tensor:
    """Read a sample of a user's images for the figures that need some.

    Args:
        images: Folder in which image files are, at any depth, or what `fastmoll.pipelines.small.read_small` takes.
        size: Height and width, pixels: the largest centred square is scaled to it.
        limit: At most so many, evenly spaced over all of them in order of their paths.

    Returns:
        uint8 ``(N, 3, size, size)``.

    Raises:
        ValueError: Nothing is there, or a file is no image; it names it.
    """
    place = Path(images)
    files = sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES) if place.is_dir() else []
    if files:
        pictures = [_open(files[i]) for i in _spaced(len(files), limit)]
    else:
        try:
            data = read_small(images, "val")
        except ValueError as error:
            lacking = f"{place} has no files {', '.join(SUFFIXES)}, and as a data set: " if place.is_dir() else ""
            raise ValueError(f"images: {lacking}{str(error).removeprefix('data: ')}") from error
        pictures = [Image.fromarray(data.images[i]) for i in _spaced(len(data.images), limit)]
    square = [ImageOps.fit(picture, (size, size), Image.Resampling.BICUBIC) for picture in pictures]
    return torch.from_numpy(np.stack([np.asarray(x) for x in square])).permute(0, 3, 1, 2).contiguous()


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as file:
            return eight_bits(file).convert("RGB")
    except Exception as error:  # Pillow raises whatever its plugins do
        raise ValueError(f"images: {path} can't be read: {' '.join(str(error).split())}") from error


def _spaced(count: int, limit: int) -> list[int]:
    number = min(count, limit)
    return [i * count // number for i in range(number)]


def information(images: Tensor, temperatures: Sequence[float]) -> Array:
    """Size of each blurred image as PNG, as a part of the clean image's (paper, section 3.3 and figure "Blur reduces
    information linearly").

    Args:
        images: uint8 ``(N, 3, H, W)``.
        temperatures: In [0, 1]; blur scales from 0.3 pixels to the width (equation 6).

    Returns:
        float64 ``(N, T)``, bytes over bytes. The encoder is Pillow's; the paper's, torchvision's, is being taken out of
        that package and gives the same ratios, to 0.003 on photographs of 32 to 224 pixels.
    """

    def sizes(batch: Tensor) -> Array:
        return np.array([_png_bytes(image) for image in batch], np.float64)

    # Blur is linear and keeps constants, so standardising first would change nothing.
    blurred = (
        heat_blur(images.float(), torch.full((len(images),), float(t), device="cpu")).round().clamp(0, 255).byte()
        for t in temperatures
    )
    return np.stack([sizes(batch) for batch in blurred], 1) / sizes(images)[:, None]


def _png_bytes(image: Tensor) -> int:
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(file, "PNG")
    return file.tell()


def spectral_change(clean: Tensor, corrupted: Tensor) -> Array:
    """Mean absolute change of the orthonormal DCT-II coefficients (paper, appendix A.4), in grey levels of 255.

    Args:
        clean: uint8 ``(N, C, H, W)``.
        corrupted: The same images, corrupted.

    Returns:
        float64 ``(H, W)``, mean over images and channels; frequency zero comes first.
    """
    difference = corrupted.float() - clean.float()  # the transform is linear: one of the difference is enough
    change: Array = np.abs(dctn(difference.numpy(), axes=(-2, -1), norm="ortho")).mean((0, 1))
    return change


def radial_profile(spectrum: Array, bins: int = 16) -> tuple[Array, Array]:
    """Mean of a spectrum over rings of equal frequency.

    Args:
        spectrum: ``(H, W)`` coefficients of a DCT-II.
        bins: Rings.

    Returns:
        Centres of the rings, as parts of the highest frequency along an axis (1), and the means in them; rings that
        hold no coefficient, and the corners beyond 1, are left out.
    """
    height, width = spectrum.shape
    radius = np.hypot(np.arange(height)[:, None] / height, np.arange(width) / width)
    ring = (radius * bins).astype(int)
    inside = ring < bins
    count = np.bincount(ring[inside], minlength=bins)
    total = np.bincount(ring[inside], spectrum[inside], bins)
    centre = (np.arange(bins) + 0.5) / bins
    return centre[count > 0], total[count > 0] / count[count > 0]


def label_density(label: Sequence[float], resolution: int = 100) -> tuple[Array, Array, Array]:
    """The distribution of predictions that a label prefers, ``Dir(f | 1 + y)`` over three classes (paper, equation 10).

    Args:
        label: Three parts ``y``, not negative.
        resolution: Steps along an edge of the triangle.

    Returns:
        ``x`` and ``y`` in the plane, the triangle's corners being (0, 0), (1, 0) and (1/2, √3/2) for the classes in
        their order, and the density there, all float64 ``(N,)``.
    """
    i, j = np.meshgrid(np.arange(resolution + 1), np.arange(resolution + 1), indexing="ij")
    i, j = i[i + j <= resolution], j[i + j <= resolution]
    predictions = np.stack([resolution - i - j, i, j]) / resolution
    density: Any = dirichlet.pdf(predictions, 1.0 + np.asarray(label, np.float64))
    return predictions[1] + predictions[2] / 2, predictions[2] * (3**0.5 / 2), np.asarray(density, np.float64)
