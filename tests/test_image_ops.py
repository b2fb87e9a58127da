"""Image operations against torchvision's v2 operations, on photographs, at every magnitude of every policy."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from fastmoll.kernels import image_ops
from fastmoll.kernels.image_ops import OPERATIONS, apply, crop_flip_rotate, warp
from fastmoll.pipelines.policies import ranges
from fastmoll.sample import PHOTOGRAPHS

GEOMETRIC = OPERATIONS[1:6]


def photographs(size: int, count: int = 3) -> Tensor:
    """Photographs that ship inside packages, uint8 ``(count, size, size, 3)``."""
    found = []
    for photograph in PHOTOGRAPHS[1 : 1 + count]:
        spec = importlib.util.find_spec(photograph.package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{photograph.package} is not installed")
        with Image.open(Path(spec.origin).parent / photograph.file) as image:
            whole = F.pil_to_tensor(image.convert("RGB"))
        found.append(F.center_crop(F.resize(whole, [size], antialias=True), [size, size]))
    return torch.stack(found).permute(0, 2, 3, 1).contiguous()


def every_magnitude(name: str, size: int) -> list[float]:
    """All magnitudes that any policy gives an operation, with both signs."""
    found = {0.0} if name not in ("Posterize", "Solarize") else set()
    for policy in ("rand", "auto", "trivial", "augmix"):
        limits = ranges(policy, size, size).get(name)
        if limits is not None and limits.magnitudes is not None:
            values = set(limits.magnitudes.tolist())
            found |= values | ({-value for value in values} if limits.signed else set())
    return sorted(found)


def torchvision(images: Tensor, name: str, magnitude: float, bilinear: bool) -> Tensor:
    mode = InterpolationMode.BILINEAR if bilinear else InterpolationMode.NEAREST
    transform = v2.RandAugment()
    done = [
        transform._apply_image_or_video_transform(i, name, magnitude, mode, transform._fill) for i in planes(images)
    ]
    return torch.stack(done).permute(0, 2, 3, 1)


def ties(name: str, magnitude: float, size: int, reach: float) -> Tensor:
    """Pixels whose source is halfway between two, by less than ``reach`` pixels, bool ``(size, size)``."""
    op, m = torch.tensor([OPERATIONS.index(name)]), torch.tensor([magnitude])
    a, b, c, d, e, f = image_ops._matrices(op, m, size, size).flatten().tolist()
    row, column = torch.meshgrid(*[torch.arange(size, dtype=torch.float64)] * 2, indexing="ij")
    x, y = a * column + b * row + c, d * column + e * row + f
    return torch.maximum(*(0.5 - (place - place.round()).abs() < reach for place in (x, y)))


def planes(images: Tensor) -> Tensor:
    return images.permute(0, 3, 1, 2)


def alike(images: Tensor, name: str, magnitude: float, bilinear: bool = False) -> Tensor:
    op = torch.full((len(images),), OPERATIONS.index(name))
    return apply(images, op, torch.full((len(images),), magnitude), bilinear=bilinear)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in GEOMETRIC])
def test_photometric_operations_are_torchvisions_within_one_grey_level(name: str) -> None:
    images = photographs(32)
    for magnitude in every_magnitude(name, 32):
        apart = (alike(images, name, magnitude).int() - torchvision(images, name, magnitude, False).int()).abs()
        # Torchvision truncates sums that it computes fused or not, as the processor has it; where one falls within
        # float32 of a whole number, a level is lost.
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < (0.03 if name in ("Color", "Contrast", "Sharpness") else 1e-9), magnitude


@pytest.mark.parametrize("size", [32, 45])
@pytest.mark.parametrize("name", GEOMETRIC)
def test_nearest_geometry_is_torchvisions_but_for_ties(name: str, size: int) -> None:
    images = photographs(size)
    for magnitude in every_magnitude(name, size):
        tie = ties(name, magnitude, size, 1e-4)
        wrong = (alike(images, name, magnitude) != torchvision(images, name, magnitude, False)).any(3)
        assert not (wrong & ~tie).any(), magnitude


@pytest.mark.parametrize("name", GEOMETRIC)
def test_bilinear_geometry_is_torchvisions_within_one_grey_level(name: str) -> None:
    images = photographs(32)
    for magnitude in every_magnitude(name, 32):
        apart = (alike(images, name, magnitude, True).int() - torchvision(images, name, magnitude, True).int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.03  # sums halfway between two levels


@pytest.mark.parametrize("bilinear", [False, True])
def test_compiled_and_plain_torch_give_the_same_bits(bilinear: bool) -> None:
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    images = photographs(40)[:, :, :33].repeat(40, 1, 1, 1).contiguous()
    op = torch.arange(len(images)) % len(OPERATIONS)
    magnitude = torch.rand(len(images), generator=generator) * 2 - 1
    magnitude[(op >= 3) & (op <= 5)] *= 60
    magnitude[op == OPERATIONS.index("Posterize")] *= 8
    expected = image_ops._apply(images, op, magnitude, bilinear)
    assert torch.equal(apply(images, op, magnitude, bilinear=bilinear), expected)
    matrix = torch.randn(len(images), 2, 3, generator=generator)
    window = torch.randint(-5, 45, (len(images), 4), generator=generator)
    clipped = torch.minimum(window.clamp(min=0), torch.tensor([40, 40, 33, 33]))
    expected = image_ops._warp(images, matrix, clipped, bilinear)
    assert torch.equal(warp(images, matrix, window, bilinear=bilinear), expected)


@pytest.mark.parametrize("plain", [False, True])
def test_images_at_the_edge_of_definition_are_torchvisions(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setattr(image_ops, "_compiled", lambda images: False)
    flat, two = torch.full((1, 9, 9, 3), 77), torch.full((1, 9, 9, 3), 255)
    two[:, :3] = 0
    for images in (flat.to(torch.uint8), two.to(torch.uint8), torch.arange(12).view(1, 2, 2, 3).to(torch.uint8)):
        for name in ("AutoContrast", "Equalize", "Invert", "Contrast", "Sharpness", "Color"):
            apart = alike(images, name, 0.5).int() - torchvision(images, name, 0.5, False).int()
            assert apart.abs().max() <= (1 if name in ("Contrast", "Color") else 0), name


def test_flip_crop_and_rotation_in_one_are_torchvisions_three() -> None:
    images = photographs(32)
    angles = torch.linspace(-15, 15, 7).tolist()
    cases = [(flip, *at, angle) for flip in (False, True) for at in ((0, 0), (-4, 3), (4, -1)) for angle in angles]
    unequal = 0
    for flip, top, left, angle in cases:
        n = len(images)
        matrix, window = crop_flip_rotate(
            *(torch.full((n,), value) for value in (flip, top, left, angle)), height=32, width=32
        )
        expected = F.horizontal_flip(planes(images)) if flip else planes(images)
        expected = F.crop(F.pad(expected, [4]), 4 + top, 4 + left, 32, 32)
        expected = F.rotate(expected, angle).permute(0, 2, 3, 1)
        unequal += int((warp(images, matrix, window) != expected).any(3).sum())
    # Ties between pixels, and no more.
    assert unequal <= 1e-4 * len(cases) * images[..., 0].numel()


@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize("size", [(32, 32), (5, 9), (1, 1)])
def test_images_that_are_only_moved_and_turned_have_the_same_bits(
    size: tuple[int, int], bilinear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (height, width), n = size, 400
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, height, width, 3), generator=generator, dtype=torch.uint8)
    flip = torch.rand(n, generator=generator) < 0.5
    top = torch.randint(-height - 1, height + 2, (n,), generator=generator)
    left = torch.randint(-width - 1, width + 2, (n,), generator=generator)
    matrix, window = crop_flip_rotate(flip, top, left, torch.zeros(n), height, width)
    matrix[:4, 0, 2] = torch.tensor([1e30, -(2.0**40), math.nan, 0.5])  # as anybody may give them
    compiled = warp(images, matrix, window, bilinear=bilinear)
    monkeypatch.setattr(image_ops, "_compiled", lambda images: False)
    assert torch.equal(compiled, warp(images, matrix, window, bilinear=bilinear))


def test_nothing_waits_for_the_device() -> None:
    # A tensor without values can't be looked at: whatever would make the host wait for a GPU raises here.
    images = torch.empty(4, 8, 8, 3, dtype=torch.uint8, device="meta")
    op = torch.zeros(4, dtype=torch.int64, device="meta")
    magnitude = torch.zeros(4, device="meta")
    for bilinear in (False, True):
        assert image_ops._apply(images, op, magnitude, bilinear).shape == images.shape
        matrix, edges = torch.zeros(4, 2, 3, device="meta"), torch.zeros(4, 4, dtype=torch.int64, device="meta")
        assert image_ops._warp(images, matrix, edges, bilinear).shape == images.shape


@pytest.mark.gpu
@pytest.mark.parametrize("known", [False, True])
def test_a_gpu_gives_the_bits_of_the_cpu(known: bool) -> None:
    images = photographs(32).repeat(20, 1, 1, 1)
    op = torch.arange(len(images)) % len(OPERATIONS)
    magnitude = torch.linspace(0, 0.9, len(images))
    where = "cpu" if known else "cuda"
    arguments = images.cuda(), op.to(where), magnitude.to(where)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        done = apply(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    unequal = (done.cpu() != apply(images, op, magnitude)).float().mean()
    assert unequal < 1e-4  # sines of the device, rounded to float32


def test_bad_arguments_are_named() -> None:
    images = photographs(8, 1)
    zero = torch.zeros(1)
    with pytest.raises(ValueError, match=r"images must have shape"):
        apply(images.permute(0, 3, 1, 2), torch.zeros(1, dtype=torch.int64), zero)
    with pytest.raises(ValueError, match=r"images must be torch.uint8"):
        apply(images.float(), torch.zeros(1, dtype=torch.int64), zero)
    with pytest.raises(ValueError, match=r"op must lie in \[0, 15\), got 15 at position 0"):
        apply(images, torch.tensor([15]), zero)
    with pytest.raises(ValueError, match=r"magnitude must be finite, got nan"):
        apply(images, torch.tensor([1]), torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match=r"matrix must have shape"):
        warp(images, torch.zeros(1, 3, 3))
    with pytest.raises(ValueError, match=r"window must be torch.int64"):
        warp(images, torch.zeros(1, 2, 3), torch.zeros(1, 4))
