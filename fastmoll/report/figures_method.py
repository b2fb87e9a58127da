"""Figures of a report that show the method: its schedules, and what blur and corruptions do to the user's images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import beta as beta_distribution
from torch import Tensor

from fastmoll.kernels.corruption_constants import CORRUPTIONS, GROUPS, SEVERITIES
from fastmoll.kernels.draw import draw
from fastmoll.kernels.heat_blur import blur_scale
from fastmoll.report.measures import (
    Array,
    information,
    label_density,
    radial_profile,
    read_images,
    spectral_change,
)
from fastmoll.report.style import COLOURS, INK, MAP, NothingToShowError, legend_below, panels, words
from fastmoll.schedules import beta_quantiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Drawing = tuple["Canvas", str]
"""A figure and its caption."""

BETAS: Final = ((1.0, 1.0), (1.0, 2.0), (1.0, 3.0), (2.0, 2.0))
"""Temperature distributions that are always drawn; the second is the default."""

_SIGMA_MIN: Final = 0.3
_OTHERS: Final = 8
"""Temperature distributions of the runs that are drawn beside these, at most."""
_DRAWS: Final = 40_000
_TEMPERATURES: Final = tuple(np.linspace(0.0, 1.0, 21).tolist())
_SLOPES: Final = (0.5, 1.0, 2.0)
_DECAYS: Final = (0.0, 0.3, 0.6, 0.9)
_STAR: Final[dict[str, Any]] = {"marker": "*", "markersize": 10, "color": "white", "markeredgecolor": "black"}
_LINES: Final = ("-", (0, (5, 1.5)), (0, (1, 1)), "-.")


class Pictures:
    """The user's images at the size of the runs, and what is measured on them, once for all figures.

    Attributes:
        images: uint8 ``(N, 3, size, size)``.
        size: Height and width, pixels.
    """

    def __init__(self, images: str | Path, size: int) -> None:
        """Read the images, so many that all figures take seconds.

        Args:
            images: Folder or data set, as for `read_images`.
            size: Height and width, pixels.

        Raises:
            ValueError: As for `read_images`.
        """
        self.images = read_images(images, size, max(32, min(256, 256 * 64**2 // size**2)))
        self.size = size

    def corrupted(self, corruption: str, severity: int, count: int | None = None) -> Tensor:
        """The first ``count`` images, corrupted; sample ids are their positions."""
        from fastmoll.corruptions import corrupt

        return corrupt(self.images[:count], corruption, severity)

    @cached_property
    def spectra(self) -> dict[str, list[Array]]:
        """`spectral_change` of each corruption at each severity."""
        return {
            name: [spectral_change(self.images, self.corrupted(name, severity)) for severity in SEVERITIES]
            for name in CORRUPTIONS
        }

    @property
    def described(self) -> str:
        """How many, how large."""
        return f"{len(self.images):,} images of {self.size}×{self.size} pixels"


def temperature_densities(betas: Sequence[tuple[float, float]]) -> Drawing:
    """Densities of Beta(α, β), and how often the package draws each temperature (paper, figure "Temperature
    distributions").
    """
    others = [beta for beta in dict.fromkeys(betas) if beta not in BETAS]
    chosen = sorted({*BETAS, *others[:_OTHERS]})
    columns = min(4, len(chosen))
    canvas, axes = panels(math.ceil(len(chosen) / columns), columns, height=1.9, sharey=True)
    grid = np.linspace(0.001, 0.999, 400)
    # Some densities have no largest value, or one that would flatten the others.
    top = min(10.0, 1.1 * max(3.0, *(float(beta_distribution.pdf(grid, a, b).max()) for a, b in chosen)))
    for place, (a, b) in zip(axes, chosen, strict=False):
        quantiles = None if a == 1 else beta_quantiles(a, b)
        _, t = draw(torch.arange(_DRAWS, device="cpu"), roles=(0, 1, 1), beta=(a, b), quantiles=quantiles)
        place.hist(t.numpy(), bins=40, range=(0, 1), density=True, color=COLOURS[6], alpha=0.6, label="drawn")
        place.plot(grid, beta_distribution.pdf(grid, a, b), color=COLOURS[1], label="density")
        place.set(title=f"Beta({a:g}, {b:g})", xlim=(0, 1), ylim=(0, top), xticks=[0, 0.5, 1], xlabel="temperature t")
    for place in axes[len(chosen) :]:
        place.set_visible(False)
    for place in axes[::columns]:
        place.set_ylabel("density")
    legend_below(canvas, axes[0])
    used = " β = 2 with α = 1 is the default: E[t] = 1/3."
    used += f" {len(others) - _OTHERS} more are left out." if len(others) > _OTHERS else ""
    return canvas, f"Distributions of the temperature, and a histogram of {_DRAWS:,} temperatures as drawn.{used}"


def blur_schedule(sizes: Sequence[int]) -> Drawing:
    """σ_B(t) = exp((1−t) ln σ_min + t ln σ_max) for images of several widths (paper, equation 6)."""
    canvas, (axes,) = panels(height=3.2)
    t = torch.linspace(0, 1, 201, dtype=torch.float64, device="cpu")
    for size, colour, line in zip(sorted(set(sizes)), COLOURS, _LINES * 2, strict=False):
        scale = blur_scale(t, _SIGMA_MIN, size)
        axes.plot(t.numpy(), scale.numpy(), color=colour, linestyle=line, label=f"images of {size} pixels")
        axes.annotate(
            rf"$\sigma_\mathrm{{max}}$ = {size}",
            (1, size),
            (4, 0),
            textcoords="offset points",
            va="center",
            color=colour,
        )
    axes.axhline(_SIGMA_MIN, color=INK, linewidth=1, linestyle=":")
    axes.annotate(r"$\sigma_\mathrm{min}$ = 0.3", (0.995, _SIGMA_MIN), (0, 4), textcoords="offset points", ha="right")
    axes.set(yscale="log", xlim=(0, 1), xlabel="temperature t", ylabel=r"blur scale $\sigma_B$, pixels")
    axes.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.legend(loc="upper left")
    return canvas, "Blur scale against temperature, from 0.3 pixels to the image width, even in its logarithm."


def information_blur(pictures: Pictures | None) -> Drawing:
    """PNG bytes of blurred images against temperature, with γ = t^k (paper, equation 13)."""
    pictures = _needed(pictures)
    ratio = information(pictures.images, _TEMPERATURES)
    t, mean = np.array(_TEMPERATURES), ratio.mean(0)
    canvas, (axes,) = panels(height=3.6)
    low, high = np.quantile(ratio, (0.1, 0.9), axis=0)
    axes.fill_between(t, low, high, color=COLOURS[0], alpha=0.15, linewidth=0, label="8 of 10 images")
    axes.plot(t, mean, color=COLOURS[0], marker="o", label="measured, mean over images", clip_on=False)
    fine = np.linspace(0, 1, 401) ** 2  # a root is steepest at zero
    for k, colour, line in zip(_SLOPES, (COLOURS[2], COLOURS[1], COLOURS[3]), _LINES[1:], strict=True):
        axes.plot(fine, 1 - fine**k, color=colour, linestyle=line, label=f"1 − γ with γ = $t^{{{k:g}}}$")
    axes.set(xlim=(0, 1), ylim=(0, max(1.05, float(high.max()))), xlabel="temperature t")
    axes.set_ylabel("PNG bytes, blurred / clean")
    axes.legend(loc="upper right")
    slope = fitted_slope(t, mean)
    away = ", ".join(f"{_distance(k, t, mean):.3f} for k = {k:g}" for k in (*_SLOPES, slope))
    return canvas, (
        f"What is left of the information after blur: size as PNG relative to the clean image, {pictures.described}. "
        f"The label keeps 1 − γ = 1 − t^k; root mean square distance from the measured mean: {away}, the nearest k."
    )


def fitted_slope(t: Array, kept: Array) -> float:
    """The ``k`` whose ``1 − t^k`` is nearest to a curve in the mean square, to two decimals.

    Args:
        t: Temperatures.
        kept: The curve there.
    """
    found = minimize_scalar(_distance, bounds=(0.1, 10.0), args=(t, kept), method="bounded")
    return round(float(found.x), 2)


def _distance(k: float, t: Array, kept: Array) -> float:
    return float(np.sqrt(np.mean((kept - (1 - t**k)) ** 2)))


def dirichlet_triangles() -> Drawing:
    """Dir(f | 1 + y) for one-hot, tempered and smoothed labels (paper, figure "Label smoothing ...")."""
    canvas, axes = panels(2, len(_DECAYS), height=1.85)
    shown = None
    for place, (kind, gamma) in zip(axes, product(("tempered", "smoothed"), _DECAYS), strict=True):
        wrong = gamma / 3 if kind == "smoothed" else 0.0
        label = np.array([1 - gamma + wrong, wrong, wrong])
        x, y, density = label_density(label.tolist())
        # As pixels in the SVG, too: thousands of triangles would be megabytes.
        shown = place.tripcolor(x, y, density, shading="gouraud", cmap=MAP, vmin=0, vmax=4, rasterized=True)
        mode = label / label.sum()
        place.plot(mode[1] + mode[2] / 2, mode[2] * 3**0.5 / 2, clip_on=False, **_STAR)
        for *corner, name in ((0, 0, "true"), (1, 0, "wrong"), (0.5, 3**0.5 / 2, "wrong")):
            place.annotate(
                name,
                (corner[0], corner[1]),
                (0, 3 if corner[1] else -5),
                textcoords="offset points",
                ha="center",
                va="bottom" if corner[1] else "top",
                fontsize=8,
            )
        place.set(title=f"{kind}, γ = {gamma:g}" if gamma else "one-hot", aspect="equal", ylim=(-0.2, 1.02))
        place.axis("off")
    assert shown is not None
    canvas.colorbar(shown, ax=axes, shrink=0.7, pad=0.02, extend="max").set_label("density")
    return canvas, (
        "Distribution of predictions over three classes that a label prefers, Dir(f | 1 + y); the star is its mode. "
        "Tempering flattens it and leaves the mode at full confidence, smoothing moves the mode to the label."
    )


def corruption_gallery(pictures: Pictures | None) -> Drawing:
    """One image under every corruption at every severity (paper, figure of spectral densities, a)."""
    pictures = _needed(pictures)
    step = _step(pictures.size)
    part = f"; every {step} pixels one is shown" if step > 1 else ""
    return _cells(
        {
            name: [
                _tile(image) for image in (pictures.images[0], *(pictures.corrupted(name, s, 1)[0] for s in SEVERITIES))
            ]
            for name in CORRUPTIONS
        },
        "An image under each corruption, from left to right clean and at severities 1 to 5, of "
        f"{pictures.size}×{pictures.size} pixels{part}.",
    )


def spectral_maps(pictures: Pictures | None) -> Drawing:
    """Mean |DCT(corrupted) − DCT(clean)| of every cell as heat maps (paper, appendix A.4, b)."""
    pictures = _needed(pictures)
    spectra = {name: [_reduced(s) for s in row] for name, row in pictures.spectra.items()}
    every = np.concatenate([s.ravel() for row in spectra.values() for s in row])
    high = float(np.quantile(every, 0.999))
    canvas, caption = _cells(
        {name: [np.log10(np.maximum(s, high / 1e3)) for s in row] for name, row in spectra.items()},
        f"Mean |DCT(corrupted) − DCT(clean)|, orthonormal, in grey levels, over {pictures.described}. Each square has "
        "frequency zero in its upper left corner and the highest in the lower right one; severities 1 to 5 from left "
        "to right; one scale for all.",
        limits=(math.log10(high / 1e3), math.log10(high)),
    )
    return canvas, caption


def spectral_profiles(pictures: Pictures | None) -> Drawing:
    """The same as curves over the radius of the frequency, one panel a corruption."""
    pictures = _needed(pictures)
    canvas, axes = panels(5, 3, height=1.6, sharex=True, sharey=True)
    for place, name in zip(axes, CORRUPTIONS, strict=True):
        group = next(number for number, names in enumerate(GROUPS.values()) if name in names)
        for severity, spectrum in zip(SEVERITIES, pictures.spectra[name], strict=True):
            alpha = 0.25 + 0.15 * severity
            place.plot(
                *radial_profile(spectrum),
                color=COLOURS[group],
                alpha=alpha,
                linewidth=0.6 + 0.3 * severity,
            )
        place.set(yscale="log", xlim=(0, 1), xticks=[0, 0.5, 1])
        place.set_title(words(name), color=COLOURS[group])
    for place in axes[::3]:
        place.set_ylabel("grey levels")
    for place in axes[-3:]:
        place.set_xlabel("frequency / highest")
    for severity in SEVERITIES:  # grey, as the colours are those of the groups
        look: dict[str, Any] = {"color": INK, "alpha": 0.25 + 0.15 * severity, "linewidth": 0.6 + 0.3 * severity}
        axes[0].plot([], [], label=f"severity {severity}" if severity == 1 else str(severity), **look)
    legend_below(canvas, axes[0])
    return canvas, (
        f"Mean |DCT(corrupted) − DCT(clean)| in grey levels over rings of equal frequency, {pictures.described}; "
        "thicker lines are higher severities, colours are groups of corruptions. White noise is a flat line; a "
        "falling one is a change of low frequencies."
    )


def _needed(pictures: Pictures | None) -> Pictures:
    if pictures is None:
        raise NothingToShowError("it needs pictures, and none were given (--images)")
    return pictures


def _tile(image: Tensor) -> Any:
    """``(H, W, 3)`` for Matplotlib: not every pixel of a large image, rather than means, which would hide the noise."""
    step = _step(image.shape[-1])
    return image[:, ::step, ::step].permute(1, 2, 0).numpy()


def _step(size: int) -> int:
    return max(1, size // 64)


def _reduced(spectrum: Array, side: int = 32) -> Array:
    """Means over blocks: a square of a figure shows no more."""
    step = max(1, len(spectrum) // side)
    size = len(spectrum) // step
    blocks: Array = spectrum[: size * step, : size * step].reshape(size, step, size, step).mean((1, 3))
    return blocks


def _cells(rows: dict[str, list[Any]], caption: str, limits: tuple[float, float] | None = None) -> Drawing:
    """15 × 5 pictures: a panel for each corruption, three beside each other, severities from left to right."""
    canvas, axes = panels(5, 3, height=0.8)
    shown = None
    for place, (name, cells) in zip(axes, rows.items(), strict=True):
        gap = np.full_like(cells[0][:, : max(1, len(cells[0]) // 24)], 255 if limits is None else np.nan)
        strip = np.concatenate([part for cell in cells for part in (cell, gap)][:-1], 1)
        scale: dict[str, Any] = {} if limits is None else {"vmin": limits[0], "vmax": limits[1], "cmap": MAP}
        shown = place.imshow(strip, interpolation="nearest", **scale)
        place.set_title(words(name))
        place.axis("off")
    if limits is not None and shown is not None:
        canvas.set_size_inches(canvas.get_figwidth(), canvas.get_figheight() + 0.5)
        bar = canvas.colorbar(shown, ax=axes, orientation="horizontal", shrink=0.5, aspect=40)
        ticks = range(math.ceil(limits[0]), math.floor(limits[1]) + 1)
        bar.set_ticks(list(ticks), labels=[f"{10.0**tick:g}" for tick in ticks])
        bar.set_label("mean change, grey levels")
    return canvas, caption
