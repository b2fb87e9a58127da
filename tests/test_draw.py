"""Roles and temperatures: their distributions, their exactness, their independence of everything but the key."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch

from fastmoll.kernels import philox
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE, draw, role_thresholds
from fastmoll.mollify import beta_quantiles

MANY = torch.arange(200_000)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ((1, 1, 1), (1431655765, 2863311531, 2**32)),
        ((1, 0, 1), (2**31, 2**31, 2**32)),
        ((0, 0, 5), (0, 0, 2**32)),
        ((3, 0, 0), (2**32, 2**32, 2**32)),
        ((1, 1, 1, 1), (2**30, 2**31, 3 * 2**30)),
        ((0.0, 0.0, 0.0, 0.1), (0, 0, 0)),
        ((1e308, 1e308, 1e308), (1431655765, 2863311531, 2**32)),
    ],
)
def test_thresholds_are_cumulative_weights_of_two_to_the_32(roles, expected):
    assert role_thresholds(roles) == expected


def test_thresholds_are_within_a_word_of_exact_fractions():
    roles = (0.1, 0.7, 0.15, 0.05)
    total = sum(map(Fraction, roles))
    exact = [sum(map(Fraction, roles[:n])) / total * 2**32 for n in (1, 2, 3)]
    assert all(abs(have - want) <= 1 for have, want in zip(role_thresholds(roles), exact, strict=True))


def test_a_role_begins_exactly_at_its_threshold():
    index = torch.arange(2000)
    word = philox.sample_words(index, 3, seed=8, purpose=philox.DRAW, blocks=1)[0].squeeze(1)
    # Weights that put the threshold on the word of one sample, and just above it.
    middle = int(word.sort().values[1000])
    for threshold, expected in ((middle, NOISE), (middle + 1, CLEAN)):
        roles = (threshold, 2**32 - threshold, 0)
        assert role_thresholds(roles) == (threshold, 2**32, 2**32)
        role, _ = draw(index, 3, seed=8, roles=roles)
        assert role[word == middle].item() == expected
        assert torch.equal(role == CLEAN, word < threshold)


@pytest.mark.parametrize("roles", [(1, 1, 1), (0.5, 0.2, 0.3), (1, 2, 3, 4), (0, 1, 0, 1)])
def test_roles_have_the_frequencies_of_their_weights(roles):
    role, _ = draw(MANY, seed=1, roles=roles)
    counts = np.bincount(role.numpy(), minlength=len(roles))
    weights = np.array(roles, dtype=float)
    assert counts[weights == 0].sum() == 0
    positive = weights > 0
    expected = weights[positive] / weights.sum() * len(MANY)
    assert scipy.stats.chisquare(counts[positive], expected).pvalue > 1e-3


@pytest.mark.parametrize("beta", [(1.0, 2.0), (1.0, 1.0), (1.0, 0.3), (2.0, 2.0), (0.5, 0.5), (2.0, 5.0), (20.0, 0.5)])
def test_temperatures_follow_their_beta_distribution(beta):
    quantiles = None if beta[0] == 1.0 else beta_quantiles(*beta)
    role, t = draw(MANY, seed=5, beta=beta, quantiles=quantiles)
    for one in (NOISE, BLUR):
        assert scipy.stats.kstest(t[role == one].double().numpy(), scipy.stats.beta(*beta).cdf).pvalue > 1e-3


def test_the_closed_form_is_the_quantile_function_to_float32():
    index = torch.arange(20_000)
    word = philox.sample_words(index, 1, seed=2, purpose=philox.DRAW, blocks=1)[1].squeeze(1)
    u = (word.numpy() + 0.5) / 2**32
    for b in (0.25, 2.0, 7.0):
        _, t = draw(index, 1, seed=2, roles=(0, 1, 0), beta=(1.0, b))
        # Float32 rounds by at most 2^-25 below 1; the rest is SciPy's own root finding.
        np.testing.assert_allclose(t.numpy(), scipy.stats.beta(1.0, b).ppf(u), atol=2**-25 + 1e-12, rtol=0)


@pytest.mark.parametrize(
    ("beta", "error"),
    [((2.0, 2.0), 5e-6), ((0.5, 0.5), 5e-6), ((5.0, 1.0), 5e-6), ((50.0, 0.5), 5e-6), ((0.1, 0.1), 5e-5)],
)
def test_the_quantile_table_is_as_exact_as_its_documentation_says(beta, error):
    index = torch.arange(20_000)
    word = philox.sample_words(index, 0, seed=2, purpose=philox.DRAW, blocks=1)[1].squeeze(1)
    u = (word.numpy() + 0.5) / 2**32
    _, t = draw(index, seed=2, roles=(0, 0, 1), beta=beta, quantiles=beta_quantiles(*beta))
    np.testing.assert_allclose(t.numpy(), scipy.stats.beta(*beta).ppf(u), atol=error, rtol=0)


def test_the_quantile_table_reaches_to_the_smallest_and_largest_uniform_numbers():
    table = beta_quantiles(3.0, 2.0)
    tail = 1 / (1 + 2.0**33)
    exact = scipy.stats.beta(3.0, 2.0)
    assert table[[0, 2048, -1]].tolist() == pytest.approx([exact.ppf(tail), exact.median(), exact.isf(tail)], rel=1e-9)
    assert (table.diff() > 0).all()


def test_clean_has_temperature_zero_and_pure_noise_one():
    role, t = draw(torch.arange(1000), roles=(1, 1, 1, 1))
    assert set(role.tolist()) == {CLEAN, NOISE, BLUR, PURE_NOISE}
    assert (t[role == CLEAN] == 0).all()
    assert (t[role == PURE_NOISE] == 1).all()
    between = t[(role == NOISE) | (role == BLUR)]
    assert ((between > 0) & (between < 1)).all()
    assert role.dtype == torch.int8
    assert t.dtype == torch.float32


def test_a_draw_depends_on_its_key_alone():
    index = torch.randint(2**48, (500,), generator=torch.Generator().manual_seed(0))
    role, t = draw(index, 7, seed=11)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    again = draw(index[order], 7, seed=11)
    assert torch.equal(again[0], role[order])
    assert torch.equal(again[1], t[order])
    for single in (0, 250, 499):
        one = draw(index[single : single + 1], 7, seed=11)
        assert (one[0].item(), one[1].item()) == (role[single].item(), t[single].item())


@pytest.mark.parametrize(
    "other",
    [{"epoch": 1}, {"seed": 1}, {"seed": 1 << 32}, {"shift": 1 << 32}, {"shift": 1 << 47}, {"shift": len(MANY)}],
)
def test_epochs_seeds_and_high_bits_of_the_id_give_independent_draws(other):
    index = MANY + other.get("shift", 0)
    role, t = draw(MANY, roles=(1, 1, 0))
    role2, t2 = draw(index, other.get("epoch", 0), seed=other.get("seed", 0), roles=(1, 1, 0))
    both = torch.bincount(2 * role.long() + role2.long(), minlength=4).reshape(2, 2)
    assert scipy.stats.chi2_contingency(both.numpy()).pvalue > 1e-3
    noisy = (role == NOISE) & (role2 == NOISE)
    assert scipy.stats.pearsonr(t[noisy].numpy(), t2[noisy].numpy()).pvalue > 1e-3


def test_the_temperature_does_not_depend_on_the_role():
    role, t = draw(MANY)
    assert scipy.stats.ks_2samp(t[role == NOISE].numpy(), t[role == BLUR].numpy()).pvalue > 1e-3


def test_an_empty_batch_draws_nothing():
    role, t = draw(torch.empty(0, dtype=torch.int64))
    assert role.shape == t.shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"roles": (1, 1)}, r"roles must be 3 .* got \(1, 1\)"),
        ({"roles": (1, 1, 1, 1, 1)}, "roles must be 3"),
        ({"roles": 1}, "roles must be 3 .* got 1"),
        ({"roles": (1, -0.5, 1)}, r"roles\[1\] .* got -0.5"),
        ({"roles": (1, float("nan"), 1)}, r"roles\[1\] .* got nan"),
        ({"roles": (1, 1, float("inf"))}, r"roles\[2\] .* got inf"),
        ({"roles": (1, 1, "2")}, r"roles\[2\] .* got '2'"),
        ({"roles": (0, 0, 0)}, r"roles must have at least one positive weight, got \(0, 0, 0\)"),
        ({"beta": (0.0, 2.0)}, r"beta\[0\] .* got 0.0"),
        ({"beta": (1.0, -1.0)}, r"beta\[1\] .* got -1.0"),
        ({"beta": (1.0, float("nan"))}, r"beta\[1\] .* got nan"),
        ({"beta": (1.0,)}, r"beta must be two numbers"),
        ({"beta": 2.0}, "beta must be two numbers .* got 2.0"),
        ({"beta": (2.0, 2.0)}, r"quantiles must be given for beta = \(2.0, 2.0\)"),
        ({"beta": (2.0, 2.0), "quantiles": torch.zeros(1, dtype=torch.float64)}, r"quantiles .* got 1"),
        ({"beta": (2.0, 2.0), "quantiles": torch.zeros(9)}, r"quantiles .* got torch.float32"),
        ({"epoch": 2**24}, "epoch .* got 16777216"),
        ({"seed": -1}, "seed .* got -1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(torch.arange(4), **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("beta", [(1.0, 2.0), (2.0, 5.0)])
def test_a_gpu_draws_what_the_cpu_draws(beta):
    quantiles = beta_quantiles(*beta)
    role, t = draw(MANY, 2, seed=3, beta=beta, quantiles=quantiles)
    role_gpu, t_gpu = draw(MANY.cuda(), 2, seed=3, beta=beta, quantiles=quantiles.cuda())
    assert torch.equal(role_gpu.cpu(), role)
    torch.testing.assert_close(t_gpu.cpu(), t, atol=1e-6, rtol=0)
