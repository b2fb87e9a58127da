"""The batch tail against its definition in float64: in plain torch and in Triton, interpreted if there is no GPU."""

import math

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn

from fastmoll.kernels import batch_tail_torch as torch_module
from fastmoll.kernels import mollify_cpu
from fastmoll.kernels.batch_tail import batch_tail, check_tail
from fastmoll.kernels.batch_tail_torch import batch_tail_torch
from fastmoll.kernels.cosine_noise import cosine_noise

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    # The interpreter multiplies what it read past the last row and column too.
    pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

CLEAN, NOISE, BLUR, PURE = range(4)
ROLES = [CLEAN, NOISE, BLUR, PURE, BLUR, NOISE, BLUR]
LEVELS = [0.0, 0.3, 0.0, 0.2, 0.35, 0.95, 0.9]
KEY = {"seed": 2**63 + 2**31 + 5, "epoch": 2**24 - 1}

# Relative error (root mean square) that is allowed; the interpreter cuts bfloat16 off where a card rounds it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3 if DEVICE == "cuda" else 8e-3}


def definition(
    images, role, t, index, mean=None, std=None, flip=None, partner=None, lam=None, box=None,
    seed=0, epoch=0, sigma_min=0.3, sigma_max=None,
):  # fmt: skip
    """Image by image, in float64 NumPy."""
    x = images.double().numpy()
    if images.dtype == torch.uint8:
        x = x.transpose(0, 3, 1, 2) / 255
    height, width = x.shape[2:]
    if mean is not None:
        x = (x - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1))
    if flip is not None:
        x = np.stack([image[:, :, ::-1] if mirror else image for image, mirror in zip(x, flip, strict=True)])
    mixed = x.copy()
    for i in range(len(x)):
        if lam is not None:
            weight = float(lam[i])
            mixed[i] = weight * x[i] + (1 - weight) * x[partner[i]]
        if box is not None:
            y0, y1, x0, x1 = box[i].tolist()
            mixed[i, :, y0:y1, x0:x1] = x[partner[i], :, y0:y1, x0:x1]
    out = mixed.copy()
    for i, (kind, level) in enumerate(zip(role.tolist(), t.tolist(), strict=True)):
        if kind in (NOISE, PURE):
            level = torch.tensor([1.0 if kind == PURE else level], dtype=torch.float64)
            noised = cosine_noise(
                torch.from_numpy(mixed[i : i + 1]), level, seed=seed, epoch=epoch, index=index[i, None]
            )
            out[i] = noised[0].numpy()
        if kind == BLUR:
            sigma = math.exp((1 - level) * math.log(sigma_min) + level * math.log(sigma_max or width))
            h, w = np.arange(height)[:, None], np.arange(width)
            decay = np.exp(-0.5 * sigma**2 * np.pi**2 * (w**2 / width**2 + h**2 / height**2))
            out[i] = idctn(decay * dctn(mixed[i], axes=(1, 2), norm="ortho"), axes=(1, 2), norm="ortho")
    return torch.from_numpy(out)


def batch(height, width, channels=None, mix=None, flip=True, size=7):
    """Images and arguments of a mixed batch: uint8, or floating point if ``channels`` are given."""
    random = torch.Generator().manual_seed(height * 1000 + width)
    arguments = {
        "role": torch.tensor(ROLES * 9, dtype=torch.int8)[:size],
        "t": torch.tensor(LEVELS * 9)[:size],
        "index": torch.randint(0, 2**48, (size,), generator=random),
    }
    if channels is None:
        images = torch.randint(0, 256, (size, height, width, 3), dtype=torch.uint8, generator=random)
        arguments |= {"mean": MEAN, "std": STD}
    else:
        # With a mean, as images have: nothing but that is left of a strong blur.
        images = torch.randn(size, channels, height, width, generator=random) + 0.5
    if flip:
        arguments["flip"] = torch.arange(size) % 3 != 0
    if mix is not None:
        arguments["partner"] = torch.randperm(size, generator=random)
    if mix == "mixup":
        arguments["lam"] = torch.rand(size, generator=random)
    if mix == "cutmix":
        ends = [torch.randint(0, n + 1, (size, 2), generator=random).sort(1)[0] for n in (height, width)]
        arguments["box"] = torch.cat(ends, 1).int()
    return images, arguments


