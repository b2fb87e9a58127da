"""`fastmoll.corruptions.corrupt`: what holds for all fifteen corruptions."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from photographs import figures, photographs
from torch import Tensor

from fastmoll.corruptions import CORRUPTIONS, GROUPS, SEVERITIES, corrupt
from fastmoll.kernels.checks import installed

# The others are functions of the picture.
DRAWN = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur"),
    *("snow", "frost", "fog", "elastic_transform"),
)


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Eight photographs, 48 pixels high and 64 wide."""
    return torch.from_numpy(photographs(64)[::3, 8:56]).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_cell_makes_pictures_of_the_same_kind_and_leaves_its_input(name: str, images: Tensor) -> None:
    before = images.clone()
    for severity in SEVERITIES:
        out = corrupt(images, name, severity)
        assert (out.shape, out.dtype, out.is_contiguous()) == (images.shape, torch.uint8, True)
        assert torch.equal(images, before)
        assert (out != images).flatten(1).any(1).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_picture_depends_on_its_sample_alone(name: str, images: Tensor) -> None:
    index = torch.tensor([5, 2**40, 0, 17, 3, 99, 8, 2**48 - 1])[: len(images)]
    whole = corrupt(images, name, 3, seed=11, index=index)
    order = torch.tensor([4, 1, 6])
    # Channels-last memory, another batch, another order, ids of another type.
    other = images[order].contiguous(memory_format=torch.channels_last)
    assert torch.equal(corrupt(other, name, 3, seed=11, index=index[order]), whole[order])
    alone = corrupt(images[2:3], name, 3, seed=11, index=index[2:3].int())
    assert torch.equal(alone[0], whole[2])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_how_pictures_lie_in_memory_is_not_seen(name: str, images: Tensor) -> None:
    index = torch.tensor([[7, 0], [2**40, 0]])[:, 0]  # not contiguous either
    views = {
        "part of an array": images[:2, :, 3:36, 7:54],  # 33 x 47 pixels
        "every second": images[::5, :, ::2, 1::2],
        "turned": images[:2, :, :20].transpose(2, 3),
        "height, width, channel": images[:2, :, :20].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        "one channel thrice": images[:2, :1, :20].expand(-1, 3, -1, -1),
    }
    for what, view in views.items():
        plain = corrupt(view.contiguous().clone(), name, 4, index=index.clone())
        assert torch.equal(corrupt(view, name, 4, index=index), plain), what


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seed_sample_and_severity_decide_what_is_drawn(name: str, images: Tensor) -> None:
    same = images[:1].expand(2, -1, -1, -1)
    first, second = corrupt(same, name, 4, seed=1, index=torch.tensor([0, 1]))
    other = corrupt(same[:1], name, 4, seed=2, index=torch.tensor([0]))[0]
    assert torch.equal(first, second) is (name not in DRAWN)
    assert torch.equal(first, other) is (name not in DRAWN)


def test_ids_count_from_zero_by_default(images: Tensor) -> None:
    counted = corrupt(images, "gaussian_noise", 1, index=torch.arange(len(images)))
    assert torch.equal(corrupt(images, "gaussian_noise", 1), counted)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_threads_do_not_change_pictures(name: str) -> None:
    pictures = torch.from_numpy(photographs()[:4]).permute(0, 3, 1, 2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = corrupt(pictures, name, 2)
        torch.set_num_threads(3)
        assert torch.equal(corrupt(pictures, name, 2), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("shape", [(0, 3, 32, 32), (1, 3, 8, 40), (2, 3, 33, 17)])
def test_odd_sizes_and_empty_batches_pass(name: str, shape: tuple[int, ...]) -> None:
    assert corrupt(torch.full(shape, 100, dtype=torch.uint8), name, 5).shape == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(2, 3, 8, 8)}, "images must be torch.uint8, got torch.float32"),
        ({"images": torch.zeros(2, 8, 8, 3, dtype=torch.uint8)}, r"images must have shape .*got \(2, 8, 8, 3\)"),
        ({"images": torch.zeros(3, 8, 8, dtype=torch.uint8)}, r"images must have shape .*got \(3, 8, 8\)"),
        ({"images": torch.zeros(2, 3, 0, 8, dtype=torch.uint8)}, "height of images must be .*got 0"),
        ({"images": np.zeros((2, 3, 8, 8), np.uint8)}, "images must be a torch.Tensor, got ndarray"),
        ({"corruption": "gausian_noise"}, "got 'gausian_noise'; did you mean gaussian_noise"),
        ({"corruption": "jpeg"}, "got 'jpeg'; did you mean jpeg_compression"),
        ({"corruption": "speckle_noise"}, "corruption must be one of gaussian_noise, .*got 'speckle_noise'"),
        ({"severity": 0}, "severity must be .*got 0"),
        ({"severity": 6}, "severity must be .*got 6"),
        ({"severity": 2.5}, "severity must be .*got 2.5"),
        ({"seed": -1}, "seed must be .*got -1"),
        ({"index": torch.tensor([0])}, r"index must have shape \(2\), got \(1,\)"),
        ({"index": torch.tensor([0, -3])}, "index must .*got -3 at position 1"),
        ({"index": torch.tensor([0.0, 1.0])}, "index must be .*got torch.float32"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "images": torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
        "corruption": "fog",
        "severity": 1,
        "seed": 0,
        "index": torch.tensor([0, 1]),
    }
    with pytest.raises(ValueError, match=message):
        corrupt(**{**good, **change})


