"""The losses against SciPy in float64, numerical quadrature, exact enumeration and finite differences."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import torch

from fastmoll import losses
from fastmoll.kernels.soft_labels import SoftLabels, soft_labels
from fastmoll.losses import augmented_likelihood, binary_cross_entropy, normalised_cross_entropy, soft_cross_entropy

BATCH, CLASSES, DRAWS = 4, 5, 3
ALL = (soft_cross_entropy, normalised_cross_entropy, binary_cross_entropy)


def example(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def soft_target(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.softmax(example(*shape, seed=seed, scale=1.0), -1)


def mixed_labels(count: int = BATCH, kind: str = "smooth") -> tuple[SoftLabels, torch.Tensor]:
    """Labels of images mixed in pairs and mollified, in their short form and written out."""
    label = torch.arange(count) % CLASSES
    partner = (label + torch.tensor([0, 1, 2, 3]).repeat(count)[:count]) % CLASSES
    gamma = torch.linspace(0, 1, count, dtype=torch.float64)
    lam = torch.linspace(0.9, 0.2, count, dtype=torch.float64)
    hot = torch.nn.functional.one_hot
    mixed = lam[:, None] * hot(label, CLASSES) + (1 - lam[:, None]) * hot(partner, CLASSES)
    return SoftLabels(label, gamma, partner, lam, kind), soft_labels(mixed, gamma, CLASSES, kind=kind)


def quadrature(logits: torch.Tensor) -> np.ndarray:
    """The logarithm of the integral that appendix B starts from, before any of its algebra."""
    results = []
    for log_f in scipy.special.log_softmax(logits.double().numpy(), axis=1):
        classes = len(log_f)

        def density(a: float, log_f: np.ndarray = log_f, classes: int = classes) -> float:
            labels = (1 - a) * np.eye(classes) + a / classes
            return float(np.exp(labels @ log_f).sum())

        results.append(np.log(scipy.integrate.quad(density, 0, 1, epsabs=0, epsrel=1e-12, limit=200)[0]))
    return np.array(results)


# --- all of them ------------------------------------------------------------------------------------------------------


def test_the_soft_cross_entropy_is_that_of_the_kernels() -> None:
    import fastmoll

    assert losses.soft_cross_entropy is fastmoll.soft_cross_entropy


@pytest.mark.parametrize("loss", ALL)
def test_reductions_are_those_of_the_losses_of_the_images(loss) -> None:
    logits, target = example(BATCH, CLASSES), soft_target(BATCH, CLASSES)
    rows = loss(logits, target, reduction="none")
    assert rows.shape == (BATCH,)
    torch.testing.assert_close(loss(logits, target), rows.mean())
    torch.testing.assert_close(loss(logits, target, reduction="sum"), rows.sum())
    torch.testing.assert_close(loss(logits[2:], target[2:], reduction="none"), rows[2:])


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("kind", ["smooth", "temper"])
def test_the_three_forms_of_a_target_give_one_loss(loss, kind: str) -> None:
    logits = example(BATCH, CLASSES)
    short, dense = mixed_labels(kind=kind)
    if not (loss is normalised_cross_entropy and kind == "temper"):
        torch.testing.assert_close(loss(logits, short), loss(logits, dense))
    plain = SoftLabels(short.label, short.gamma, kind=kind)
    if not (loss is normalised_cross_entropy and kind == "temper"):
        dense = soft_labels(short.label, short.gamma, CLASSES, kind=kind)
        torch.testing.assert_close(loss(logits, plain), loss(logits, dense))
    hot = torch.nn.functional.one_hot(short.label, CLASSES).double()
    torch.testing.assert_close(loss(logits, short.label), loss(logits, hot))


@pytest.mark.parametrize("loss", ALL)
def test_gradients_are_those_of_finite_differences(loss) -> None:
    logits, target = example(BATCH, CLASSES).requires_grad_(), soft_target(BATCH, CLASSES).requires_grad_()
    logits.data[1] = 0.25  # all probabilities equal
    assert torch.autograd.gradcheck(lambda x, y: loss(x, y, reduction="none"), (logits, target))


EDGES = {
    "equal": torch.zeros(1, 5),
    "one at the geometric mean": torch.tensor([[0.0, 1.0, -1.0, 2.0, -2.0]]),
    "nearly equal": torch.tensor([[0.0, 1e-4, -1e-4, 3e-4, -3e-4]]),
    "huge": torch.tensor([[6e4, 0.0, -6e4, 1.0, 2.0]]),
    "all but one equal": torch.tensor([[1e3, 0.0, 0.0, 0.0, 0.0]]),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("loss", ALL)
def test_losses_and_gradients_are_finite_at_the_edges(loss, edge: str, dtype: torch.dtype) -> None:
    for target in (torch.tensor([0]), torch.tensor([2]), torch.zeros(1, 5), torch.full((1, 5), 0.2)):
        logits = EDGES[edge].to(dtype, copy=True).requires_grad_()
        value = loss(logits, target)
        value.backward()
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert value.isfinite()
        assert logits.grad is not None and logits.grad.isfinite().all() and logits.grad.dtype == dtype


@pytest.mark.parametrize("loss", ALL)
def test_half_precision_logits_are_summed_in_float32(loss) -> None:
    logits, target = example(64, 100).bfloat16(), soft_target(64, 100)
    expected = loss(logits.double(), target, reduction="none")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = loss(logits, target.float(), reduction="none")
    torch.testing.assert_close(rows.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ALL)
def test_they_compile_without_a_graph_break(loss) -> None:
    logits, (short, _) = example(BATCH, CLASSES), mixed_labels()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, short), loss(logits, short))


# --- normalised -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 10, 200])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 10.0])
def test_the_normaliser_is_the_integral_over_all_smoothed_labels(classes: int, scale: float) -> None:
    logits = example(3, classes, scale=scale)
    # A target of zero leaves the normaliser alone.
    log_z = normalised_cross_entropy(logits, torch.zeros_like(logits), reduction="none")
    np.testing.assert_allclose(log_z.numpy(), quadrature(logits), rtol=1e-11, atol=1e-12)
    log_z = normalised_cross_entropy(logits.float(), torch.zeros_like(logits), reduction="none")
    np.testing.assert_allclose(log_z.numpy(), quadrature(logits.float()), rtol=2e-6, atol=2e-6)


def test_it_is_cross_entropy_plus_the_normaliser_as_the_paper_writes_it() -> None:
    logits, target = example(BATCH, CLASSES), soft_target(BATCH, CLASSES)
    log_f = scipy.special.log_softmax(logits.numpy(), axis=1)
    log_k = log_f.mean(1, keepdims=True)
    z = ((np.exp(log_k) - np.exp(log_f)) / (log_k - log_f)).sum(1)
    expected = -(target.numpy() * log_f).sum(1) + np.log(z)
    np.testing.assert_allclose(normalised_cross_entropy(logits, target, reduction="none").numpy(), expected, rtol=1e-12)


def test_the_series_and_the_closed_form_meet() -> None:
    # Of two classes d is ± half the difference of the logits: both sides of |d| = 1, in value and slope.
    logits = torch.tensor([[2.0 - 5e-14, 0.0], [2.0 + 5e-14, 0.0]], dtype=torch.float64, requires_grad=True)
    rows = normalised_cross_entropy(logits, torch.zeros(2, 2), reduction="none")
    (slopes,) = torch.autograd.grad(rows.sum(), logits)
    assert abs(rows[0] - rows[1]) < 1e-13
    assert (slopes[0] - slopes[1]).abs().max() < 5e-13


def test_a_confident_prediction_leaves_a_normaliser_near_the_reciprocal_of_its_logarithm() -> None:
    # f_1 = 1 and ln κ = -x/2: Z is 1/(x/2) and what the other class adds, e^-x/2 / (x/2).
    log_z = normalised_cross_entropy(torch.tensor([[1e4, 0.0]]), torch.zeros(1, 2))
    assert log_z.item() == pytest.approx(-np.log(5e3), rel=1e-6)


def test_tempered_labels_have_no_such_density() -> None:
    with pytest.raises(ValueError, match=r"target must be of kind 'smooth', .* got 'temper'"):
        normalised_cross_entropy(example(BATCH, CLASSES), mixed_labels(kind="temper")[0])


# --- binary -----------------------------------------------------------------------------------------------------------


def test_binary_cross_entropy_is_the_mean_over_the_classes() -> None:
    logits, target = example(BATCH, CLASSES), soft_target(BATCH, CLASSES)
    p, y = logits.numpy(), target.numpy()
    expected = -(y * scipy.special.log_expit(p) + (1 - y) * scipy.special.log_expit(-p)).mean(1)
    np.testing.assert_allclose(binary_cross_entropy(logits, target, reduction="none").numpy(), expected, rtol=1e-13)


def test_binary_cross_entropy_keeps_the_tail_of_a_sure_prediction() -> None:
    assert binary_cross_entropy(torch.tensor([[50.0]]), torch.tensor([[1.0]])).item() == pytest.approx(np.exp(-50.0))


def test_binary_targets_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"target must lie in \[0, 1\], got 1.5 at position \(0, 1\)"):
        binary_cross_entropy(torch.zeros(1, 2), torch.tensor([[0.5, 1.5]]))


# --- augmented likelihood ---------------------------------------------------------------------------------------------


def log_likelihoods(logits: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    return (target.numpy() * scipy.special.log_softmax(logits.numpy(), axis=-1)).sum(-1)


def test_each_kind_is_its_formula() -> None:
    logits, target = example(DRAWS, BATCH, CLASSES), soft_target(DRAWS, BATCH, CLASSES)
    p = np.exp(log_likelihoods(logits, target))
    mean = p.mean(0)
    variance = ((p - mean) ** 2).sum(0) / (DRAWS * (DRAWS - 1))
    expected = {
        "jensen": np.log(p).mean(0),
        "geometric": np.log(np.prod(p ** (1 / DRAWS), axis=0)),
        "log_mean": np.log(mean),
        "corrected": np.log(mean) + variance / (2 * mean**2),
    }
    assert losses.LIKELIHOODS == tuple(expected)
    for kind, value in expected.items():
        result = augmented_likelihood(logits, target, kind=kind, reduction="none")
        np.testing.assert_allclose(result.numpy(), -value, rtol=1e-12, err_msg=kind)
        torch.testing.assert_close(augmented_likelihood(logits, target, kind=kind), result.mean())
        torch.testing.assert_close(augmented_likelihood(logits, target, kind=kind, reduction="sum"), result.sum())


def test_the_jensen_bound_is_soft_cross_entropy_over_all_draws() -> None:
    logits, target = example(DRAWS, BATCH, CLASSES), soft_target(DRAWS, BATCH, CLASSES)
    expected = soft_cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
    torch.testing.assert_close(augmented_likelihood(logits, target), expected)


@pytest.mark.parametrize("draws", [2, 4, 8])
def test_the_correction_takes_away_most_of_the_bias_of_the_log_mean(draws: int) -> None:
    # Draws with two equally likely outcomes: every batch of draws can be had, so the expectation is exact.
    outcomes = example(2, CLASSES, scale=0.7)
    label = torch.tensor([1])
    truth = torch.softmax(outcomes, 1)[:, 1].mean().log()
    batches = torch.stack([outcomes[list(which)] for which in itertools.product((0, 1), repeat=draws)], 1)

    def bias(kind: str) -> torch.Tensor:
        return -augmented_likelihood(batches, label.expand(batches.shape[1]), kind=kind) - truth

    assert bias("jensen") < bias("log_mean") < -1e-3
    assert abs(bias("corrected")) < 0.25 * abs(bias("log_mean"))


def test_draws_of_an_image_come_from_as_many_epochs_of_its_mollification() -> None:
    import fastmoll

    mollify, epoch = fastmoll.Mollify(CLASSES, seed=2), 7
    images, index = example(64, 3, 8, 8).float(), torch.arange(64)
    labels = soft_target(64, CLASSES).float()  # of images that were mixed before
    draws = [mollify(images, labels, index, epoch * DRAWS + m) for m in range(DRAWS)]
    role, t = zip(*[mollify.draw(index, epoch * DRAWS + m) for m in range(DRAWS)], strict=True)
    assert (torch.stack(role) == role[0]).all(0).float().mean() < 0.3  # by chance in 1 of 9
    assert abs(np.corrcoef(torch.stack(t)[:2])[0, 1]) < 0.4  # three standard deviations
    target = torch.stack([y for _, y in draws])
    torch.testing.assert_close(target.sum(-1), torch.ones(DRAWS, 64))
    logits = torch.stack([x.flatten(1)[:, :CLASSES] for x, _ in draws])
    rows = log_likelihoods(logits, target)
    expected = -(scipy.special.logsumexp(rows, axis=0) - np.log(DRAWS))
    result = augmented_likelihood(logits, target, kind="log_mean", reduction="none")
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", losses.LIKELIHOODS)
def test_one_draw_is_soft_cross_entropy(kind: str) -> None:
    logits, target = example(1, BATCH, CLASSES), soft_target(BATCH, CLASSES)
    torch.testing.assert_close(augmented_likelihood(logits, target, kind=kind), soft_cross_entropy(logits[0], target))


@pytest.mark.parametrize("kind", losses.LIKELIHOODS)
def test_a_target_may_be_one_an_image_or_one_a_draw(kind: str) -> None:
    logits = example(DRAWS, BATCH, CLASSES)

    def rows(target: torch.Tensor | SoftLabels) -> torch.Tensor:
        return augmented_likelihood(logits, target, kind=kind, reduction="none")

    dense = soft_target(DRAWS, BATCH, CLASSES)
    torch.testing.assert_close(rows(dense.flatten(0, 1)), rows(dense))
    torch.testing.assert_close(rows(dense[0]), rows(dense[:1].expand(DRAWS, -1, -1)))
    classes = torch.arange(DRAWS * BATCH).view(DRAWS, BATCH) % CLASSES
    hot = torch.nn.functional.one_hot(classes, CLASSES).double()
    torch.testing.assert_close(rows(classes), rows(hot))
    torch.testing.assert_close(rows(classes.flatten()), rows(hot))
    torch.testing.assert_close(rows(classes[0]), rows(hot[0]))
    short, written = mixed_labels(DRAWS * BATCH)
    torch.testing.assert_close(rows(short), rows(written))
    by_draw = SoftLabels(*(part.view(DRAWS, BATCH) for part in short[:4]), kind=short.kind)  # type: ignore[union-attr]
    torch.testing.assert_close(rows(by_draw), rows(written))
    one, written = mixed_labels(BATCH, "temper")
    torch.testing.assert_close(rows(one), rows(written))


@pytest.mark.parametrize("kind", losses.LIKELIHOODS)
def test_the_gradient_of_a_likelihood_is_that_of_finite_differences(kind: str) -> None:
    logits, target = example(DRAWS, BATCH, CLASSES).requires_grad_(), soft_target(DRAWS, BATCH, CLASSES)
    logits.data[:, 0] = logits.data[0, 0]  # draws that are all the same
    assert torch.autograd.gradcheck(lambda x: augmented_likelihood(x, target, kind=kind, reduction="none"), logits)


@pytest.mark.parametrize("kind", losses.LIKELIHOODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_likelihoods_of_impossible_labels_are_finite(kind: str, dtype: torch.dtype) -> None:
    # The likelihoods themselves underflow to 0, in one draw or in all.
    for gain in (torch.tensor([6e4, 6e4, 6e4]), torch.tensor([6e4, 0.0, 6e4])):
        logits = torch.zeros(DRAWS, 1, CLASSES)
        logits[:, 0, 0] = gain
        logits = logits.to(dtype, copy=True).requires_grad_()
        value = augmented_likelihood(logits, torch.tensor([1]), kind=kind)
        value.backward()
        assert value.isfinite() and value > 0
        assert logits.grad is not None and logits.grad.isfinite().all() and logits.grad.dtype == dtype


def test_a_likelihood_compiles_without_a_graph_break() -> None:
    logits, (short, _) = example(DRAWS, BATCH, CLASSES), mixed_labels(DRAWS * BATCH)
    compiled = torch.compile(augmented_likelihood, fullgraph=True, backend="eager")
    expected = augmented_likelihood(logits, short, kind="corrected")
    torch.testing.assert_close(compiled(logits, short, kind="corrected"), expected)


# --- bad input --------------------------------------------------------------------------------------------------------

L2, L3, Y = torch.zeros(4, 5), torch.zeros(3, 4, 5), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize(
    ("logits", "target", "reduction", "message"),
    [
        (L2[0], Y, "mean", r"logits must have shape \(B, K\), got \(5,\)"),
        (L2.long(), Y, "mean", "logits must be .* got torch.int64"),
        (L2, torch.zeros(4, 6), "mean", r"target must have shape \(4, 5\), got \(4, 6\)"),
        (L2, Y[:3], "mean", r"target must have shape \(4\), got \(3,\)"),
        (L2, Y + 5, "mean", r"target must lie in \[0, 5\), got 5 at position 0"),
        (L2, torch.full((4, 5), -0.5), "mean", "target must be finite and not negative, got -0.5"),
        (L2, SoftLabels(Y, torch.zeros(3)), "mean", r"gamma must have shape \(4\), got \(3,\)"),
        (L2, SoftLabels(Y, torch.full((4,), 2.0)), "mean", r"gamma must lie in \[0, 1\], got 2"),
        (L2, [0, 1, 2, 3], "mean", "target must be a torch.Tensor, got list"),
        (L2, Y, "median", "reduction must be one of .* got 'median'"),
    ],
)
def test_bad_arguments_are_named(loss, logits, target, reduction: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(logits, target, reduction=reduction)


@pytest.mark.parametrize(
    ("logits", "target", "options", "message"),
    [
        (L2, Y, {}, r"logits must have shape \(M, B, K\) with M >= 1, got \(4, 5\)"),
        (L3[:0], Y, {}, r"logits must have shape \(M, B, K\) with M >= 1, got \(0, 4, 5\)"),
        ([1.0], Y, {}, "logits must have .* got list"),
        (L3.long(), Y, {}, "logits must be .* got torch.int64"),
        (L3, Y[:3], {}, r"target must have shape \(4\), \(3, 4\) or \(12\), got \(3,\)"),
        (L3, torch.zeros(4, 3, 5), {}, r"target must have shape \(4, K\), \(3, 4, K\) or \(12, K\), got \(4, 3, 5\)"),
        (L3, torch.tensor(0.5), {}, r"target must have shape .* got \(\)"),
        (L3, torch.zeros(3, 4, 6), {}, r"target must have shape \(12, 5\), got \(12, 6\)"),
        (L3, Y - 1, {}, r"target must lie in \[0, 5\), got -1"),
        (L3, SoftLabels(Y, torch.zeros(5)), {}, r"gamma must have shape .* got \(5,\)"),
        (L3, SoftLabels(Y, 0.5), {}, "gamma must be a torch.Tensor, got float"),
        (L3, SoftLabels(Y, torch.zeros(4), partner=Y), {}, "lam must be given together with partner"),
        (L3, "cat", {}, "target must be a torch.Tensor, got str"),
        (L3, Y, {"kind": "median"}, "kind must be one of 'jensen', .* got 'median'"),
        (L3, Y, {"reduction": "median"}, "reduction must be one of .* got 'median'"),
    ],
)
def test_bad_arguments_of_a_likelihood_are_named(logits, target, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        augmented_likelihood(logits, target, **options)
