"""Policies inside DALI graphs: each operation at each magnitude against torchvision, and what is drawn."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from test_image_ops import photographs, ties, torchvision

pytest.importorskip("nvidia.dali")

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.auto_aug.core import signed_bin
from PIL import Image

from fastmoll.pipelines import dali_policies, imagenet
from fastmoll.pipelines.files import scan_folder
from fastmoll.pipelines.policies import AUTO_AUGMENT, RAND_BIN, ranges
from fastmoll.pipelines.resample import resample

SIZE = 96
# Largest and mean difference in grey levels, at the worst magnitude; geometry but for ties of places.
APART = {
    "Identity": (0, 0.0),
    "TranslateX": (0, 0.0),
    "TranslateY": (0, 0.0),
    "Posterize": (0, 0.0),
    "Solarize": (0, 0.0),
    "Invert": (0, 0.0),
    "Brightness": (1, 0.65),
    "AutoContrast": (1, 0.65),
    "Sharpness": (1, 0.65),
    "Contrast": (3, 1.5),
    "Color": (3, 1.5),
    "Equalize": (30, 7.0),
    "ShearX": (0, 0.0),
    "ShearY": (0, 0.0),
    "Rotate": (0, 0.0),
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """DALI's own policies call operators by names that it deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run(graph: Callable[..., Any], inputs: dict[str, list[Any]], seed: int = 1) -> Any:
    """One batch of a graph of the nodes of ``inputs``."""

    @pipeline_def(enable_conditionals=True)
    def build() -> Any:
        nodes = {
            name: fn.external_source(name=name, layout="HWC" if values[0].ndim == 3 else None)
            for name, values in inputs.items()
        }
        return graph(**nodes)

    batch = len(next(iter(inputs.values())))
    pipeline = build(batch_size=batch, num_threads=1, device_id=None, seed=seed, prefetch_queue_depth=1)
    pipeline.build()
    for name, values in inputs.items():
        pipeline.feed_input(name, values)
    (out,) = pipeline.run()
    return np.stack([np.array(out[i]) for i in range(batch)])


@pytest.mark.parametrize("policy", ["rand", "auto", "trivial"])
def test_operations_are_torchvisions_within_stated_grey_levels(policy: str) -> None:
    images = photographs(SIZE, 2)
    for name, limits in ranges(policy, SIZE, SIZE).items():
        operation = dali_policies.operation(name, limits)
        bins = [0] if limits.magnitudes is None else range(len(limits.magnitudes))
        if policy == "rand":
            bins = [min(RAND_BIN, len(bins) - 1)]  # the only one that it draws
        cases = [(place, sign) for place in bins for sign in (range(2) if limits.signed else (0,))]
        inputs = {"images": [image.numpy() for _ in cases for image in images]}
        if limits.magnitudes is not None:
            inputs["place"] = [np.int32(place) for place, _ in cases for _ in images]
        if limits.signed:
            inputs["sign"] = [np.int32(sign) for _, sign in cases for _ in images]

        def graph(
            images: Any, place: Any = None, sign: Any = None, operation: Any = operation, limits: Any = limits
        ) -> Any:
            if limits.magnitudes is None:
                return operation(images)
            return operation(
                images,
                magnitude_bin=place if sign is None else signed_bin(place, random_sign=sign),
                num_magnitude_bins=len(limits.magnitudes),
                **dali_policies.GEOMETRY,
            )

        done = run(graph, inputs).reshape(len(cases), *images.shape)
        for (place, sign), found in zip(cases, done, strict=True):
            magnitude = 0.0 if limits.magnitudes is None else float(limits.magnitudes[place]) * (-1) ** sign
            apart = np.abs(found.astype(int) - torchvision(images, name, magnitude, False).numpy().astype(int))
            if name == "Sharpness":
                apart = apart[:, 1:-1, 1:-1]
            if name in ("ShearX", "ShearY", "Rotate"):
                apart = apart[:, ~ties(name, magnitude, SIZE, 1e-3)]
            most, mean = APART[name]
            assert apart.max() <= most and apart.mean() <= mean, (name, magnitude, apart.max(), apart.mean())