def test_another_process_makes_the_same_pictures_and_loads_nothing_before_it_must(images: Tensor) -> None:
    script = """
import sys, torch
from fastmoll.corruptions import corrupt
assert not {"numba", "triton", "nvidia.dali", "fastmoll.kernels.corrupt_noise"} & set(sys.modules)
x = torch.arange(3 * 32 * 32).remainder(251).to(torch.uint8).view(1, 3, 32, 32)
names = "gaussian_noise", "shot_noise", "elastic_transform"
print(*(int((corrupt(x, n, 5, seed=3).long().flatten() * torch.arange(3072)).sum()) for n in names))
"""
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    x = torch.arange(3 * 32 * 32).remainder(251).to(torch.uint8).view(1, 3, 32, 32)
    names = "gaussian_noise", "shot_noise", "elastic_transform"
    here = [int((corrupt(x, n, 5, seed=3).long().flatten() * torch.arange(3072)).sum()) for n in names]
    assert [int(number) for number in there] == here


@pytest.mark.skipif(not installed("imagecorruptions"), reason="imagecorruptions-imaug is not installed")
@pytest.mark.parametrize("name", [n for n in CORRUPTIONS if n not in ("elastic_transform", "frost")])
def test_pictures_are_the_published_generators_in_mean_and_change(name: str) -> None:
    theirs: Callable[..., Any] = importlib.import_module("imagecorruptions").corrupt
    np.random.seed(0)
    # Few pictures where it takes a tenth of a second for one; many where all of a picture hangs on one draw.
    clean = photographs()[::5] if name == "zoom_blur" else np.repeat(photographs(), 8 if name == "fog" else 1, 0)
    x = torch.from_numpy(clean).permute(0, 3, 1, 2).contiguous()
    for severity in (1, 5):
        there = np.stack([theirs(picture, corruption_name=name, severity=severity) for picture in clean])
        here = corrupt(x, name, severity).permute(0, 2, 3, 1).numpy()
        limit = 4.0 if name == "fog" else 1.5
        assert figures(clean, here) == pytest.approx(figures(clean, there), abs=limit)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_gpu_makes_the_pictures_of_the_cpu_and_never_waits(name: str) -> None:
    pictures = torch.from_numpy(photographs()).permute(0, 3, 1, 2).contiguous()
    index = torch.arange(len(pictures)) + 2**33
    there, index_there = pictures.cuda(), index.cuda()
    for severity in SEVERITIES:
        corrupt(there, name, severity, seed=9, index=index_there)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = corrupt(there, name, severity, seed=9, index=index_there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        apart = (out.cpu().int() - corrupt(pictures, name, severity, seed=9, index=index).int()).abs()
        # A level where float32 sums lie on both sides of a whole number.
        assert (apart > 1).sum() <= 1e-5 * apart.numel()
        assert (apart > 0).float().mean() < 0.01


def test_groups_hold_all_names() -> None:
    assert tuple(name for names in GROUPS.values() for name in names) == CORRUPTIONS
