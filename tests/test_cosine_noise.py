"""The noise: its schedule, its independence of everything but the key, and that it is N(0, I)."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from fastmoll.kernels import philox
from fastmoll.kernels.cosine_noise import cosine_noise


def images(dtype=torch.float32, shape=(4, 3, 9, 7)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def epsilon(shape, dtype=torch.float64, **key):
    """Pure noise: what t = 1 leaves of any image."""
    return cosine_noise(torch.zeros(shape, dtype=dtype), torch.ones(shape[0]), **key)


def test_zero_temperature_returns_the_image_itself():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = images(dtype)
        assert torch.equal(cosine_noise(x, torch.zeros(4)), x)


def test_full_temperature_returns_noise_alone():
    x = images(torch.float64)
    assert torch.equal(cosine_noise(1e6 * x, torch.ones(4)), epsilon(x.shape))


def test_the_schedule_is_cosine_and_sine_of_a_quarter_turn():
    x, t = images(torch.float64), torch.tensor([0.0, 0.2, 0.5, 0.99], dtype=torch.float64)
    alpha, sigma = (
        np.array([f(math.pi * s / 2) for s in t.tolist()])[:, None, None, None] for f in (math.cos, math.sin)
    )
    expected = alpha * x.numpy() + sigma * epsilon(x.shape).numpy()
    np.testing.assert_allclose(cosine_noise(x, t).numpy(), expected, atol=1e-14, rtol=0)


def test_normal_i_of_the_stream_is_pixel_row_column_channel():
    batch, channels, height, width = 2, 3, 5, 7
    index = torch.tensor([77, 2**40 + 1])
    words = philox.sample_words(index, 3, seed=5, purpose=philox.NOISE, blocks=27)
    stream = philox.normal(words, torch.float64)
    noise = epsilon((batch, channels, height, width), seed=5, epoch=3, index=index)
    for b, c, h, w in [(0, 0, 0, 0), (1, 2, 0, 0), (0, 1, 4, 6), (1, 2, 4, 6), (1, 0, 2, 3)]:
        assert noise[b, c, h, w] == stream[b, (h * width + w) * channels + c]


def test_float32_is_float64_to_the_documented_tolerance():
    x, t = images(torch.float32, (8, 3, 64, 64)), torch.rand(8, generator=torch.Generator().manual_seed(1))
    exact = cosine_noise(x.double(), t)
    torch.testing.assert_close(cosine_noise(x, t).double(), exact, atol=4e-6, rtol=0)


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_half_precision_rounds_once_at_the_end(dtype, ulp):
    x, t = images(dtype, (8, 3, 32, 32)), torch.rand(8, generator=torch.Generator().manual_seed(1))
    exact = cosine_noise(x.double(), t)
    result = cosine_noise(x, t)
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= exact.abs() * ulp * 1.001 + 4e-6).all()


def test_the_same_id_gets_the_same_noise_in_any_batch_order_and_memory_format():
    x, t = images(shape=(6, 3, 9, 7)), torch.linspace(0.1, 1, 6)
    index = torch.tensor([4, 2**47, 9, 0, 1234567890123, 3])
    together = cosine_noise(x, t, seed=1, epoch=2, index=index)
    order = torch.tensor([5, 3, 1, 0, 2, 4])
    assert torch.equal(cosine_noise(x[order], t[order], seed=1, epoch=2, index=index[order]), together[order])
    last = cosine_noise(x.to(memory_format=torch.channels_last), t, seed=1, epoch=2, index=index)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, together)
    for image in range(6):
        one = slice(image, image + 1)
        assert torch.equal(cosine_noise(x[one], t[one], seed=1, epoch=2, index=index[one]), together[one])


def test_work_done_in_portions_is_the_whole(monkeypatch):
    x, t = torch.zeros(11, 3, 9, 7), torch.ones(11)
    together = cosine_noise(x, t)
    # 48 blocks an image: pieces of an image, exactly one image, three images with two left over.
    for limit in (1, 7, 48, 150):
        monkeypatch.setattr("fastmoll.kernels.cosine_noise._BLOCKS", limit)
        monkeypatch.setattr("fastmoll.kernels.philox._PORTION", limit)
        assert torch.equal(cosine_noise(x, t), together)


def test_ids_default_to_the_place_in_the_batch():
    x, t = images(), torch.full((4,), 0.5)
    assert torch.equal(cosine_noise(x, t), cosine_noise(x, t, index=torch.arange(4)))
    assert torch.equal(cosine_noise(x, t), cosine_noise(x, t, index=torch.arange(4, dtype=torch.int32)))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 1, 1), (2, 1, 1, 5), (3, 2, 3, 1), (0, 3, 4, 4)])
def test_any_size_works(shape):
    result = cosine_noise(torch.zeros(shape), torch.ones(shape[0]))
    assert result.shape == shape
    assert (result != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_moments_of_a_standard_normal(dtype):
    noise = epsilon((40, 3, 128, 128), dtype, seed=3).double().flatten()
    n = len(noise)
    # Each moment within four of its own standard errors.
    assert abs(noise.mean()) < 4 / math.sqrt(n)
    assert abs(noise.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((noise**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((noise**4).mean() - 3) < 4 * math.sqrt(96 / n)


def test_noise_passes_a_kolmogorov_smirnov_test():
    noise = epsilon((8, 3, 100, 100), torch.float32, seed=4).double().flatten().numpy()
    assert scipy.stats.kstest(noise, "norm").pvalue > 1e-3


@pytest.mark.parametrize("seed", [0, 2**63])
def test_no_two_neighbours_channels_samples_epochs_or_seeds_are_correlated(seed):
    shape = (16, 3, 96, 96)
    index = torch.arange(16)
    noise = epsilon(shape, seed=seed, index=index)
    pairs = {
        "columns": (noise[..., 1:], noise[..., :-1]),
        "rows": (noise[:, :, 1:], noise[:, :, :-1]),
        "diagonals": (noise[:, :, 1:, 1:], noise[:, :, :-1, :-1]),
        "channels 0, 1": (noise[:, 0], noise[:, 1]),
        "channels 0, 2": (noise[:, 0], noise[:, 2]),
        "samples": (noise[1:], noise[:-1]),
        "high bits of the id": (noise, epsilon(shape, seed=seed, index=index + 2**32)),
        "epochs": (noise, epsilon(shape, seed=seed, epoch=1)),
        "seeds": (noise, epsilon(shape, seed=seed + 1)),
        "high bits of the seed": (noise, epsilon(shape, seed=seed ^ 2**32)),
        # A draw that adds the epoch to the seed or to the id would make these two equal.
        "epoch and seed": (epsilon(shape, seed=seed + 1), epsilon(shape, seed=seed, epoch=1)),
        "epoch and id": (epsilon(shape, seed=seed, index=index + 1), epsilon(shape, seed=seed, epoch=1)),
    }
    for name, (a, b) in pairs.items():
        product = (a * b).flatten()
        assert abs(product.mean()) < 4.5 / math.sqrt(len(product)), name
        # Independent, not only uncorrelated: the squares, too.
        squares = ((a**2 - 1) * (b**2 - 1)).flatten()
        assert abs(squares.mean()) < 4.5 * 2 / math.sqrt(len(squares)), name


def test_the_input_is_not_written_to():
    x = images()
    before = x.clone()
    cosine_noise(x, torch.full((4,), 0.3))
    assert torch.equal(x, before)


def test_torchs_own_generator_is_left_alone():
    state = torch.get_rng_state()
    cosine_noise(images(), torch.full((4,), 0.3))
    assert torch.equal(torch.get_rng_state(), state)


X, T = torch.zeros(2, 3, 4, 4), torch.zeros(2)


@pytest.mark.parametrize(
    ("x", "t", "key", "message"),
    [
        (X.to(torch.uint8), T, {}, "x must be floating point, got torch.uint8: standardise"),
        (X[0], T, {}, r"x must have shape .* got \(3, 4, 4\)"),
        (X.clone().requires_grad_(), T, {}, "x must not require grad"),
        (X, T[:1], {}, r"t must have shape \(2\), got \(1,\)"),
        (X, T.clone().requires_grad_(), {}, "t must not require grad"),
        (X, torch.tensor([0.5, 1.001]), {}, "t must lie .* at position 1"),
        (X, torch.tensor([float("nan"), 0.5]), {}, "t must lie .* got nan at position 0"),
        (X, T, {"seed": -3}, "seed .* got -3"),
        (X, T, {"epoch": 2**24}, "epoch .* got 16777216"),
        (X, T, {"epoch": 0.5}, "epoch .* got 0.5"),
        (X, T, {"index": torch.arange(3)}, r"index must have shape \(2\), got \(3,\)"),
        (X, T, {"index": torch.tensor([0, -1])}, "index .* got -1 at position 1"),
        (X, T, {"index": torch.zeros(2)}, "index .* got torch.float32"),
    ],
)
def test_bad_arguments_are_named(x, t, key, message):
    with pytest.raises(ValueError, match=message):
        cosine_noise(x, t, **key)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_gpu_gives_the_noise_of_the_cpu_without_waiting(memory_format):
    x, t = images(shape=(8, 3, 33, 20)), torch.linspace(0, 1, 8)
    gpu, t_gpu = x.cuda().to(memory_format=memory_format), t.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = cosine_noise(gpu, t_gpu, seed=9, epoch=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(result.cpu(), cosine_noise(x, t, seed=9, epoch=4), atol=1e-5, rtol=0)