def on_device(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


NAMES = ("mean", "std", "flip", "partner", "lam", "box", "role", "t", "index", "sigma_max")
FLOAT = {"dtype": torch.float32, "memory_format": torch.channels_last}


def checked(images, memory_format, dtype, **arguments):
    """The arguments as a backend gets them, on the device."""
    arguments = dict.fromkeys(NAMES) | {"seed": 0, "epoch": 0, "sigma_min": 0.3} | arguments
    arguments = {name: on_device(value) for name, value in arguments.items()}
    return check_tail(images.to(DEVICE), dtype=dtype, memory_format=memory_format, **arguments)


def triton_tail(images, memory_format=torch.channels_last, dtype=torch.float32, **arguments):
    """Run the Triton backend into an output of NaN, so that an element nobody writes shows."""
    from fastmoll.kernels.batch_tail_triton import batch_tail_triton

    tail = checked(images, memory_format, dtype, **arguments)
    shape = (tail.batch, tail.channels, tail.height, tail.width)
    out = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE).contiguous(memory_format=memory_format)
    assert batch_tail_triton(tail, out) is out
    return out.cpu()


def assert_close(result, exact, tolerance):
    """Each image on its own: a relative error over the batch would hide the images of low contrast."""
    assert result.isfinite().all()
    for i, (one, want) in enumerate(zip(result.double(), exact, strict=True)):
        error = ((one - want).norm() / want.norm()).item()
        assert error < tolerance, f"image {i}: relative error {error:.2e}"


SHAPES = [(1, 1), (1, 37), (37, 1), (9, 13), (32, 32), (33, 70), (65, 64)]


@pytest.mark.parametrize("mix", [None, "mixup", "cutmix"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (9, 13), (32, 32)])
def test_the_reference_is_the_definition(height, width, mix):
    images, arguments = batch(height, width, mix=mix)
    tail = checked(images, torch.channels_last, torch.float32, **arguments, **KEY)
    assert_close(batch_tail_torch(tail).cpu(), definition(images, **arguments, **KEY), 2e-6)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("mix", [None, "mixup", "cutmix"])
@pytest.mark.parametrize("channels", [None, 2])
def test_the_compiled_cpu_path_is_the_definition_and_leaves_the_images_alone(channels, mix, memory_format, monkeypatch):
    pytest.importorskip("numba")
    calls = []
    run = mollify_cpu.mollify_cpu
    monkeypatch.setattr(mollify_cpu, "mollify_cpu", lambda *args, **more: calls.append(1) or run(*args, **more))
    for height, width in ((1, 1), (9, 13), (40, 70)):
        images, arguments = batch(height, width, channels, mix)
        before = images.clone()
        more = {"dtype": torch.float32, "memory_format": memory_format}
        result = batch_tail(images, **arguments, **KEY, **more, backend="torch")
        assert result.is_contiguous(memory_format=memory_format)
        assert torch.equal(images, before)
        torch.testing.assert_close(result.double(), definition(images, **arguments, **KEY), atol=2e-5, rtol=0)
    assert len(calls) == 3


def test_without_numba_the_definition_runs(monkeypatch):
    images, arguments = batch(9, 13)
    tail = check_tail(images, **dict.fromkeys(NAMES) | {"sigma_min": 0.3} | arguments, **KEY, **FLOAT)
    expected = batch_tail_torch(tail)
    monkeypatch.setattr(torch_module, "installed", lambda package: False)
    assert torch.equal(batch_tail_torch(tail, compiled=True), expected)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_triton_is_the_definition_at_any_size(height, width, memory_format):
    images, arguments = batch(height, width)
    result = triton_tail(images, memory_format, **arguments, **KEY)
    assert_close(result, definition(images, **arguments, **KEY), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("height", "width", "dtype"),
    [
        (1, 1, torch.float16),
        (1, 37, torch.bfloat16),
        (9, 13, torch.bfloat16),
        (32, 32, torch.float16),
        (33, 70, torch.float16),
        (65, 64, torch.bfloat16),
    ],
)
def test_triton_in_half_precision_is_within_its_rounding(height, width, dtype):
    images, arguments = batch(height, width)
    result = triton_tail(images, dtype=dtype, **arguments, **KEY)
    assert result.dtype == dtype
    assert_close(result, definition(images, **arguments, **KEY), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("flip", "dtype", "memory_format"),
    [
        (True, torch.float32, torch.channels_last),
        (False, torch.float32, torch.contiguous_format),
        (True, torch.float16, torch.channels_last),
    ],
)
@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_triton_mixes_like_the_definition(mix, flip, dtype, memory_format):
    images, arguments = batch(14, 19, mix=mix, flip=flip)
    result = triton_tail(images, memory_format, dtype, **arguments, **KEY)
    assert_close(result, definition(images, **arguments, **KEY), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("channels", "mix", "memory_format"),
    [
        (1, None, torch.channels_last),
        (2, "mixup", torch.contiguous_format),
        (3, "cutmix", torch.channels_last),
        (3, "mixup", torch.contiguous_format),
        (5, None, torch.channels_last),
    ],
)
def test_triton_takes_floating_point_images_of_any_channels_and_strides(channels, mix, memory_format):
    images, arguments = batch(10, 16, channels=channels, mix=mix)
    exact = definition(images, **arguments, **KEY)
    wide = torch.randn(len(images), channels, 10, 33)
    wide[..., 1::2] = images
    for x in (images, images.contiguous(memory_format=torch.channels_last), wide[..., 1::2]):
        assert_close(triton_tail(x, memory_format, **arguments, **KEY), exact, TOLERANCE[torch.float32])
    half = triton_tail(images, memory_format, torch.float16, **arguments, **KEY)
    assert_close(half, exact, TOLERANCE[torch.float16])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triton_takes_images_in_half_precision(dtype):
    images, arguments = batch(12, 20, channels=3)
    images = images.to(dtype)
    assert_close(triton_tail(images, **arguments, **KEY), definition(images, **arguments, **KEY), 2e-6)