def test_trivialaugment_draws_operation_magnitude_and_sign_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each operation writes down what it was given, in place of an image.
    drawn = _recorded(monkeypatch, "trivial", 30_000)
    operation, parameter = drawn[:, 0].astype(int), drawn[:, 1]
    known = ranges("trivial", SIZE, SIZE)
    assert stats.chisquare(np.bincount(operation, minlength=len(known))).pvalue > 1e-3
    for number, limits in enumerate(known.values()):
        given = parameter[operation == number]
        if limits.magnitudes is None:
            continue
        values, counts = np.unique(limits.magnitudes.numpy(), return_counts=True)
        found = (np.abs(np.abs(given)[:, None] - values) < 1e-5).sum(0)
        assert found.sum() == len(given)
        assert stats.chisquare(found, counts / counts.sum() * len(given)).pvalue > 1e-3
        if limits.signed:
            assert stats.binomtest(int((given < 0).sum()), int((np.abs(given) > 0).sum())).pvalue > 1e-3


def test_randaugment_draws_two_operations_at_magnitude_nine(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _recorded(monkeypatch, "rand", 20_000)
    known = ranges("rand", SIZE, SIZE)
    first, second = drawn[:, 0].astype(int), drawn[:, 2].astype(int)
    assert stats.chisquare(np.bincount(first * len(known) + second, minlength=len(known) ** 2)).pvalue > 1e-3
    for number, limits in enumerate(known.values()):
        given = np.concatenate([drawn[first == number, 1], drawn[second == number, 3]])
        expected = 0.0 if limits.magnitudes is None else float(limits.magnitudes[RAND_BIN])
        assert np.allclose(np.abs(given), expected, atol=1e-5)
        if limits.signed:
            assert stats.binomtest(int((given < 0).sum()), len(given)).pvalue > 1e-3


def test_autoaugment_draws_torchvisions_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _recorded(monkeypatch, "auto", 20_000)
    names = list(ranges("auto", SIZE, SIZE))
    expected: dict[tuple[int, int], float] = {}
    for (one, p, _), (two, q, _) in AUTO_AUGMENT["imagenet"]:
        a, b = names.index(one), names.index(two)
        # What did not happen leaves no trace, so a lone operation stands first.
        for key, probability in (((a, b), p * q), ((a, -1), p * (1 - q)), ((b, -1), (1 - p) * q)):
            expected[key] = expected.get(key, 0.0) + probability / 25
        expected[(-1, -1)] = expected.get((-1, -1), 0.0) + (1 - p) * (1 - q) / 25
    counts = {key: 0 for key, probability in expected.items() if probability > 0}
    for a, b in drawn[:, [0, 2]].astype(int):
        counts[(a, b)] += 1
    assert stats.chisquare(list(counts.values()), [20_000 * expected[key] for key in counts]).pvalue > 1e-3


def _recorded(monkeypatch: pytest.MonkeyPatch, policy: str, samples: int) -> Any:
    """``(samples, 4)``: the number of the operation and its magnitude, of at most two; -1 for those there were not."""
    names = list(ranges(policy, SIZE, SIZE))

    def recorder(number: int) -> Any:
        def record(data: Any, parameter: Any) -> Any:
            entry = fn.cast(fn.reshape(parameter, shape=[1]), dtype=types.FLOAT) if number in sized else 0.0
            entry = fn.cat(types.Constant([float(number)]), entry) if number in sized else [float(number), 0.0]
            entry = entry if number in sized else types.Constant(np.float32(entry))
            return fn.slice(fn.cat(entry, data), start=[0], shape=[4], axes=[0])

        return record

    limits = ranges(policy, SIZE, SIZE)
    sized = {number for number, name in enumerate(names) if limits[name].magnitudes is not None}

    def operation(name: str, limits: Any) -> Any:
        from nvidia.dali.auto_aug.core import augmentation

        options: dict[str, Any] = {"name": name}
        if limits.magnitudes is not None:
            options |= {"mag_range": limits.magnitudes.numpy(), "randomly_negate": limits.signed}
        return augmentation(**options)(recorder(names.index(name)))

    monkeypatch.setattr(dali_policies, "operation", operation)
    monkeypatch.setattr(dali_policies, "GEOMETRY", {})
    drawn = run(dali_policies.policy(policy, SIZE), {"images": [np.full(4, -1, np.float32)] * samples}, 5)
    # The last operation stands first.
    later = drawn[:, 2] >= 0
    drawn[later] = drawn[later][:, [2, 3, 0, 1]]
    return drawn


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for number, image in enumerate(photographs(128, 4).numpy()):
        folder = tmp_path / "data" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[: 128 - 20 * number]).save(folder / f"{number}.png")
    return tmp_path / "data"


