"""The Triton kernels for interleaved bytes against the definition in float64, interpreted if there is no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_batch_tail import BLUR, KEY, NOISE, PURE, TOLERANCE, assert_close, batch, checked, definition, triton_tail
from torch import Tensor

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter", "nan_memory"),
    pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered"),
]

HALF = torch.float16


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Says, after a call, that these kernels did it."""
    from fastmoll.kernels import batch_tail_triton

    calls = []
    run = batch_tail_triton.batch_tail_bytes

    def note(*args: Any) -> Any:
        calls.append("bytes")
        return run(*args)

    monkeypatch.setattr(batch_tail_triton, "batch_tail_bytes", note)
    return calls


@pytest.mark.parametrize(
    ("height", "width", "dtype"),
    [(*size, HALF) for size in ((1, 8), (8, 8), (9, 16), (40, 24), (64, 64), (70, 72), (20, 120), (130, 64))]
    + [(9, 16, torch.bfloat16), (70, 72, torch.bfloat16)],  # they differ in how results are rounded
)
def test_images_of_any_height_and_eights_of_pixels(
    height: int, width: int, dtype: torch.dtype, launched: list[str]
) -> None:
    images, arguments = batch(height, width)
    result = triton_tail(images, dtype=dtype, **arguments, **KEY)
    assert launched and result.dtype == dtype
    assert_close(result, definition(images, **arguments, **KEY), TOLERANCE[dtype])


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
@pytest.mark.parametrize(("height", "width"), [(5, 8), (20, 72)])
def test_mixed_images(height: int, width: int, mix: str, flip: bool, launched: list[str]) -> None:
    images, arguments = batch(height, width, mix=mix, flip=flip)
    result = triton_tail(images, dtype=HALF, **arguments, **KEY)
    assert launched
    assert_close(result, definition(images, **arguments, **KEY), TOLERANCE[HALF])


@pytest.mark.parametrize("mix", [None, "mixup", "cutmix"])
def test_without_roles_images_are_standardised_and_mixed(mix: str | None, launched: list[str]) -> None:
    images, arguments = batch(37, 16, mix=mix)
    exact = definition(images, **arguments | {"role": torch.zeros(7), "t": torch.zeros(7)})
    plain = {name: value for name, value in arguments.items() if name not in ("role", "t", "index")}
    result = triton_tail(images, dtype=HALF, **plain)
    assert launched
    assert_close(result, exact, TOLERANCE[HALF])


def blurred_by(images: Tensor, scales: tuple[float, ...], **more: Any) -> tuple[Tensor, Tensor]:
    """Images, each blurred by one of the scales (ascending), and their definition."""
    count, low, high = len(scales), scales[0], scales[-1]
    arguments = batch(1, 8, size=count)[1] | {"sigma_min": low, "sigma_max": high} | more
    arguments["role"] = torch.full((count,), BLUR, dtype=torch.int8)
    arguments["t"] = torch.tensor([math.log(x / low) / math.log(high / low) for x in scales])
    return triton_tail(images, dtype=HALF, **arguments), definition(images, **arguments)


# Where the cosine series, the closed form and the band of each scale begin and end.
SCALES = (0.05, 0.3, 0.66, 0.67, 0.9, 1.11, 1.69, 1.71, 3.0, 11.5, 19.5, 35.0, 50.0, 99.0, 115.0, 200.0)


@pytest.mark.parametrize(("height", "width"), [(72, 72), (200, 40), (24, 232)])
def test_every_scale_of_the_blur(height: int, width: int, launched: list[str]) -> None:
    images, _ = batch(height, width, size=len(SCALES))
    result, exact = blurred_by(images, SCALES)
    assert launched
    assert_close(result, exact, TOLERANCE[HALF])


def test_the_blur_keeps_the_mean_of_bright_images(launched: list[str]) -> None:
    images = 192 + batch(72, 72, size=3)[0] // 4
    # Rounding the matrices alone takes 7e-4 from the last; results are about 0, where they lose less by their own.
    result, exact = blurred_by(images, (0.05, 1.11, 200.0), mean=(0.875,) * 3, std=(0.25,) * 3)
    assert launched
    assert (result.double() - exact).mean(dim=(2, 3)).abs().max() < 2e-4


@pytest.mark.parametrize(("low", "high"), [(1e-30, 1e-6), (5.0, 5.0), (0.2, 1e100)])
def test_scales_that_are_extreme(low: float, high: float, launched: list[str]) -> None:
    images, arguments = batch(18, 32)
    result = triton_tail(images, dtype=HALF, sigma_min=low, sigma_max=high, **arguments)
    assert launched
    assert_close(result, definition(images, sigma_min=low, sigma_max=high, **arguments), TOLERANCE[HALF])


@pytest.mark.parametrize("role", [NOISE, PURE])
def test_the_noise_is_that_of_the_other_kernels(role: int, launched: list[str]) -> None:
    images, arguments = batch(21, 24)
    arguments["role"] = torch.full((7,), role, dtype=torch.int8)
    result = triton_tail(images, dtype=HALF, **arguments, **KEY)
    assert launched == ["bytes"]
    exact = triton_tail(images, dtype=torch.float32, **arguments, **KEY)
    assert launched == ["bytes"]
    # Half a unit in the last place of what is at most 8.
    assert (result.float() - exact).abs().max() <= 2**-9


def test_memory_that_is_aligned_to_no_more_than_eight_bytes(launched: list[str]) -> None:
    images, arguments = batch(3, 8)
    storage = torch.empty(8 + images.numel(), dtype=torch.uint8)
    moved = storage[8:].view_as(images).copy_(images)
    expected = triton_tail(images, dtype=HALF, **arguments, **KEY)
    assert torch.equal(triton_tail(moved, dtype=HALF, **arguments, **KEY), expected)
    assert len(launched) == 2


def test_what_is_not_eights_of_interleaved_bytes_takes_the_other_kernels(launched: list[str]) -> None:
    from fastmoll.kernels.batch_tail_triton_bytes import takes_bytes

    images, arguments = batch(10, 16)
    last, first = torch.channels_last, torch.contiguous_format
    planes = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert takes_bytes(checked(images, last, HALF, **arguments))
    for x, order, dtype in (
        (images[:, :, :12].contiguous(), last, HALF), (images[:, :, :8], last, HALF), (planes, last, HALF),
        (images.permute(0, 3, 1, 2) / 255, last, HALF), (images, first, HALF), (images, last, torch.float32),
    ):  # fmt: skip
        assert not takes_bytes(checked(x, order, dtype, **arguments))
    result = triton_tail(planes, dtype=HALF, **arguments, **KEY)
    assert not launched
    assert_close(result, definition(images, **arguments, **KEY), TOLERANCE[HALF])


def test_an_image_does_not_depend_on_its_batch(launched: list[str]) -> None:
    images, arguments = batch(9, 24)
    together = triton_tail(images, dtype=HALF, **arguments, **KEY)
    for chosen in ([2], [6, 4, 1], [3, 0, 5]):
        some = {name: x[chosen] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        assert torch.equal(triton_tail(images[chosen], dtype=HALF, **some, **KEY), together[chosen])
    assert len(launched) == 4


def test_blocks_that_would_read_what_nobody_wrote_are_refused() -> None:
    from fastmoll.kernels.batch_tail_triton_bytes import BYTE_BLOCKS, ByteBlocks

    with pytest.raises(ValueError, match="BN must be at most 64, got 128"):
        ByteBlocks(BYTE_BLOCKS.first, {**BYTE_BLOCKS.second, "BN": 128})
