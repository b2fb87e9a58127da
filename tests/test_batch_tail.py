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
from fastmoll.kernels.checks import installed
from fastmoll.kernels.cosine_noise import cosine_noise

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter", "nan_memory"),
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
        arguments["partner"][2] = 2
    if mix == "mixup":
        arguments["lam"] = torch.rand(size, generator=random)
        arguments["lam"][3:5] = torch.tensor([0.0, 1.0])
    if mix == "cutmix":
        ends = [torch.randint(0, n + 1, (size, 2), generator=random).sort(1)[0] for n in (height, width)]
        # Then all of the image, its last pixel, nothing in the last corner.
        h, w = height, width
        edges = [[0, h, 0, w], [h - 1, h, w - 1, w], [h, h, w, w]]
        arguments["box"] = torch.cat((torch.cat(ends, 1)[:-3], torch.tensor(edges))).int()
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
    """Run the Triton backend into an output of NaN, so that an element nobody writes shows; ``nan_memory`` sees to all
    that lies between."""
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


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_pixel_that_is_no_number_is_none_in_any_role_nor_backend(value):
    x = torch.randn(4, 3, 9, 8)
    x[:, 1, 2, 3] = value
    arguments = {"role": torch.tensor([CLEAN, NOISE, BLUR, PURE], dtype=torch.int8), "t": torch.full((4,), 0.5)}
    tail = checked(x, torch.channels_last, torch.float32, **arguments, index=torch.arange(4))
    results = [batch_tail_torch(tail, compiled=compiled).cpu() for compiled in (False, True)]
    for result in (*results, triton_tail(x, **arguments, index=torch.arange(4))):
        assert not result[:, 1, 2, 3].isfinite().any()
        assert result[[0, 1, 3], 0].isfinite().all()


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


@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_triton_takes_parameters_of_any_strides(mix):
    images, arguments = batch(7, 9, mix=mix)
    apart = {
        name: value.repeat_interleave(2, 0)[::2] if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    assert torch.equal(triton_tail(images, **apart, **KEY), triton_tail(images, **arguments, **KEY))


@pytest.mark.parametrize(
    ("height", "width", "levels"), [(200, 70, [0.0, 0.2, 0.5, 1.0]), (512, 2, [0.9]), (2, 512, [0.5])]
)
def test_triton_blurs_by_every_scale_in_several_blocks(height, width, levels):
    # The bands of the sharper half end inside: their products leave out whole blocks.
    images, arguments = batch(height, width, size=len(levels))
    arguments["role"] = torch.full((len(levels),), BLUR, dtype=torch.int8)
    arguments["t"] = torch.tensor(levels)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_partner_outside_the_batch_reads_nothing_outside_it(dtype):
    # Put in after the checks, which do not look at values on a GPU.
    images, arguments = batch(8, 8, mix="mixup")
    arguments = {name: on_device(value) for name, value in arguments.items()}
    from fastmoll.kernels.batch_tail_triton import batch_tail_triton

    names = ("box", "sigma_max")
    good = check_tail(
        images.to(DEVICE), **arguments, **dict.fromkeys(names), **KEY, sigma_min=0.3,
        dtype=dtype, memory_format=torch.channels_last,
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
    for backend in ("triton", "cupy") if installed("cupy") else ("triton",):
        batch_tail(pixels, **gpu, backend=backend)
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = batch_tail(pixels, **gpu, backend=backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert result.is_contiguous(memory_format=memory_format)
        assert_close(result.cpu(), exact, {torch.float32: 1e-5}.get(dtype, TOLERANCE[dtype]))
