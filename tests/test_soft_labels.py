"""Label decay and soft labels against the printed formulas."""

import numpy as np
import pytest
import torch

from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE
from fastmoll.kernels.soft_labels import SoftLabels, label_decay, soft_labels

INSIDE = torch.tensor([1e-4, 0.1, 0.25, 0.5, 0.75, 0.9, 0.9999], dtype=torch.float64)


def roles(role, like):
    return torch.full(like.shape, role, dtype=torch.int8)


@pytest.mark.parametrize("k", [0.5, 1.0, 2.0, 3.7])
def test_noise_decay_is_the_printed_ratio_of_signal_to_noise(k):
    t = INSIDE.numpy()
    snr = np.cos(np.pi * t / 2) ** 2 / np.sin(np.pi * t / 2) ** 2
    result = label_decay(roles(NOISE, INSIDE), INSIDE, k_noise=k, k_blur=9.0)
    np.testing.assert_allclose(result.numpy(), (1 / (1 + snr)) ** k, rtol=1e-13)


@pytest.mark.parametrize("k", [0.5, 1.0, 2.0, 3.7])
def test_blur_decay_is_a_power_of_the_temperature(k):
    result = label_decay(roles(BLUR, INSIDE), INSIDE, k_blur=k, k_noise=9.0)
    np.testing.assert_allclose(result.numpy(), INSIDE.numpy() ** k, rtol=1e-15)


def test_half_the_label_is_left_where_signal_and_noise_are_equal():
    assert label_decay(torch.tensor([NOISE]), torch.tensor([0.5])).item() == pytest.approx(0.5, abs=1e-7)


@pytest.mark.parametrize("role", [NOISE, BLUR])
def test_nothing_is_lost_at_zero_and_everything_at_one(role):
    ends = torch.tensor([0.0, 1.0])
    assert label_decay(roles(role, ends), ends, k_noise=2.5, k_blur=2.5).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("role", [NOISE, BLUR])
def test_a_slope_of_zero_loses_everything_at_every_temperature(role):
    t = torch.tensor([0.0, 0.3, 1.0])
    assert label_decay(roles(role, t), t, k_noise=0, k_blur=0).tolist() == [1.0, 1.0, 1.0]


def test_clean_labels_lose_nothing_and_pure_noise_loses_all():
    t = torch.tensor([0.0, 0.7, 1.0])
    assert label_decay(roles(CLEAN, t), t).tolist() == [0.0, 0.0, 0.0]
    assert label_decay(roles(PURE_NOISE, t), t).tolist() == [1.0, 1.0, 1.0]


def test_each_element_follows_its_own_role():
    t = torch.full((4,), 0.3, dtype=torch.float64)
    result = label_decay(torch.tensor([CLEAN, NOISE, BLUR, PURE_NOISE]), t)
    expected = [0.0, np.sin(0.15 * np.pi) ** 2, 0.3, 1.0]
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-14)