def test_triton_takes_pixels_of_any_strides():
    images, arguments = batch(16, 24)
    frame = torch.randint(0, 256, (len(images), 20, 40, 4), dtype=torch.uint8)
    frame[:, 2:18, 5:29, 1:] = images
    planes = images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    expected = triton_tail(images, **arguments, **KEY)
    for x in (frame[:, 2:18, 5:29, 1:], planes):
        assert not x.is_contiguous()
        assert torch.equal(triton_tail(x, **arguments, **KEY), expected)


@pytest.mark.skipif(DEVICE != "cpu", reason="needs memory that is never touched")
def test_triton_reads_images_farther_apart_than_32_bits_reach():
    images, arguments = batch(6, 7, size=3)
    memory = torch.empty(2 * 2**32 + images[0].numel(), dtype=torch.uint8)
    far = memory.as_strided(images.shape, (2**32, *images.stride()[1:]))
    far.copy_(images)
    assert torch.equal(triton_tail(far, **arguments), triton_tail(images, **arguments))


def test_triton_blurs_by_every_scale_in_several_blocks():
    # The bands of the sharper half end inside: their products leave out whole blocks.
    images, arguments = batch(200, 70, size=4)
    arguments["role"] = torch.full((4,), BLUR, dtype=torch.int8)
    arguments["t"] = torch.tensor([0.0, 0.2, 0.5, 1.0])
    result = triton_tail(images, dtype=torch.float16, **arguments)
    assert_close(result, definition(images, **arguments), TOLERANCE[torch.float16])


@pytest.mark.parametrize(("low", "high"), [(1e-30, 1e-6), (5.0, 5.0), (0.2, 1e30)])
def test_triton_takes_any_blur_scales(low, high):
    images, arguments = batch(18, 30)
    result = triton_tail(images, sigma_min=low, sigma_max=high, **arguments)
    assert_close(result, definition(images, sigma_min=low, sigma_max=high, **arguments), TOLERANCE[torch.float32])


def test_triton_draws_the_noise_of_the_definition_to_a_hundred_thousandth():
    images, arguments = batch(40, 41)
    arguments["role"] = torch.full((7,), PURE, dtype=torch.int8)
    result = triton_tail(images, **arguments, **KEY)
    difference = (result.double() - definition(images, **arguments, **KEY)).abs()
    assert difference.max() < 1e-5


