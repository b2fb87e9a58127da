from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from imagenet_loaders import Make, equal, loader, stream
from nvidia.dali import fn, pipeline_def, types
from photographs import photographs

from fastmoll.kernels import checks
from fastmoll.pipelines import imagenet, resample

pytest.importorskip("numba")

ANGLES = (0.0, 5.0, -15.0, 10.0, 90.0, -3.0, 1.0, 14.0, -7.0, 12.5)
SHAPES = ((224, 224), (224, 1), (1, 224), (1, 1), (2, 3), (17, 220), (97, 33), (33, 97), (223, 40), (64, 64))


def crops() -> list[np.ndarray]:
    images = photographs()
    return [np.ascontiguousarray(images[i, :height, :width]) for i, (height, width) in enumerate(SHAPES)]


def exact(crop: np.ndarray, height: int, width: int) -> torch.Tensor:
    """torchvision's resizing of float images, which rounds nothing; grey levels (H, W, 3)."""
    image = torch.from_numpy(crop).permute(2, 0, 1)[None].double()
    out = torch.nn.functional.interpolate(image, (height, width), mode="bilinear", antialias=True)
    return out[0].permute(1, 2, 0)


def rotation(crop: np.ndarray, angle: float, height: int, width: int) -> torch.Tensor:
    """The same, rotated about its centre, by torch's own bilinear sampling."""
    turn, half = math.radians(angle), 0.5
    # What torch calls the sides of an image is -1 and 1.
    i, j = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) + half - height / 2,
        torch.arange(width, dtype=torch.float64) + half - width / 2,
        indexing="ij",
    )
    x, y = math.cos(turn) * j - math.sin(turn) * i, math.sin(turn) * j + math.cos(turn) * i
    grid = torch.stack((2 * x / width, 2 * y / height), 2)[None]
    image = torch.from_numpy(crop).permute(2, 0, 1)[None].double().contiguous()
    return torch.nn.functional.grid_sample(image, grid, align_corners=False)[0].permute(1, 2, 0)


@pytest.mark.parametrize("height, width", [(64, 64), (1, 1), (7, 300), (224, 224), (255, 3)])
def test_pixels_are_torchvisions_rounded(height: int, width: int) -> None:
    from fastmoll.kernels.resample_numba import resize

    for crop in crops():
        out = np.full((height, width, 3), 77, np.uint8)
        resize(crop, out)
        difference = torch.from_numpy(out) - exact(crop, height, width)
        assert difference.abs().max() < 0.502, crop.shape  # half a grey level, and float32 sums


@pytest.mark.parametrize("angle", [0.0, 15.0, -15.0, 3.3, 1e-5, 90.0, 180.0, -137.0])
@pytest.mark.parametrize("height, width", [(120, 120), (112, 3), (224, 113)])
def test_a_rotated_crop_is_sampled_once(height: int, width: int, angle: float) -> None:
    from fastmoll.kernels.resample_numba import rotate

    for crop in crops():
        if crop.shape[0] > 2 * height or crop.shape[1] > 2 * width:
            continue  # reduced first
        out = np.full((height, width, 3), 77, np.uint8)
        rotate(crop, angle, out)
        difference = torch.from_numpy(out) - rotation(crop, angle, height, width)
        assert difference.abs().max() < 0.51, crop.shape  # half a grey level, and places in float32


def test_nothing_around_the_result_is_touched() -> None:
    from fastmoll.kernels.resample_numba import resize, rotate

    for size in ((5, 7), (1, 1), (8, 3)):
        memory = np.full(3 * size[0] * size[1] + 32, 77, np.uint8)
        for done in (resize, lambda crop, out: rotate(crop, 11.0, out)):
            done(crops()[6], memory[16:-16].reshape(*size, 3))
            assert (memory[:16] == 77).all() and (memory[-16:] == 77).all()


def test_a_crop_far_larger_than_the_result_goes_through_a_filter() -> None:
    from fastmoll.kernels.resample_numba import resize, rotate

    crop, reduced, out, expected = crops()[0], *(np.empty((size, size, 3), np.uint8) for size in (80, 40, 40))
    resize(crop, reduced)
    rotate(reduced, 9.0, expected)
    rotate(crop, 9.0, out)
    assert np.array_equal(out, expected)


@pytest.fixture(params=["as compiled by us", "as DALI documents it"])
def operator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    resample._operator.cache_clear()
    if request.param == "as DALI documents it":
        from nvidia.dali.plugin.numba import NumbaFunction

        own = NumbaFunction._get_run_fn_cpu, NumbaFunction._get_setup_fn_cpu
        called = []
        monkeypatch.setattr("fastmoll.kernels.resample_numba.RUN", None)
        monkeypatch.setattr("fastmoll.kernels.resample_numba.SETUP", None)
        for name, method in zip(("_get_run_fn_cpu", "_get_setup_fn_cpu"), own, strict=True):
            monkeypatch.setattr(NumbaFunction, name, lambda *a, m=method, **k: (called.append(m), m(*a, **k))[1])
        yield
        assert len(called) == 4
    else:
        yield
    resample._operator.cache_clear()


def test_dalis_operator_resizes_each_image_of_a_batch(operator: None) -> None:
    @pipeline_def(batch_size=len(SHAPES), num_threads=2, device_id=None, prefetch_queue_depth=1)
    def graph() -> Any:
        images = fn.external_source(lambda: crops(), layout="HWC", dtype=types.UINT8, ndim=3)
        angle = fn.external_source(lambda: [np.float32(angle) for angle in ANGLES], dtype=types.FLOAT, ndim=0)
        return resample.resample(images, 50), resample.resample(images, 50, angle)

    pipeline = graph()
    resized, rotated = pipeline.run()
    assert resized.layout() == rotated.layout() == "HWC"
    for image, turned, crop, angle in zip(resized, rotated, crops(), ANGLES, strict=True):
        assert (torch.from_numpy(np.array(image)) - exact(crop, 50, 50)).abs().max() < 0.502
        if max(crop.shape) <= 100:
            assert (torch.from_numpy(np.array(turned)) - rotation(crop, angle, 50, 50)).abs().max() < 0.51


def test_interpreted_code_is_left_to_dali(make_tree: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with loader(make_tree(12)) as plain:
        assert plain.fingerprint["resampled_by"] == "dali"


@pytest.mark.parametrize("augment", ["fc", "fcr"])
def test_crops_are_those_of_dalis_own_operators(make_tree: Make, monkeypatch: pytest.MonkeyPatch, augment: str) -> None:
    tree = make_tree(12)
    with loader(tree, augment=augment, size=24, mean=(0, 0, 0), std=(1 / 255,) * 3) as compiled:
        state, first = compiled.state_dict(), stream(compiled)
        assert compiled.fingerprint["resampled_by"] == "numba"
    monkeypatch.setattr(imagenet, "installed", lambda package: package != "numba" and checks.installed(package))
    monkeypatch.setattr(imagenet, "resample", None)
    with loader(tree, augment=augment, size=24, mean=(0, 0, 0), std=(1 / 255,) * 3) as plain:
        second = stream(plain)
        assert not equal(first, second)
        for left, right in zip(first, second, strict=True):
            assert torch.equal(left[1], right[1])
            assert (left[0] - right[0]).abs().mean() < 0.5  # grey levels
        with pytest.raises(ValueError, match="resampled_by was 'numba' when it was saved, is 'dali'"):
            plain.load_state_dict(state)
