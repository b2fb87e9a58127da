"""The compiled CPU path against the definitions in float64, and what must not change its results."""

import itertools
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

import numba

from fastmoll.kernels import heat_blur_numba as blur
from fastmoll.kernels import mollify_cpu as module
from fastmoll.kernels import recycled
from fastmoll.kernels.batch_tail import batch_tail
from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE
from fastmoll.kernels.heat_blur import blur_scale, heat_blur
from fastmoll.kernels.mollify_cpu import mollify_cpu

KEY = {"seed": 2**64 - 7, "epoch": 2**24 - 1}


def images(shape=(8, 3, 33, 20), dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def roles(*role):
    return torch.tensor(role, dtype=torch.int8)


def definition(x, role, t, sigma_min=0.3, sigma_max=None, **key):
    """All images in float64, as the reference operations say."""
    x, t = x.double(), torch.where(role == PURE_NOISE, 1.0, t.double())
    noised = cosine_noise(x, t, **key)
    blurred = heat_blur(x, t, sigma_min=sigma_min, sigma_max=sigma_max)
    role = role.view(-1, 1, 1, 1)
    return torch.where(role == CLEAN, x, torch.where(role == BLUR, blurred, noised))


MIXED = roles(NOISE, BLUR, CLEAN, PURE_NOISE, BLUR, NOISE, BLUR, BLUR)
TEMPERATURES = torch.tensor([0.4, 0.05, 0.0, 0.3, 0.35, 1.0, 0.9, 0.6])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "shape",
    [(8, 3, 33, 20), (8, 1, 17, 23), (8, 4, 40, 41), (8, 2, 1, 5), (8, 3, 5, 1), (8, 3, 1, 1), (8, 3, 224, 160)],
)
def test_every_role_is_its_definition_at_any_size(shape, memory_format):
    x = images(shape)
    index = torch.tensor([3, 2**48 - 1, 5, 2**47 + 1, 9, 2**32, 0, 1])
    result = mollify_cpu(x.to(memory_format=memory_format), MIXED, TEMPERATURES, index=index, **KEY)
    assert result.is_contiguous(memory_format=memory_format)
    expected = definition(x, MIXED, TEMPERATURES, index=index, **KEY)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(224, 224), (64, 64), (97, 64)])
def test_blur_of_white_noise_is_exact_at_every_temperature_in_each_of_its_ways(height, width):
    t = torch.linspace(0, 1, 41)
    x = images((41, 1, height, width))
    rank, _, _ = module._plan(blur_scale(t.double(), 0.3, width).numpy(), height, width)
    assert 0 < np.count_nonzero(rank) < len(t)
    result = mollify_cpu(x, torch.full((41,), BLUR, dtype=torch.int8), t)
    torch.testing.assert_close(result.double(), heat_blur(x.double(), t), atol=1e-5, rtol=0)


def test_blur_scales_are_those_asked_for():
    x, t = images(), torch.linspace(0, 1, 8)
    some = ({"sigma_min": 1.5, "sigma_max": 4.0}, {"sigma_min": 30.0, "sigma_max": 1e4}, {"sigma_min": 40.0})
    for scales in (*some, {"sigma_min": 1e-30}):
        result = mollify_cpu(x, torch.full((8,), BLUR, dtype=torch.int8), t, **scales)
        torch.testing.assert_close(result.double(), heat_blur(x.double(), t, **scales), atol=1e-5, rtol=0)


def test_constant_images_stay_constant():
    t = torch.linspace(0, 1, 30)
    result = mollify_cpu(torch.full((30, 1, 50, 60), 3.0), torch.full((30,), BLUR, dtype=torch.int8), t)
    torch.testing.assert_close(result, torch.full_like(result, 3.0), atol=1e-5, rtol=0)


def test_noise_longer_than_a_chunk_of_the_generator_is_one_stream():
    # 3072 normals a chunk: 5 channels never begin a chunk with a pixel.
    for channels in (1, 2, 3, 5):
        x = torch.zeros(1, channels, 61, 67)
        result = mollify_cpu(x, roles(PURE_NOISE), torch.zeros(1), seed=3)
        torch.testing.assert_close(result.double(), cosine_noise(x.double(), torch.ones(1), seed=3), atol=4e-6, rtol=0)


def test_zero_temperature_noise_and_clean_images_are_the_images_themselves():
    x = images()
    for role in (NOISE, CLEAN):
        assert torch.equal(mollify_cpu(x, torch.full((8,), role, dtype=torch.int8), torch.zeros(8)), x)


