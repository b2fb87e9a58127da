"""Soft cross-entropy against a float64 log-softmax, forwards and backwards."""

import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F

from fastmoll.kernels.soft_cross_entropy import soft_cross_entropy, soft_cross_entropy_short
from fastmoll.kernels.soft_labels import SoftLabels, soft_labels


def example(batch=6, classes=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(batch, classes, generator=generator, dtype=torch.float64)
    target = torch.rand(batch, classes, generator=generator, dtype=torch.float64)
    return logits.to(dtype), target / target.sum(1, keepdim=True)


def by_scipy(logits, target):
    return -(target.numpy() * scipy.special.log_softmax(logits.double().numpy(), axis=1)).sum(1)


def test_it_is_the_formula():
    logits, target = example()
    rows = by_scipy(logits, target)
    np.testing.assert_allclose(soft_cross_entropy(logits, target, reduction="none").numpy(), rows, rtol=1e-13)
    assert soft_cross_entropy(logits, target, reduction="sum").item() == pytest.approx(rows.sum(), rel=1e-13)
    assert soft_cross_entropy(logits, target).item() == pytest.approx(rows.mean(), rel=1e-13)


def test_classes_are_one_hot_targets():
    logits, _ = example()
    labels = torch.tensor([0, 10, 3, 3, 7, 1])
    dense = torch.nn.functional.one_hot(labels, 11).double()
    for reduction in ("mean", "sum", "none"):
        torch.testing.assert_close(
            soft_cross_entropy(logits, labels, reduction=reduction),
            soft_cross_entropy(logits, dense, reduction=reduction),
        )


def test_the_gradient_is_softmax_times_mass_minus_target():
    logits, target = example()
    target = target * torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.1], dtype=torch.float64).unsqueeze(1)
    logits.requires_grad_()
    soft_cross_entropy(logits, target, reduction="sum").backward()
    expected = torch.softmax(logits.detach(), 1) * target.sum(1, keepdim=True) - target
    torch.testing.assert_close(logits.grad, expected, atol=1e-13, rtol=0)


def test_tempered_targets_scale_the_loss():
    logits, target = example()
    torch.testing.assert_close(
        soft_cross_entropy(logits, 0.3 * target, reduction="none"),
        0.3 * soft_cross_entropy(logits, target, reduction="none"),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_summed_in_float32(dtype):
    logits, target = example(16, 1000, dtype)
    result = soft_cross_entropy(logits, target.float(), reduction="none")
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), by_scipy(logits, target.float().double()), rtol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(soft_cross_entropy(logits, target.float(), reduction="none"), result)


def test_half_precision_logits_get_half_precision_gradients():
    logits, target = example(dtype=torch.bfloat16)
    soft_cross_entropy(logits.requires_grad_(), target.float()).backward()
    assert logits.grad.dtype == torch.bfloat16


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    assert soft_cross_entropy(logits, torch.tensor([0])).item() == 0.0
    assert soft_cross_entropy(logits, torch.tensor([[0.0, 0.5, 0.5]])).item() == pytest.approx(1.5e4)


def test_an_empty_batch_has_no_losses():
    logits = torch.empty(0, 5)
    assert soft_cross_entropy(logits, torch.empty(0, 5), reduction="none").shape == (0,)
    assert soft_cross_entropy(logits, torch.empty(0, dtype=torch.int64), reduction="sum").item() == 0.0


@pytest.mark.parametrize("kind", ["smooth", "temper"])
@pytest.mark.parametrize("mixed", [False, True])
def test_labels_in_short_form_give_the_loss_and_gradient_of_the_same_labels_written_out(kind, mixed):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 5, dtype=torch.float64, generator=generator)
    label, partner = torch.randint(5, (2, 8), generator=generator)
    gamma, lam = torch.rand(2, 8, dtype=torch.float64, generator=generator)
    y = F.one_hot(label, 5).double()
    if mixed:
        y = lam[:, None] * y + (1 - lam[:, None]) * F.one_hot(partner, 5)
    short = SoftLabels(label, gamma, *((partner, lam) if mixed else ()), kind=kind)
    dense = (1 - gamma[:, None]) * y + (gamma[:, None] / 5 if kind == "smooth" else 0)
    results = []
    for target in (short, dense):
        x = logits.clone().requires_grad_()
        loss = soft_cross_entropy(x, target)
        results.append([loss.detach(), *torch.autograd.grad(loss, x)])
    torch.testing.assert_close(*results, atol=1e-14, rtol=0)


def test_it_compiles_without_a_graph_break():
    logits, target = example(dtype=torch.float32)
    compiled = torch.compile(soft_cross_entropy, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(logits, target), soft_cross_entropy(logits, target))
    with pytest.raises(RuntimeError, match="target must be finite and not negative"):
        compiled(logits, -target)


L = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("logits", "target", "reduction", "message"),
    [
        (L, torch.zeros(2, 4), "mean", r"target must have shape \(2, 3\), got \(2, 4\)"),
        (L, torch.zeros(1, 3), "mean", r"target must have shape \(2, 3\), got \(1, 3\)"),
        (L, torch.tensor([0]), "mean", r"target must have shape \(2\), got \(1,\)"),
        (L, torch.tensor([0, 3]), "mean", r"target must lie in \[0, 3\), got 3 at position 1"),
        (L, torch.tensor([0, -100]), "mean", "target must lie .* got -100 at position 1"),
        (L, torch.tensor([0.0, 1.0]), "mean", "target must be torch.int64, got torch.float32"),
        (L, torch.zeros(2, 3, dtype=torch.int64), "mean", "target .* got torch.int64"),
        (L, torch.tensor([[1.0, 0.0, 0.0], [0.0, -0.1, 0.0]]), "mean", r"target .* at position \(1, 1\)"),
        (L, torch.full((2, 3), float("nan")), "mean", "target .* got nan"),
        (L[0], torch.tensor([0]), "mean", r"logits must have shape \(B, K\), got \(3,\)"),
        (L.long(), torch.tensor([0, 1]), "mean", "logits .* got torch.int64"),
        (L, torch.tensor([0, 1]), "median", "reduction must be one of 'mean', 'sum', 'none', got 'median'"),
        (L, [0, 1], "mean", "target must be a torch.Tensor, got list"),
    ],
)
def test_bad_arguments_are_named(logits, target, reduction, message):
    with pytest.raises(ValueError, match=message):
        soft_cross_entropy(logits, target, reduction=reduction)


@pytest.mark.gpu
def test_a_gpu_gives_the_loss_of_the_cpu_without_waiting():
    logits, target = example(64, 1000, torch.bfloat16)
    target = target.float()
    gpu, target_gpu = logits.cuda(), target.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = soft_cross_entropy(gpu, target_gpu, reduction="none")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(result.cpu(), soft_cross_entropy(logits, target, reduction="none"), atol=0, rtol=1e-5)


# The short form.


def short_example(batch=7, classes=11):
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(batch, classes, generator=generator, dtype=torch.float64)
    label, partner = torch.randint(classes, (2, batch), generator=generator)
    partner[0] = label[0]
    gamma, lam = torch.rand(2, batch, generator=generator, dtype=torch.float64)
    gamma[1], gamma[2], lam[3], lam[4] = 0.0, 1.0, 0.0, 1.0
    return logits, label, gamma, partner, lam


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", ["smooth", "temper"])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_short_form_is_the_dense_form(mixed, kind, reduction):
    logits, label, gamma, partner, lam = short_example()
    y = torch.nn.functional.one_hot(label, 11).double()
    if mixed:
        y = lam.unsqueeze(1) * y + (1 - lam).unsqueeze(1) * torch.nn.functional.one_hot(partner, 11)
    target = soft_labels(y, gamma, 11, kind=kind)
    pair = {"partner": partner, "lam": lam} if mixed else {}
    results = []
    for loss in (
        lambda x: soft_cross_entropy(x, target, reduction=reduction),
        lambda x: soft_cross_entropy_short(x, label, gamma, kind=kind, reduction=reduction, **pair),
    ):
        x = logits.clone().requires_grad_()
        value = loss(x)
        (value * torch.arange(1.0, 8.0)[: value.numel()]).sum().backward()
        results.append((value.detach(), x.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-12)


def test_the_short_form_sums_half_precision_logits_in_float32():
    logits, label, gamma, partner, lam = short_example()
    arguments = {"partner": partner, "lam": lam.float(), "reduction": "none"}
    result = soft_cross_entropy_short(logits.bfloat16(), label, gamma.float(), **arguments)
    exact = soft_cross_entropy_short(logits.bfloat16().double(), label, gamma.float().double(), **arguments)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact, atol=0, rtol=1e-6)


Y, G = torch.zeros(2, dtype=torch.int64), torch.zeros(2)


@pytest.mark.parametrize(
    ("label", "gamma", "more", "message"),
    [
        (torch.tensor([0, 3]), G, {}, r"label must lie in \[0, 3\), got 3 at position 1"),
        (Y[:1], G, {}, r"label must have shape \(2\), got \(1,\)"),
        (Y.int(), G, {}, "label must be torch.int64, got torch.int32"),
        (Y, torch.tensor([0.0, 1.5]), {}, "gamma must lie .* got 1.5 at position 1"),
        (Y, G, {"partner": Y}, "lam must be given together with partner, got None"),
        (Y, G, {"lam": G}, "partner must be given together with lam, got None"),
        (Y, G, {"lam": G, "partner": Y - 1}, "partner must lie .* got -1"),
        (Y, G, {"lam": G - 0.5, "partner": Y}, "lam must lie .* got -0.5"),
        (Y, G, {"kind": "hard"}, "kind must be one of 'smooth', 'temper', got 'hard'"),
        (Y, G, {"reduction": "max"}, "reduction must be .* got 'max'"),
    ],
)
def test_bad_short_arguments_are_named(label, gamma, more, message):
    with pytest.raises(ValueError, match=message):
        soft_cross_entropy_short(L, label, gamma, **more)
