"""The blur against its definition: SciPy's cosine transforms in float64."""

import math

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn

from fastmoll.kernels.heat_blur import blur_scale, heat_blur, heat_kernel, heat_matrix

SHAPES = [(1, 1), (1, 7), (9, 1), (2, 2), (3, 5), (32, 32), (17, 64), (64, 17), (31, 33), (224, 224)]
TEMPERATURES = [0.0, 0.1, 0.37, 0.5, 0.73, 1.0]


def definition(x, t, sigma_min=0.3, sigma_max=None):
    """Equations 5 and 6 of the paper, image by image, in float64."""
    x = x.detach().double().numpy()
    height, width = x.shape[-2:]
    sigma_max = width if sigma_max is None else sigma_max
    h, w = np.arange(height)[:, None], np.arange(width)[None]
    out = np.empty_like(x)
    for image, temperature, result in zip(x, t.double().numpy(), out, strict=True):
        sigma = math.exp((1 - temperature) * math.log(sigma_min) + temperature * math.log(sigma_max))
        decay = np.exp(-0.5 * sigma**2 * np.pi**2 * (w**2 / width**2 + h**2 / height**2))
        for channel in range(len(image)):
            result[channel] = idctn(decay * dctn(image[channel], norm="ortho"), norm="ortho")
    return torch.from_numpy(out)