def test_neither_order_nor_company_nor_layout_nor_threads_change_a_bit(monkeypatch):
    x = images()
    index = torch.arange(100, 108)
    together = mollify_cpu(x, MIXED, TEMPERATURES, index=index)
    order = torch.tensor([5, 3, 1, 0, 7, 6, 2, 4])
    shuffled = mollify_cpu(x[order], MIXED[order], TEMPERATURES[order], index=index[order])
    assert torch.equal(shuffled, together[order])
    assert torch.equal(mollify_cpu(x.to(memory_format=torch.channels_last), MIXED, TEMPERATURES, index=index), together)
    for i in range(8):
        one = slice(i, i + 1)
        assert torch.equal(mollify_cpu(x[one], MIXED[one], TEMPERATURES[one], index=index[one]), together[one])
    for threads in (1, 3, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(mollify_cpu(x, MIXED, TEMPERATURES, index=index), together)


def test_every_element_of_out_is_written_and_the_images_are_not():
    x = images()
    before = x.clone()
    out = torch.full_like(x, float("nan"))
    result = mollify_cpu(x, MIXED, TEMPERATURES, out=out)
    assert result is out
    assert torch.equal(x, before)
    assert torch.equal(out, mollify_cpu(x, MIXED, TEMPERATURES))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_is_the_same(memory_format, dtype):
    x = images(dtype=dtype).to(memory_format=memory_format)
    expected = mollify_cpu(x, MIXED, TEMPERATURES)
    assert torch.equal(mollify_cpu(x, MIXED, TEMPERATURES, out=x), expected)


def test_images_that_share_memory_are_read_but_nothing_is_written_there():
    memory = images((4000,))
    for strides in ((100, 60, 20, 1), (0, 660, 20, 1), (660, 0, 20, 1)):  # overlapping windows; expanded
        x = memory.as_strided((3, 3, 33, 20), strides)
        expected = mollify_cpu(x.contiguous(), MIXED[:3], TEMPERATURES[:3])
        assert torch.equal(mollify_cpu(x, MIXED[:3], TEMPERATURES[:3]), expected)
        with pytest.raises(ValueError, match=rf"out must have memory of its own .* got strides \({strides[0]}, "):
            mollify_cpu(x, MIXED[:3], TEMPERATURES[:3], out=x)


def test_strided_images_are_read_as_they_are():
    x = images((8, 3, 40, 50))
    expected = mollify_cpu(x, MIXED, TEMPERATURES)
    padded = torch.full((8, 3, 41, 120), float("nan"))
    for view in (padded[:, :, :40, :50], padded[:, :, :40, 10:110:2], padded[:, :, 1:, :50]):
        view.copy_(x)
        assert torch.equal(mollify_cpu(view, MIXED, TEMPERATURES), expected)
        into = torch.full_like(padded, float("nan"))[:, :, :40].as_strided(x.shape, view.stride())
        assert torch.equal(mollify_cpu(view, MIXED, TEMPERATURES, out=into), expected)
    for order in itertools.permutations(range(4)):  # as rot90 and mT give them
        there = x.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist())
        assert torch.equal(mollify_cpu(there, MIXED, TEMPERATURES), expected), order
        assert torch.equal(mollify_cpu(there, MIXED, TEMPERATURES, out=torch.empty_like(there)), expected), order


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_half_precision_rounds_once_at_the_end(dtype, ulp):
    x = images(dtype=dtype)
    result = mollify_cpu(x, MIXED, TEMPERATURES)
    exact = definition(x, MIXED, TEMPERATURES)
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= exact.abs() * ulp * 1.001 + 1e-5).all()


@pytest.mark.parametrize("size", [20, 230])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_share_no_memory_with_others_that_are_in_use(size, memory_format, dtype):
    x = images((8, 3, size, size + 4), dtype).to(memory_format=memory_format)
    assert (x.nbytes >= recycled.LARGE) == (size > 20)
    results, expected = [], []
    for epoch in range(4):
        result = mollify_cpu(x, MIXED, TEMPERATURES, epoch=epoch)
        expected.append(mollify_cpu(x, MIXED, TEMPERATURES, epoch=epoch, out=torch.empty_like(x)))
        # Whatever still reaches the memory keeps it.
        results.append([result, result[2:], result[:, 1], result.detach().permute(0, 2, 3, 1)][epoch])
        del result
    views = [expected[0], expected[1][2:], expected[2][:, 1], expected[3].permute(0, 2, 3, 1)]
    assert all(torch.equal(result, view) for result, view in zip(results, views, strict=True))