def test_decay_is_float32_unless_the_temperature_is_float64():
    for dtype, expected in [
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        assert label_decay(torch.tensor([NOISE]), torch.tensor([0.5], dtype=dtype)).dtype == expected


def test_smoothing_moves_gamma_to_the_uniform_label():
    labels, gamma = torch.tensor([2, 0, 4]), torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    one_hot = np.eye(5)[labels.numpy()]
    g = gamma.numpy()[:, None]
    result = soft_labels(labels, gamma, 5)
    np.testing.assert_allclose(result.numpy(), (1 - g) * one_hot + g / 5, rtol=1e-15)
    assert result.sum(1).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_tempering_only_scales_the_label_down():
    labels, gamma = torch.tensor([2, 0, 4]), torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    result = soft_labels(labels, gamma, 5, kind="temper")
    np.testing.assert_allclose(result.numpy(), (1 - gamma.numpy()[:, None]) * np.eye(5)[labels.numpy()], rtol=1e-15)


@pytest.mark.parametrize("kind", ["smooth", "temper"])
def test_one_hot_labels_written_out_give_the_same_as_classes(kind):
    labels, gamma = torch.tensor([1, 3, 0, 2]), torch.tensor([0.1, 0.0, 1.0, 0.77])
    dense = torch.nn.functional.one_hot(labels, 4).float()
    torch.testing.assert_close(soft_labels(dense, gamma, 4, kind=kind), soft_labels(labels, gamma, 4, kind=kind))


@pytest.mark.parametrize("kind", ["smooth", "temper"])
def test_soft_labels_are_linear_in_the_label(kind):
    generator = torch.Generator().manual_seed(0)
    mixed = torch.rand(6, 10, generator=generator, dtype=torch.float64)
    mixed /= mixed.sum(1, keepdim=True)
    gamma = torch.rand(6, generator=generator, dtype=torch.float64)
    parts = torch.stack([soft_labels(torch.full((6,), k), gamma, 10, kind=kind) for k in range(10)], dim=1)
    torch.testing.assert_close(soft_labels(mixed, gamma, 10, kind=kind), (mixed.unsqueeze(1) @ parts).squeeze(1))


def test_targets_are_float32_unless_gamma_is_float64():
    for labels in (torch.tensor([1]), torch.eye(3, dtype=torch.bfloat16)[1:2], torch.eye(3, dtype=torch.float64)[1:2]):
        assert soft_labels(labels, torch.tensor([0.5]), 3).dtype == torch.float32
        assert soft_labels(labels, torch.tensor([0.5], dtype=torch.float16), 3).dtype == torch.float32
        assert soft_labels(labels, torch.tensor([0.5], dtype=torch.float64), 3).dtype == torch.float64


def test_soft_labels_are_not_written_to():
    labels = torch.eye(3)
    soft_labels(labels, torch.full((3,), 0.5), 3)
    assert torch.equal(labels, torch.eye(3))


@pytest.mark.parametrize("kind", ["smooth", "temper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixed_labels_are_mixed_before_they_are_degraded(dtype, kind):
    labels, partner = torch.tensor([0, 3, 3, 1]), torch.tensor([3, 0, 2, 1])
    lam, gamma = torch.tensor([0.0, 0.25, 0.6, 1.0], dtype=dtype), torch.tensor([0.0, 0.5, 0.2, 1.0], dtype=dtype)
    onehot = torch.nn.functional.one_hot(labels, 5).double()
    share, lost = lam.double().unsqueeze(1), gamma.double().unsqueeze(1)
    want = (1 - lost) * (share * onehot + (1 - share) * onehot[partner]) + (lost / 5 if kind == "smooth" else 0)
    for given in (labels, onehot):
        targets = soft_labels(given, gamma, 5, kind=kind, partner=partner, lam=lam)
        assert targets.dtype == dtype
        torch.testing.assert_close(targets.double(), want, atol=1e-7 if dtype == torch.float32 else 1e-15, rtol=0)


@pytest.mark.parametrize(
    ("mixed", "message"),
    [
        ({"partner": torch.tensor([1, 0])}, "partner and lam must be given together, got partner alone"),
        ({"lam": torch.zeros(2)}, "partner and lam must be given together, got lam alone"),
        (
            {"partner": torch.tensor([2, 0]), "lam": torch.zeros(2)},
            r"partner must lie in \[0, 2\), got 2 at position 0",
        ),
        ({"partner": torch.tensor([1, 0]), "lam": torch.tensor([0.0, 1.5])}, r"lam must lie in \[0, 1\], got 1.5"),
        (
            {"partner": torch.tensor([1.0, 0.0]), "lam": torch.zeros(2)},
            "partner must be torch.int64, got torch.float32",
        ),
    ],
)
def test_bad_partners_are_named(mixed, message):
    with pytest.raises(ValueError, match=message):
        soft_labels(torch.tensor([0, 1]), torch.zeros(2), 5, **mixed)


def test_an_empty_batch_gives_no_targets():
    assert soft_labels(torch.empty(0, dtype=torch.int64), torch.empty(0), 7).shape == (0, 7)
    assert soft_labels(torch.empty(0, 7), torch.empty(0), 7).shape == (0, 7)


@pytest.mark.parametrize(
    ("role", "t", "slopes", "message"),
    [
        (torch.tensor([1, 4]), torch.zeros(2), {}, "role must lie .* got 4 at position 1"),
        (torch.tensor([-1, 2]), torch.zeros(2), {}, "role must lie .* got -1 at position 0"),
        (torch.zeros(2), torch.zeros(2), {}, "role .* got torch.float32"),
        (1, torch.zeros(2), {}, "role must be a torch.Tensor, got int"),
        (torch.ones(2, dtype=torch.int8), torch.zeros(3), {}, r"t must have shape \(2\), got \(3,\)"),
        (torch.ones(2, dtype=torch.int8), torch.tensor([0.0, 2.0]), {}, "t must lie .* got 2.0 at position 1"),
        (torch.ones(2, dtype=torch.int8), torch.tensor([0.0, float("nan")]), {}, "t must lie .* got nan"),
        (torch.ones(2, dtype=torch.int8), torch.zeros(2), {"k_noise": -1.0}, "k_noise .* got -1.0"),
        (torch.ones(2, dtype=torch.int8), torch.zeros(2), {"k_noise": float("inf")}, "k_noise .* got inf"),
        (torch.ones(2, dtype=torch.int8), torch.zeros(2), {"k_blur": float("nan")}, "k_blur .* got nan"),
    ],
)
def test_bad_decay_arguments_are_named(role, t, slopes, message):
    with pytest.raises(ValueError, match=message):
        label_decay(role, t, **slopes)


@pytest.mark.parametrize(
    ("labels", "gamma", "classes", "kind", "message"),
    [
        (torch.tensor([0, 5]), torch.zeros(2), 5, "smooth", r"labels must lie in \[0, 5\), got 5 at position 1"),
        (torch.tensor([-1, 2]), torch.zeros(2), 5, "smooth", "labels must lie .* got -1 at position 0"),
        (torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2), 5, "smooth", "labels .* got torch.int32"),
        (torch.zeros(2), torch.zeros(2), 5, "smooth", "labels must be torch.int64, got torch.float32"),
        (torch.zeros(2, 4), torch.zeros(2), 5, "smooth", r"labels must have shape \(B, 5\), got \(2, 4\)"),
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2), 5, "smooth", "labels .* got torch.int64"),
        (torch.tensor([[0.5, -0.5]]), torch.zeros(1), 2, "smooth", r"labels .* got -0.5 at position \(0, 1\)"),
        (torch.tensor([[0.5, float("nan")]]), torch.zeros(1), 2, "smooth", "labels .* got nan"),
        (torch.tensor([[0.5, float("inf")]]), torch.zeros(1), 2, "smooth", "labels .* got inf"),
        ([0, 1], torch.zeros(2), 5, "smooth", "labels must be a torch.Tensor, got list"),
        (torch.tensor([0, 1]), torch.zeros(3), 5, "smooth", r"gamma must have shape \(2\), got \(3,\)"),
        (torch.tensor([0, 1]), torch.tensor([0.0, 1.1]), 5, "smooth", "gamma must lie .* at position 1"),
        (torch.tensor([0, 1]), torch.zeros(2), 1, "smooth", "num_classes .* got 1"),
        (torch.tensor([0, 1]), torch.zeros(2), 2.0, "smooth", "num_classes .* got 2.0"),
        (torch.tensor([0, 1]), torch.zeros(2), 5, "hard", "kind must be one of 'smooth', 'temper', got 'hard'"),
    ],
)
def test_bad_label_arguments_are_named(labels, gamma, classes, kind, message):
    with pytest.raises(ValueError, match=message):
        soft_labels(labels, gamma, classes, kind=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["smooth", "temper"])
def test_a_gpu_gives_the_targets_of_the_cpu(kind):
    labels, role = torch.arange(40) % 10, (torch.arange(40) % 4).to(torch.int8)
    t = torch.linspace(0, 1, 40)
    here = soft_labels(labels, label_decay(role, t), 10, kind=kind)
    there = soft_labels(labels.cuda(), label_decay(role.cuda(), t.cuda()), 10, kind=kind)
    torch.testing.assert_close(there.cpu(), here, atol=1e-6, rtol=0)


def test_short_labels_move_to_another_device():
    label, gamma = torch.arange(3), torch.rand(3)
    moved = SoftLabels(label, gamma, label, gamma, "temper").to("meta")
    assert isinstance(moved, SoftLabels) and moved.kind == "temper"
    assert all(x.is_meta and x.shape == (3,) for x in moved[:4])
    assert SoftLabels(label, gamma).to("meta").lam is None
