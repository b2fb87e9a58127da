"""The random generator: published vectors, an independent implementation, the layout of the counter, distributions."""

import random

import numpy as np
import pytest
import torch

from fastmoll.kernels import philox

MASK = 0xFFFFFFFF


def python_philox(counter, key):
    """Philox4x32-10 in Python integers, written from the paper's definition."""
    (a, b, c, d), (k, m) = counter, key
    for round_number in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        key0 = (k + round_number * 0x9E3779B9) & MASK
        key1 = (m + round_number * 0xBB67AE85) & MASK
        a, b, c, d = (right >> 32) ^ b ^ key0, right & MASK, (left >> 32) ^ d ^ key1, left & MASK
    return a, b, c, d


def on_tensors(counter, key):
    return tuple(int(word) for word in philox.philox4x32(tuple(torch.tensor([word]) for word in counter), key))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    assert on_tensors(counter, key) == expected
    assert python_philox(counter, key) == expected


def test_equals_an_implementation_in_python_integers():
    source = random.Random(1)
    for _ in range(200):
        counter = tuple(source.getrandbits(32) for _ in range(4))
        key = (source.getrandbits(32), source.getrandbits(32))
        assert on_tensors(counter, key) == python_philox(counter, key)


def test_every_field_has_its_place_in_the_counter():
    seed, epoch, purpose, draw, index = 0xFEDCBA9876543210, 0xABCDEF, 0x91, 0xBEEF, 0xC0DE_89ABCDEF
    words = philox.sample_words(torch.tensor([index]), epoch, seed=seed, purpose=purpose, blocks=3, draw=draw)
    for block in range(3):
        counter = (block, 0x89ABCDEF, 0x91ABCDEF, 0xBEEFC0DE)
        expected = python_philox(counter, (0x76543210, 0xFEDCBA98))
        assert tuple(int(word[0, block]) for word in words) == expected


def test_words_have_one_row_a_sample_and_one_column_a_block():
    index = torch.tensor([5, 2**48 - 1, 0])
    words = philox.sample_words(index, 2, seed=9, purpose=philox.NOISE, blocks=7)
    assert all(word.shape == (3, 7) and word.dtype == torch.int64 for word in words)
    for row, sample in enumerate(index):
        alone = philox.sample_words(sample[None], 2, seed=9, purpose=philox.NOISE, blocks=7)
        assert all(torch.equal(word[row], single[0]) for word, single in zip(words, alone, strict=True))


def test_uniforms_are_the_float32_values_of_the_definition_and_never_zero():
    words = np.array([0, 1, 2**24, 2**24 + 1, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1, 0xDEADBEEF], dtype=np.uint32)
    expected = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    result = philox.uniform(torch.from_numpy(words.astype(np.int64)))
    assert result.dtype == torch.float32
    np.testing.assert_array_equal(result.numpy(), expected)
    assert result.min() == 2.0**-33
    assert result.max() == 1.0


def test_normals_are_box_muller_of_their_words():
    words = philox.sample_words(torch.arange(300), 0, seed=4, purpose=philox.NOISE, blocks=33)
    w = [word.numpy().astype(np.float32) for word in words]
    expected = np.empty((300, 33, 4))
    for pair in (0, 2):
        u = (w[pair] * np.float32(2.0**-32) + np.float32(2.0**-33)).astype(np.float64)
        v = (w[pair + 1] * np.float32(2.0**-32)).astype(np.float64)
        expected[..., pair] = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        expected[..., pair + 1] = np.sqrt(-2 * np.log(u)) * np.sin(2 * np.pi * v)
    exact = philox.normal(words, torch.float64)
    np.testing.assert_allclose(exact.numpy(), expected.reshape(300, 132), rtol=0, atol=1e-14)
    # The float32 angle 2πv has an ulp of 5e-7 and the radius may reach 6.8; 2e-6 was the worst of a million.
    np.testing.assert_allclose(
        philox.normal(words, torch.float32).numpy(), expected.reshape(300, 132), atol=3e-6, rtol=0
    )


def test_normals_of_the_extreme_words_are_finite():
    for first in (0, MASK):
        for second in (0, MASK):
            words = tuple(torch.tensor([[word]]) for word in (first, second, first, second))
            assert philox.normal(words, torch.float32).abs().max() <= 6.77


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, torch.arange(2)), r"seed .* got -1"),
        ((2**64, 0, torch.arange(2)), r"seed .* got 18446744073709551616"),
        ((1.5, 0, torch.arange(2)), r"seed .* got 1.5"),
        ((0, -1, torch.arange(2)), r"epoch .* got -1"),
        ((0, 2**24, torch.arange(2)), r"epoch .* got 16777216"),
        ((0, 0, torch.tensor([3, -7])), r"index .* got -7 at position 1"),
        ((0, 0, torch.tensor([2**48])), r"index .* got 281474976710656 at position 0"),
        ((0, 0, torch.tensor([1.0])), r"index .* got torch.float32"),
        ((0, 0, torch.tensor([[1]])), r"index must have shape \(B\), got \(1, 1\)"),
        ((0, 0, [1]), r"index must be a torch.Tensor, got list"),
    ],
)
def test_what_does_not_fit_the_counter_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        philox.check_key(*arguments)


def test_the_largest_key_is_accepted():
    philox.check_key(2**64 - 1, 2**24 - 1, torch.tensor([2**48 - 1]), 1)


@pytest.mark.gpu
def test_a_gpu_gives_the_words_and_normals_of_the_cpu():
    index = torch.arange(64) * 12345678901
    here = philox.sample_words(index, 3, seed=2**63 + 5, purpose=philox.NOISE, blocks=1000)
    there = philox.sample_words(index.cuda(), 3, seed=2**63 + 5, purpose=philox.NOISE, blocks=1000)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))
    torch.testing.assert_close(
        philox.normal(there, torch.float32).cpu(), philox.normal(here, torch.float32), atol=1e-5, rtol=0
    )