def test_large_memory_that_is_free_is_used_again():
    x = images((8, 3, 230, 230))
    first = mollify_cpu(x, MIXED, TEMPERATURES)
    place, kept = first.data_ptr(), first.flatten()
    del first
    other = mollify_cpu(x, MIXED, TEMPERATURES)
    assert other.data_ptr() != place
    del kept
    assert mollify_cpu(x, MIXED, TEMPERATURES).data_ptr() == place
    part = mollify_cpu(x[:7], MIXED[:7], TEMPERATURES[:7])
    assert torch.equal(part, other[:7])
    del part
    assert len(recycled._spare) == 1
    recycled.forget()
    assert not recycled._spare


def test_several_threads_may_call_it_at_once():
    x = images((8, 3, 64, 64))
    expected = mollify_cpu(x, MIXED, TEMPERATURES)
    results = []
    callers = [threading.Thread(target=lambda: results.append(mollify_cpu(x, MIXED, TEMPERATURES))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


class _Mollified(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return mollify_cpu(images(), MIXED, TEMPERATURES, epoch=i)


def test_it_works_in_forked_workers_after_the_parent_has_used_it():
    expected = [mollify_cpu(images(), MIXED, TEMPERATURES, epoch=i) for i in range(2)]
    loader = torch.utils.data.DataLoader(_Mollified(), None, num_workers=1, multiprocessing_context="fork", timeout=60)
    for result, want in zip(loader, expected, strict=True):
        assert torch.equal(result, want)


def test_no_images_are_no_work():
    result = mollify_cpu(torch.empty(0, 3, 8, 8), torch.empty(0, dtype=torch.int8), torch.empty(0))
    assert result.shape == (0, 3, 8, 8)


@pytest.mark.parametrize("size", [128, 57])
def test_what_the_blur_leaves_out_is_little_even_if_it_is_all_of_an_image(size):
    # Single cosine modes and an edge: what the band and the ranks leave out does not average out, as in white noise.
    pixel = torch.arange(size) + 0.5
    modes = [torch.cos(torch.pi * k / size * pixel) for k in (0, size // 6, size // 4, size - 1)]
    lines = torch.stack([*modes, torch.sign(pixel - size / 3)])
    x = (lines[:, None, :, None] * lines[None, :, None, :]).flatten(0, 1)
    x /= x.square().mean((1, 2), keepdim=True).sqrt()
    t = torch.linspace(0, 1, 17)
    batch = x.expand(len(t), *x.shape)
    result = mollify_cpu(batch, torch.full((len(t),), BLUR, dtype=torch.int8), t)
    for i in range(len(t)):
        expected = heat_blur(x.double().unsqueeze(0), t[i : i + 1])
        torch.testing.assert_close(result[i : i + 1].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rows", "vectors"), [(8, 2), (8, 1), (4, 1)])
def test_blocks_for_every_processor_are_written_in_full_and_nothing_else_is(rows, vectors):
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(41, 64)).astype(np.float32), generator.normal(size=(41, 96)).astype(np.float32)
    c = np.full((64, 96), np.nan, np.float32)
    block = blur._block(rows, vectors)
    numba.njit(lambda a, b, c: block(a, b, c, 16, 32, 3, 39))(a, b, c)
    place = np.s_[16 : 16 + rows, 32 : 32 + 16 * vectors]
    expected = np.full(c.shape, np.nan)
    expected[place] = (a[3:39].astype(np.float64).T @ b[3:39])[place]
    np.testing.assert_allclose(c, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("depth", "n", "m", "band"), [(41, 48, 80, 100), (64, 16, 64, 5), (0, 16, 16, 3)])
def test_product_is_that_of_float64(depth, n, m, band):
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(depth, n)).astype(np.float32), generator.normal(size=(depth, m)).astype(np.float32)
    b[np.abs(np.subtract.outer(np.arange(depth), np.arange(m))) > band] = 0.0
    c = np.full((n, m + 16), np.nan, np.float32)
    blur._product(a, b, band, c[:, :m])
    np.testing.assert_allclose(c[:, :m], a.astype(np.float64).T @ b, atol=1e-5, rtol=0)
    assert np.isnan(c[:, m:]).all()


X, R, T = torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int8), torch.zeros(2)


@pytest.mark.parametrize(
    ("x", "role", "t", "more", "message"),
    [
        (X.double(), R, T, {}, "x must be float16, bfloat16 or float32 on the CPU, got torch.float64"),
        (X.to("meta"), R, T, {}, "x must be .* on the CPU, got torch.float32 on meta"),
        (X.to(torch.uint8), R, T, {}, "x must be floating point, got torch.uint8"),
        (X.clone().requires_grad_(), R, T, {}, "x must not require grad"),
        (X, R[:1], T, {}, r"role must have shape \(2\), got \(1,\)"),
        (X, R.long(), T, {}, "role must be torch.int8, got torch.int64"),
        (X, roles(0, 4), T, {}, "role must lie .* got 4 at position 1"),
        (X, R, T[:1], {}, r"t must have shape \(2\), got \(1,\)"),
        (X, R, torch.tensor([0.0, 1.5]), {}, "t must lie .* got 1.5 at position 1"),
        (X, R, T, {"seed": -1}, "seed .* got -1"),
        (X, R, T, {"epoch": 2**24}, "epoch .* got 16777216"),
        (X, R, T, {"index": torch.tensor([0, 2**48])}, "index .* at position 1"),
        (X, R, T, {"sigma_min": 0.0}, "sigma_min .* got 0.0"),
        (X, R, T, {"sigma_max": 0.1}, "sigma_max .* got 0.1"),
        (X, R, T, {"out": torch.zeros(2, 3, 4, 5)}, "out must have shape"),
        (X, R, T, {"out": X.half()}, "out must be torch.float32, got torch.float16"),
        (X, R, T, {"out": torch.zeros(2, 4, 4, 3).permute(0, 3, 1, 2)}, "out must have x's strides"),
    ],
)
def test_bad_arguments_are_named(x, role, t, more, message):
    with pytest.raises(ValueError, match=message):
        mollify_cpu(x, role, t, **more)


@pytest.mark.parametrize("size", [20, 230])
def test_compiled_code_may_call_it(size):
    x = images((8, 3, size, size))

    def around(x):
        return mollify_cpu(2 * x, MIXED, TEMPERATURES) + 1

    compiled = torch.compile(around, backend="eager")
    assert torch.equal(compiled(x), around(x))
    assert torch.equal(compiled(x), around(x))


def test_the_default_dtype_of_torch_changes_nothing():
    pixels = torch.randint(0, 256, (3, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    arguments = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "dtype": torch.float32}
    expected = batch_tail(pixels, **arguments)
    torch.set_default_dtype(torch.float64)
    try:
        found = batch_tail(pixels, **arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mix", [None, "lam", "box"])
@pytest.mark.parametrize("size", [(33, 20), (1, 1), (7, 1), (160, 224)])
def test_pixels_become_standardised_mixed_images_as_defined(size, mix, memory_format):
    rng = torch.Generator().manual_seed(0)
    height, width = size
    pixels = torch.randint(0, 256, (8, height, 2 * width, 3), generator=rng, dtype=torch.uint8)[:, :, ::2]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    flip, partner = torch.arange(8) % 2 == 0, torch.randperm(8, generator=rng)
    lam = torch.rand(8, generator=rng) if mix == "lam" else None
    rows, columns = (torch.randint(0, n + 1, (8, 2), generator=rng).sort(1).values for n in size)
    box = torch.cat((rows, columns), 1).int() if mix == "box" else None
    got = module.standardise_cpu(pixels, mean, std, flip, partner if mix else None, lam, box, memory_format)

    x = (pixels.double() / 255 - torch.tensor(mean, dtype=torch.float64)) / torch.tensor(std, dtype=torch.float64)
    x = torch.where(flip.view(-1, 1, 1, 1), x.flip(2), x)
    if lam is not None:
        weight = lam.double().view(-1, 1, 1, 1)
        x = weight * x + (1 - weight) * x[partner]
    if box is not None:
        own = x.clone()
        for image, (y0, y1, x0, x1) in enumerate(box.tolist()):
            x[image, y0:y1, x0:x1] = own[partner[image], y0:y1, x0:x1]
    torch.testing.assert_close(got.double(), x.permute(0, 3, 1, 2), atol=2e-6, rtol=0)
    assert got.is_contiguous(memory_format=memory_format)
