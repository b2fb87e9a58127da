from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from imagenet_loaders import Make, equal, loader, stream
from nvidia.dali import fn, pipeline_def, types
from photographs import photographs

from fastmoll.kernels import checks
from fastmoll.pipelines import imagenet, resize

pytest.importorskip("numba")

SHAPES = ((224, 224), (224, 1), (1, 224), (1, 1), (2, 3), (17, 220), (97, 33), (33, 97), (223, 40), (64, 64))


def crops() -> list[np.ndarray]:
    images = photographs()
    return [np.ascontiguousarray(images[i, :height, :width]) for i, (height, width) in enumerate(SHAPES)]


def exact(crop: np.ndarray, height: int, width: int) -> torch.Tensor:
    """torchvision's resizing of float images, which rounds nothing; grey levels (H, W, 3)."""
    image = torch.from_numpy(crop).permute(2, 0, 1)[None].double()
    out = torch.nn.functional.interpolate(image, (height, width), mode="bilinear", antialias=True)
    return out[0].permute(1, 2, 0)


@pytest.mark.parametrize("height, width", [(64, 64), (1, 1), (7, 300), (224, 224), (255, 3)])
def test_pixels_are_torchvisions_rounded(height: int, width: int) -> None:
    from fastmoll.kernels.resize_numba import resize as resize_array

    for crop in crops():
        out = np.full((height, width, 3), 77, np.uint8)
        resize_array(crop, out)
        difference = torch.from_numpy(out) - exact(crop, height, width)
        assert difference.abs().max() < 0.502, crop.shape  # half a grey level, and float32 sums


@pytest.fixture(params=["as compiled by us", "as DALI documents it"])
def operator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    resize._operator.cache_clear()
    if request.param == "as DALI documents it":
        from nvidia.dali.plugin.numba import NumbaFunction

        own = NumbaFunction._get_run_fn_cpu, NumbaFunction._get_setup_fn_cpu
        called = []
        monkeypatch.setattr("fastmoll.kernels.resize_numba.RUN", None)
        monkeypatch.setattr("fastmoll.kernels.resize_numba.SETUP", None)
        for name, method in zip(("_get_run_fn_cpu", "_get_setup_fn_cpu"), own, strict=True):
            monkeypatch.setattr(NumbaFunction, name, lambda *a, m=method, **k: (called.append(m), m(*a, **k))[1])
        yield
        assert len(called) == 2
    else:
        yield
    resize._operator.cache_clear()


def test_dalis_operator_resizes_each_image_of_a_batch(operator: None) -> None:
    @pipeline_def(batch_size=len(SHAPES), num_threads=2, device_id=None, prefetch_queue_depth=1)
    def graph() -> Any:
        images = fn.external_source(lambda: crops(), layout="HWC", dtype=types.UINT8, ndim=3)
        return resize.resize_compiled(images, 50)

    pipeline = graph()
    (images,) = pipeline.run()
    assert images.layout() == "HWC"
    for image, crop in zip(images, crops(), strict=True):
        assert (torch.from_numpy(np.array(image)) - exact(crop, 50, 50)).abs().max() < 0.502


def test_crops_are_those_of_dalis_own_operator(make_tree: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(12)
    with loader(tree, size=24, mean=(0, 0, 0), std=(1 / 255,) * 3) as compiled:
        state, first = compiled.state_dict(), stream(compiled)
        assert compiled.fingerprint["resized_by"] == "numba"
    monkeypatch.setattr(imagenet, "installed", lambda package: package != "numba" and checks.installed(package))
    monkeypatch.setattr(imagenet, "resize_compiled", None)
    with loader(tree, size=24, mean=(0, 0, 0), std=(1 / 255,) * 3) as plain:
        second = stream(plain)
        assert not equal(first, second) or first[0][0].std() == 0
        for left, right in zip(first, second, strict=True):
            assert torch.equal(left[1], right[1])
            assert (left[0] - right[0]).abs().mean() < 0.5  # grey levels
        with pytest.raises(ValueError, match="resized_by was 'numba' when it was saved, is 'dali'"):
            plain.load_state_dict(state)