def config(augment: str, **more: Any) -> imagenet.GraphConfig:
    options = {"train": True, "batch_size": 4, "size": 64, "resize": 73, "augment": augment, "standardise": False}
    return imagenet.GraphConfig(**(options | {"device_id": None, "num_threads": 1, "prefetch": 1} | more))


def batch(tree: Path, options: imagenet.GraphConfig, batches: int = 1, checkpoint: bytes | None = None) -> Any:
    pipeline = imagenet.build(options, scan_folder(tree, "train"), seed=3, shuffle_seed=4, checkpoint=checkpoint)
    for _ in range(batches):
        out = pipeline.run()
    return np.array(out[0].as_tensor()), out, pipeline


@pytest.mark.parametrize("resampled", [imagenet._resample, resample])
@pytest.mark.parametrize("angle", [0.0, 15.0, -7.5])
@pytest.mark.parametrize("shape", [(64, 64), (80, 50), (50, 120), (300, 90)])
def test_crop_and_rotation_are_one_resampling(
    shape: tuple[int, int], angle: float, resampled: Callable[..., Any]
) -> None:
    whole = photographs(360, 1)[0].numpy()[40 : 40 + shape[0], 30 : 30 + shape[1]]
    smooth = ndimage.gaussian_filter(whole.astype(float), (3, 3, 0))
    image = smooth.round().astype(np.uint8)
    turn = functools.partial(types.Constant, np.float32(angle), device="cpu")
    done = run(lambda image: resampled(image, 64, turn()), {"image": [image]})[0].astype(float)
    i, j = np.meshgrid(np.arange(64) - 31.5, np.arange(64) - 31.5, indexing="ij")
    sine, cosine = np.sin(np.radians(angle)), np.cos(np.radians(angle))
    # Counter-clockwise: what is above the centre comes from its right.
    y, x = (sine * j + cosine * i + 32) * shape[0] / 64 - 0.5, (cosine * j - sine * i + 32) * shape[1] / 64 - 0.5
    inside = (y > 1) & (y < shape[0] - 2) & (x > 1) & (x < shape[1] - 2)
    expected = np.stack([ndimage.map_coordinates(image[..., c].astype(float), [y, x], order=1) for c in range(3)], 2)
    # Crops more than twice as large as the output go through a filter first; here it has little left to take away.
    limit = 1.0 if max(shape) <= 128 else 3.0
    assert np.abs(done - expected)[inside].mean() < limit
    # One pixel beyond the edge, of the image that is rotated.
    up, left = (max(1.0, length / 128) for length in shape)
    beyond = (y < -up) | (y > shape[0] - 1 + up) | (x < -left) | (x > shape[1] - 1 + left)
    assert not done[beyond].any() and (angle == 0) == (not beyond.any())