def batch(height, width, dtype=torch.float64, channels=3):
    generator = torch.Generator().manual_seed(height * 1000 + width)
    x = torch.randn(len(TEMPERATURES), channels, height, width, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.tensor(TEMPERATURES, dtype=torch.float64)


def relative(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_float64_is_the_definition(height, width):
    x, t = batch(height, width)
    torch.testing.assert_close(heat_blur(x, t), definition(x, t), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_float32_is_the_definition_to_a_few_parts_in_ten_million(height, width):
    x, t = batch(height, width, torch.float32)
    for image in range(len(t)):
        one = slice(image, image + 1)
        assert relative(heat_blur(x[one], t[one].float()), definition(x[one], t[one].float())) < 1e-6


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_half_precision_rounds_once_at_the_end(dtype, ulp):
    x, t = batch(31, 33, dtype)
    exact = definition(x, t.float())
    result = heat_blur(x, t.float())
    assert result.dtype == dtype
    # Half an ulp of the result, and the float32 error; float16 runs out of exponent below 6e-5.
    bound = exact.abs() * ulp * 1.001 + 2e-6
    assert ((result.double() - exact).abs() <= bound).all()


def test_the_temperature_dtype_does_not_matter_where_it_is_exact():
    x, _ = batch(12, 20, torch.float32)
    t = torch.tensor([0.0, 0.25, 0.5, 0.75, 0.875, 1.0])
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(heat_blur(x, t.to(dtype)), heat_blur(x, t))


def test_zero_temperature_blurs_by_sigma_min():
    x, _ = batch(16, 16)
    t = torch.zeros(len(x))
    assert relative(heat_blur(x, t), x) > 0.05
    torch.testing.assert_close(heat_blur(x, t), definition(x, t), atol=1e-12, rtol=0)
    # A scale far below the pixel does approach the identity: the definition has no other source of blur.
    assert relative(heat_blur(x, t, sigma_min=1e-4), x) < 1e-7


def test_full_temperature_leaves_hardly_more_than_the_mean():
    x, _ = batch(24, 24)
    result = heat_blur(x, torch.ones(len(x)))
    mean = x.mean((2, 3), keepdim=True)
    # What is left of the lowest frequency at σ = W is exp(-π²/2) = 0.7 %.
    assert ((result - mean).norm() / (x - mean).norm()).item() < math.exp(-(math.pi**2) / 2)


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_the_mean_of_each_channel_is_kept(height, width):
    x, t = batch(height, width)
    torch.testing.assert_close(heat_blur(x, t).mean((2, 3)), x.mean((2, 3)), atol=1e-13, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 5, 32, 224])
def test_the_matrix_is_symmetric_and_its_rows_sum_to_one(size):
    sigma = torch.tensor([0.01, 0.3, 1.0, 4.0, 50.0, 1000.0], dtype=torch.float64)
    matrix = heat_matrix(heat_kernel(sigma, size))
    assert matrix.shape == (6, size, size)
    torch.testing.assert_close(matrix, matrix.mT, atol=1e-15, rtol=0)
    torch.testing.assert_close(matrix.sum(2), torch.ones(6, size, dtype=torch.float64), atol=1e-13, rtol=0)
    # Symmetric about the centre too: flipping an image and blurring it may be exchanged.
    torch.testing.assert_close(matrix, matrix.flip(1, 2), atol=1e-14, rtol=0)


def test_the_kernel_is_even_and_has_period_two_n():
    kernel = heat_kernel(torch.tensor([0.7, 3.0], dtype=torch.float64), 12)
    assert kernel.shape == (2, 24)
    torch.testing.assert_close(kernel[:, 1:], kernel[:, 1:].flip(1), atol=1e-15, rtol=0)


def test_scales_are_in_pixels_on_both_axes():
    x = torch.zeros(1, 1, 64, 128, dtype=torch.float64)
    x[0, 0, 32, 64] = 1.0
    blurred = heat_blur(x, torch.tensor([0.5]), sigma_min=4.0, sigma_max=4.0)[0, 0]
    rows, columns = blurred.sum(1), blurred.sum(0)
    for line in (rows, columns):
        place = torch.arange(len(line), dtype=torch.float64)
        mean = (line * place).sum()
        assert (line * (place - mean) ** 2).sum().sqrt().item() == pytest.approx(4.0, rel=1e-3)


def test_sigma_max_defaults_to_the_width():
    x, t = batch(8, 20)
    assert torch.equal(heat_blur(x, t), heat_blur(x, t, sigma_max=20))
    assert not torch.allclose(heat_blur(x, t), heat_blur(x, t, sigma_max=8))


def test_images_narrower_than_sigma_min_are_blurred_by_sigma_min():
    x, t = batch(6, 2)
    assert torch.equal(heat_blur(x, t, sigma_min=5.0), heat_blur(x, t, sigma_min=5.0, sigma_max=5.0))


def test_scale_grows_geometrically_from_sigma_min_to_sigma_max():
    t = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    expected = torch.tensor([0.3, math.sqrt(0.3 * 224), 224.0], dtype=torch.float64)
    torch.testing.assert_close(blur_scale(t, 0.3, 224), expected, atol=0, rtol=1e-14)
    assert blur_scale(t.half(), 0.3, 224).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_format_dtype_and_values_are_kept(dtype):
    x, t = batch(10, 14, dtype)
    last = x.to(memory_format=torch.channels_last)
    strided, rotated = torch.cat((x, x), 3)[..., ::2], torch.rot90(x, 1, (2, 3))
    assert heat_blur(x, t).is_contiguous()
    assert heat_blur(last, t).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(heat_blur(last, t), heat_blur(x, t))
    assert torch.equal(heat_blur(strided, t), heat_blur(strided.contiguous(), t))
    assert torch.equal(heat_blur(rotated, t), heat_blur(rotated.contiguous(), t))


def test_an_image_is_blurred_alike_in_any_batch():
    x, t = batch(20, 12, torch.float32)
    together = heat_blur(x, t)
    for image in range(len(t)):
        one = slice(image, image + 1)
        # Not bit for bit: matrix libraries choose their order of summation by the size of the batch.
        torch.testing.assert_close(heat_blur(x[one], t[one]), together[one], atol=1e-6, rtol=0)


def test_the_input_is_not_written_to():
    x, t = batch(8, 8, torch.float32)
    before = x.clone()
    heat_blur(x, t)
    assert torch.equal(x, before)


def test_autocast_does_not_lower_the_precision():
    x, t = batch(32, 32, torch.float32)
    expected = heat_blur(x, t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = heat_blur(x, t)
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


def test_an_empty_batch_gives_an_empty_batch():
    assert heat_blur(torch.empty(0, 3, 8, 9), torch.empty(0)).shape == (0, 3, 8, 9)


def test_a_graph_may_require_grad_around_it_but_not_through_it():
    x, t = batch(8, 8, torch.float32)
    with torch.no_grad():
        assert not heat_blur(x.requires_grad_(), t).requires_grad
    with pytest.raises(ValueError, match="x must not require grad"):
        heat_blur(x, t)


def test_images_without_data_give_a_shape():
    x = torch.empty(2, 3, 4, 5, device="meta").to(memory_format=torch.channels_last)
    out = heat_blur(x, torch.empty(2, device="meta"))
    assert out.is_meta and (out.shape, out.stride()) == (x.shape, x.stride())


X, T = torch.zeros(2, 3, 4, 4), torch.zeros(2)


@pytest.mark.parametrize(
    ("x", "t", "scales", "message"),
    [
        (X.to(torch.uint8), T, {}, "x must be floating point, got torch.uint8: standardise"),
        (X.to(torch.complex64), T, {}, "x must be floating point, got torch.complex64"),
        (X[0], T, {}, r"x must have shape \(B, C, H, W\), got \(3, 4, 4\)"),
        (X[:, :, :0], T, {}, r"x must have at least one .* got shape \(2, 3, 0, 4\)"),
        ([1.0], T, {}, "x must be a torch.Tensor, got list"),
        (X.to_sparse(), T, {}, "x must be a dense tensor, got torch.sparse_coo"),
        (torch.zeros(2, 9, 8, 3), T, {}, r"x must have .* got \(2, 9, 8, 3\), which looks like \(B, H, W, C\)"),
        (X, T.clone().requires_grad_(), {}, "t must not require grad"),
        (X, T[:1], {}, r"t must have shape \(2\), got \(1,\)"),
        (X, 0.5, {}, "t must be a torch.Tensor, got float"),
        (X, T.long(), {}, "t must be .* got torch.int64"),
        (X, torch.tensor([0.5, 1.5]), {}, r"t must lie in \[0, 1\], got 1.5 at position 1"),
        (X, torch.tensor([-0.5, 0.5]), {}, "t must lie .* got -0.5 at position 0"),
        (X, torch.tensor([0.5, float("nan")]), {}, "t must lie .* got nan at position 1"),
        (X, T, {"sigma_min": 0.0}, "sigma_min .* got 0.0"),
        (X, T, {"sigma_min": float("inf")}, "sigma_min .* got inf"),
        (X, T, {"sigma_max": 0.2}, "sigma_max must be a finite number of at least 0.3, got 0.2"),
        (X, T, {"sigma_max": float("nan")}, "sigma_max .* got nan"),
        (X, T, {"sigma_max": "w"}, "sigma_max .* got 'w'"),
        (X, torch.zeros(2, device="meta"), {}, "t must be on cpu .* got meta"),
    ],
)
def test_bad_arguments_are_named(x, t, scales, message):
    with pytest.raises(ValueError, match=message):
        heat_blur(x, t, **scales)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_gpu_blurs_as_the_definition_says_without_waiting(memory_format):
    x, t = batch(31, 64, torch.float32)
    gpu, t_gpu = x.cuda().to(memory_format=memory_format), t.cuda()
    heat_blur(gpu, t_gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = heat_blur(gpu, t_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.is_contiguous(memory_format=memory_format)
    assert relative(result.cpu(), definition(x, t)) < 1e-6