def test_an_image_does_not_depend_on_its_batch():
    images, arguments = batch(9, 21)
    together = triton_tail(images, **arguments, **KEY)
    for chosen in ([2], [6, 4, 1], [3, 0, 5]):
        some = {name: x[chosen] if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        assert torch.equal(triton_tail(images[chosen], **some, **KEY), together[chosen])


def test_without_roles_nothing_is_mollified():
    images, arguments = batch(11, 17, mix="mixup")
    for name in ("role", "t", "index"):
        del arguments[name]
    clean = {"role": torch.zeros(7, dtype=torch.int8), "t": torch.zeros(7), "index": torch.arange(7)}
    exact = definition(images, **arguments, **clean)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        assert_close(triton_tail(images, memory_format, **arguments), exact, 1e-6)
        plain = batch_tail(images, **arguments, dtype=torch.float32, memory_format=memory_format, backend="torch")
        assert_close(plain, exact, 1e-6)
        assert plain.is_contiguous(memory_format=memory_format)


def test_a_partner_outside_the_batch_reads_nothing_outside_it():
    # Put in after the checks, which do not look at values on a GPU.
    images, arguments = batch(8, 8, mix="mixup")
    arguments = {name: on_device(value) for name, value in arguments.items()}
    from fastmoll.kernels.batch_tail_triton import batch_tail_triton

    names = ("box", "sigma_max")
    good = check_tail(
        images.to(DEVICE), **arguments, **dict.fromkeys(names), **KEY, sigma_min=0.3,
        dtype=torch.float32, memory_format=torch.channels_last,
    )  # fmt: skip
    good.partner[:] = torch.tensor([-1, 7, 2**40, 0, -(2**62), 6, 3])
    result = batch_tail_triton(good)
    good.partner.clamp_(0, 6)
    assert torch.equal(result, batch_tail_triton(good))


def test_ids_default_to_the_position_in_the_batch():
    images, arguments = batch(8, 8)
    arguments["index"] = None
    result = batch_tail(images, **arguments, backend="torch")
    arguments["index"] = torch.arange(len(images))
    assert torch.equal(batch_tail(images, **arguments, backend="torch"), result)


def test_the_input_is_not_written_to():
    images, arguments = batch(8, 8, channels=3, mix="mixup")
    before = images.clone()
    for backend in ("torch", "triton") if DEVICE == "cpu" else ("torch",):
        batch_tail(images, **arguments, backend=backend)
        assert torch.equal(images, before)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton", "cupy"])
@pytest.mark.parametrize("images", [torch.empty(0, 8, 9, 3, dtype=torch.uint8), torch.empty(0, 3, 8, 9)])
def test_an_empty_batch_gives_an_empty_batch(images, backend):
    role, t = torch.empty(0, dtype=torch.int8), torch.empty(0)
    result = batch_tail(images, mean=MEAN, std=STD, role=role, t=t, backend=backend)
    assert result.shape == (0, 3, 8, 9)
    assert result.dtype == torch.bfloat16


def test_auto_leaves_cpu_tensors_to_torch():
    images, arguments = batch(8, 8)
    assert torch.equal(batch_tail(images, **arguments), batch_tail(images, **arguments, backend="torch"))


PIXELS, FLOATS = torch.zeros(2, 4, 6, 3, dtype=torch.uint8), torch.zeros(2, 3, 4, 6)
ROLE, T, PARTNER = torch.zeros(2, dtype=torch.int8), torch.zeros(2), torch.tensor([1, 0])
STANDARD = {"mean": MEAN, "std": STD}


@pytest.mark.parametrize(
    ("images", "arguments", "message"),
    [
        ([1.0], {}, "images must be a torch.Tensor, got list"),
        (PIXELS[0], STANDARD, r"images must have shape \(B, H, W, 3\), got \(4, 6, 3\)"),
        (PIXELS[..., :1], STANDARD, r"images must have shape .* got \(2, 4, 6, 1\)"),
        (PIXELS[:, :0], STANDARD, r"images must have at least one row .* got shape \(2, 0, 6, 3\)"),
        (PIXELS.int(), STANDARD, "images must be floating point, got torch.int32"),
        (FLOATS.double(), {}, "images must be .* got torch.float64"),
        (FLOATS[0], {}, r"images must have shape .* got \(3, 4, 6\)"),
        (FLOATS.clone().requires_grad_(), {}, "images must not require grad"),
        (PIXELS, {}, "mean must be given for uint8 images .* got None"),
        (PIXELS, {"mean": MEAN}, "std must be given .* got None"),
        (FLOATS, {"std": STD}, "mean must be given .* got None"),
        (FLOATS, {"mean": 0.5, "std": 0.5}, "mean must have one number for each of 3 channels, got 0.5"),
        (FLOATS[:, :2], STANDARD, r"mean must have one number for each of 2 channels, got \(0.485"),
        (FLOATS, {"mean": MEAN, "std": (1, 0, 1)}, r"std\[1\] must be a finite number above 0.0, got 0"),
        (FLOATS, {"mean": (math.nan, 0, 0), "std": STD}, r"mean\[0\] must be a finite number, got nan"),
        (FLOATS, {"flip": T}, "flip must be torch.bool, got torch.float32"),
        (FLOATS, {"flip": torch.zeros(3, dtype=torch.bool)}, r"flip must have shape \(2\), got \(3,\)"),
        (FLOATS, {"partner": PARTNER}, "partner must be given with exactly one of lam and box, got partner"),
        (FLOATS, {"lam": T}, "partner must be given with exactly one of lam and box, got lam"),
        (FLOATS, {"partner": PARTNER + 1, "lam": T}, r"partner must lie in \[0, 2\), got 2 at position 0"),
        (FLOATS, {"partner": PARTNER - 1, "lam": T}, r"partner must lie in \[0, 2\), got -1 at position 1"),
        (FLOATS, {"partner": PARTNER.int(), "lam": T}, "partner must be torch.int64, got torch.int32"),
        (FLOATS, {"partner": PARTNER, "lam": T + 1.5}, r"lam must lie in \[0, 1\], got 1.5 at position 0"),
        (FLOATS, {"partner": PARTNER, "lam": T * math.nan}, r"lam must lie in \[0, 1\], got nan"),
        (FLOATS, {"partner": PARTNER, "lam": T.double()}, "lam must be torch.float32, got torch.float64"),
        (
            FLOATS,
            {"partner": PARTNER, "box": torch.tensor([[0, 4, 0, 6], [0, 5, 0, 6]], dtype=torch.int32)},
            r"box must be .* inside 4 x 6 pixels, got 0 at position \(1, 0\)",
        ),
        (
            FLOATS,
            {"partner": PARTNER, "box": torch.tensor([[0, 4, 0, 6], [0, 4, 3, 2]], dtype=torch.int32)},
            r"box must be y0 <= y1, x0 <= x1 .* got 3 at position \(1, 2\)",
        ),
        (FLOATS, {"partner": PARTNER, "box": torch.zeros(2, 3, dtype=torch.int32)}, r"box must have shape \(2, 4\)"),
        (FLOATS, {"role": ROLE}, "role and t must be given together, got role alone"),
        (FLOATS, {"t": T}, "role and t must be given together, got t alone"),
        (FLOATS, {"role": ROLE + 4, "t": T}, r"role must lie in \[0, 3\], got 4 at position 0"),
        (FLOATS, {"role": ROLE, "t": T + 1.5}, r"t must lie in \[0, 1\], got 1.5"),
        (FLOATS, {"role": ROLE.long(), "t": T}, "role must be torch.int8, got torch.int64"),
        (FLOATS, {"role": ROLE, "t": T, "index": PARTNER - 1}, "index must lie in .* got -1 at position 1"),
        (FLOATS, {"role": ROLE, "t": T.to("meta")}, "t must be on cpu .* got meta"),
        (FLOATS, {"seed": -1}, "seed must be an integer .* got -1"),
        (FLOATS, {"epoch": 2**24}, "epoch must be an integer .* got 16777216"),
        (FLOATS, {"sigma_min": 0.0}, "sigma_min .* got 0.0"),
        (FLOATS, {"sigma_max": 0.1}, "sigma_max .* got 0.1"),
        (FLOATS, {"dtype": torch.float64}, "dtype must be .* got torch.float64"),
        (FLOATS, {"memory_format": torch.preserve_format}, "memory_format must be .* got torch.preserve_format"),
        (FLOATS, {"backend": "numpy"}, "backend must be .* got 'numpy'"),
        (torch.zeros(1, 1, 1, 513), {"backend": "triton"}, "images must be at most 512 .* 'triton', got 1 x 513"),
        (torch.zeros(1, 1, 513, 1), {"backend": "cupy"}, "images must be at most 512 .* 'cupy', got 513 x 1"),
    ],
)
def test_bad_arguments_are_named(images, arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_tail(images, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [None, "mixup", "cutmix"])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_gives_the_definition_without_waiting(dtype, memory_format, mix):
    images, arguments = batch(224, 224, mix=mix, size=14)
    exact = definition(images, **arguments, **KEY)
    gpu = {name: on_device(value) for name, value in arguments.items()} | KEY
    gpu |= {"dtype": dtype, "memory_format": memory_format}
    pixels = images.cuda()
    batch_tail(pixels, **gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = batch_tail(pixels, **gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.is_contiguous(memory_format=memory_format)
    assert_close(result.cpu(), exact, {torch.float32: 1e-5}.get(dtype, TOLERANCE[dtype]))