@pytest.mark.parametrize("augment", ["none", "fc", "fcr", "fc+trivial", "fcr+rand", "fcr+auto", "none+trivial"])
def test_every_graph_resumes_exactly(tree: Path, augment: str) -> None:
    options = config(augment)
    _, first, pipeline = batch(tree, options)
    state = pipeline.checkpoint()
    expected = pipeline.run()
    resumed = batch(tree, options, checkpoint=state)[1]
    assert all(np.array_equal(a.as_array(), b.as_array()) for a, b in zip(expected, resumed, strict=True))
    # Only what is flipped at all says which.
    assert len(first) == (2 if augment.startswith("none") else 3)


@pytest.mark.parametrize("augment", ["fc", "fcr"])
def test_a_policy_changes_images_and_a_base_without_one_keeps_the_crop(tree: Path, augment: str) -> None:
    plain = batch(tree, config(augment))[0]
    assert plain.shape == (4, 64, 64, 3) and plain.dtype == np.uint8
    assert not np.array_equal(batch(tree, config(f"{augment}+auto"))[0], plain)


def invert(images: Any) -> Any:
    return fn.cast(255 - images, dtype=types.UINT8)


def test_a_function_of_the_graph_comes_last(tree: Path) -> None:
    plain = batch(tree, config("none"))[0]
    inverted = batch(tree, config("none", dali_augment=invert))[0]
    assert np.array_equal(inverted, 255 - plain)
    evaluation = dataclasses.replace(config("fc", dali_augment=invert), train=False)
    assert sorted(batch(tree, evaluation)[0].sum((1, 2, 3))) == sorted(plain.sum((1, 2, 3)))


def taller(images: Any) -> Any:
    return fn.resize(images, size=[65, 64])


def any_size(images: Any) -> Any:
    return fn.resize(images, size=fn.random.uniform(range=[8, 60]))


def negative(images: Any) -> Any:
    return 255 - images


def channels_first(images: Any) -> Any:
    return fn.transpose(images, perm=[2, 0, 1])


def grey(images: Any) -> Any:
    return fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)


def flat(images: Any) -> Any:
    return fn.reshape(images, shape=[64, -1])


def no_node(images: Any) -> Any:
    return [images]


def failing(images: Any) -> Any:
    return fn.crop(images, crop=(80, 80))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (taller, r"uint8 HWC images of 64 x 64 pixels, as it gets, got uint8 HWC of shape \(65, 64, 3\)$"),
        (any_size, r"as it gets, got uint8 HWC of shape \(\d\d?, \d\d?, 3\)$"),
        (negative, r"as it gets, got int32 HWC of shape \(64, 64, 3\); fn.cast\(images, dtype=types.UINT8\) "),
        (channels_first, r"as it gets, got uint8 CHW of shape \(3, 64, 64\)$"),
        (grey, r"as it gets, got uint8 HWC of shape \(64, 64, 1\)$"),
        (flat, r"as it gets, got uint8 .*of shape \(64, 192\)$"),
        (no_node, r"dali_augment must give a node of the graph, got \["),
        (failing, r"dali_augment fails: "),
    ],
)
@pytest.mark.parametrize("standardise", [False, True])
def test_a_function_of_the_graph_gives_what_it_gets(
    tree: Path, standardise: bool, function: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        batch(tree, config("fc", dali_augment=function, standardise=standardise))


@pytest.mark.gpu
@pytest.mark.parametrize("augment", ["fcr", "fc+trivial", "fcr+rand", "fcr+auto"])
def test_a_gpu_graph_gives_what_the_cpu_graph_gives(tree: Path, augment: str) -> None:
    on_cpu = batch(tree, config(augment))[0].astype(int)
    pipeline = imagenet.build(config(augment, device_id=0), scan_folder(tree, "train"), seed=3, shuffle_seed=4)
    on_gpu = np.array(pipeline.run()[0].as_cpu().as_tensor()).astype(int)
    assert np.abs(on_gpu - on_cpu).mean() < 3
    torch.cuda.synchronize()
