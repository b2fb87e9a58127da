"""The fused loss against float64 autograd of its definition: in Triton's interpreter, or on a GPU if there is one."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from fastmoll.kernels import soft_cross_entropy as definition
from fastmoll.kernels import soft_cross_entropy_triton as fused

pytestmark = pytest.mark.usefixtures("triton_interpreter", "nan_memory")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Relative to the largest gradient of a batch: half an ulp of each dtype, twice, plus float32's own error.
GRADIENT_ERROR = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def example(batch, classes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(classes)
    logits = (4 * torch.randn(batch, classes, generator=generator)).to(dtype)
    label, partner = torch.randint(classes, (2, batch), generator=generator)
    partner[0] = label[0]
    gamma, lam = torch.rand(2, batch, generator=generator)
    gamma[0], lam[-1] = 0.0, 1.0
    return tuple(tensor.to(DEVICE) for tensor in (logits, label, partner, gamma, lam))


def losses(module, name, arguments, dtype, reduction):
    """The loss called ``name`` of one of both modules, as a function of the logits."""
    _, label, partner, gamma, lam = arguments
    if name == "classes":
        return lambda x: module.soft_cross_entropy(x, label, reduction=reduction)
    if name == "dense":
        generator = torch.Generator().manual_seed(2)
        target = torch.rand(arguments[0].shape, generator=generator).to(DEVICE).to(dtype)
        return lambda x: module.soft_cross_entropy(
            x, target.double() if x.dtype == torch.float64 else target, reduction=reduction
        )
    kind, mixed = name.split()
    pair = {"partner": partner, "lam": lam} if mixed == "mixed" else {}
    return lambda x: module.soft_cross_entropy_short(x, label, gamma, kind=kind, reduction=reduction, **pair)


def value_and_gradient(loss, logits):
    logits = logits.detach().requires_grad_()
    value = loss(logits)
    weight = torch.linspace(0.5, 2.0, value.numel(), device=logits.device).reshape(value.shape)
    (gradient,) = torch.autograd.grad((value * weight).sum(), logits)
    assert gradient.dtype == logits.dtype
    return value.detach().double(), gradient.double()


NAMES = ["classes", "dense", "smooth single", "smooth mixed", "temper single", "temper mixed"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("batch", "classes"), [(3, 2), (5, 11), (1, 1000), (2, 4096), (2, 9001)])
def test_loss_and_gradient_are_those_of_the_definition(batch, classes, dtype, name):
    arguments = example(batch, classes, dtype)
    value, gradient = value_and_gradient(losses(fused, name, arguments, dtype, "none"), arguments[0])
    exact, slope = value_and_gradient(losses(definition, name, arguments, dtype, "none"), arguments[0].double())
    torch.testing.assert_close(value, exact, atol=2e-6, rtol=1e-6)
    error = (gradient - slope).abs().max()
    if dtype == torch.float32 or DEVICE == "cuda":
        assert error <= GRADIENT_ERROR[dtype] * slope.abs().max()
    else:
        # The interpreter cuts float32 off where a card rounds: twice the error.
        assert error <= 2 * GRADIENT_ERROR[dtype] * slope.abs().max()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["classes", "dense", "smooth mixed"])
def test_reductions_are_those_of_the_definition(name, reduction):
    arguments = example(6, 37)
    value, gradient = value_and_gradient(losses(fused, name, arguments, torch.float32, reduction), arguments[0])
    exact, slope = value_and_gradient(
        losses(definition, name, arguments, torch.float32, reduction), arguments[0].double()
    )
    torch.testing.assert_close(value, exact, atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(gradient, slope, atol=2e-6, rtol=0)


def test_a_hundred_thousand_classes_work():
    arguments = example(1, 100_000, torch.bfloat16)
    value, gradient = value_and_gradient(losses(fused, "smooth mixed", arguments, torch.bfloat16, "none"), arguments[0])
    exact, slope = value_and_gradient(
        losses(definition, "smooth mixed", arguments, torch.bfloat16, "none"), arguments[0].double()
    )
    torch.testing.assert_close(value, exact, atol=0, rtol=1e-5)
    assert (gradient - slope).abs().max() <= 2**-6 * slope.abs().max()


def test_large_logits_lose_nothing():
    logits = torch.tensor([[1e4, 0.0, -1e4], [3e4, 3e4 - 1, 0.0]], device=DEVICE)
    zero = torch.zeros(2, device=DEVICE)
    label = torch.tensor([0, 1], device=DEVICE)
    expected = [0.0, 1 + np.log1p(np.exp(-1))]
    assert fused.soft_cross_entropy(logits, label, reduction="none").tolist() == pytest.approx(expected, abs=1e-6)
    dense = torch.nn.functional.one_hot(label, 3).float()
    assert fused.soft_cross_entropy(logits, dense, reduction="none").tolist() == pytest.approx(expected, abs=1e-6)
    value = fused.soft_cross_entropy_short(logits, label, zero, reduction="none")
    assert value.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["classes", "dense", "smooth mixed"])
def test_strided_logits_are_read_as_they_are(name):
    arguments = example(5, 37)
    loss = losses(fused, name, arguments, torch.float32, "none")
    expected = value_and_gradient(loss, arguments[0])
    columns = torch.full((37, 5), float("nan"), device=DEVICE).t().copy_(arguments[0])
    padded = torch.full((5, 50), float("nan"), device=DEVICE)[:, 3:40].copy_(arguments[0])
    for view in (columns, padded):
        assert not view.is_contiguous()
        torch.testing.assert_close(value_and_gradient(loss, view), expected, atol=0, rtol=0)


def test_no_gradient_is_stored_without_need():
    logits, label, _, gamma, _ = example(4, 9)[:5]
    _, gradient = fused._losses(logits, None, label, None, None, gamma, True, False)
    assert gradient.shape == (0,)
    with torch.no_grad():
        assert not fused.soft_cross_entropy_short(logits.requires_grad_(), label, gamma).requires_grad


def test_an_empty_batch_has_no_losses():
    logits = torch.empty(0, 5, device=DEVICE, requires_grad=True)
    loss = fused.soft_cross_entropy(logits, torch.empty(0, dtype=torch.int64, device=DEVICE), reduction="sum")
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.shape == (0, 5)


def test_the_operators_keep_their_promises_to_the_compiler():
    logits, label, partner, gamma, lam = example(4, 9)
    for dense in (None, torch.rand(4, 9, device=DEVICE)):
        short = (None,) * 4 if dense is not None else (label, partner, lam, gamma)
        torch.library.opcheck(fused._losses, (logits.detach().requires_grad_(), dense, *short, True, True))
    torch.library.opcheck(fused._scaled, (logits.detach(), lam))


def test_it_compiles_without_a_graph_break():
    arguments = example(4, 9)
    loss = losses(fused, "smooth mixed", arguments, torch.float32, "mean")
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        value_and_gradient(compiled, arguments[0]), value_and_gradient(loss, arguments[0]), atol=1e-7, rtol=0
    )


L, Y, G = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2)


def test_bad_arguments_are_named():
    for arguments, message in [
        ((L.double(), Y), "logits must be float16, bfloat16 or float32, got torch.float64"),
        ((L, Y + 3), r"target must lie in \[0, 3\), got 3"),
        ((L, torch.zeros(2, 3, requires_grad=True)), "target must not require grad"),
        ((L, torch.zeros(2, 4)), "target must have shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            fused.soft_cross_entropy(*arguments)
    for arguments, more, message in [
        ((L.double(), Y, G), {}, "logits must be float16, bfloat16 or float32, got torch.float64"),
        ((L, Y - 1, G), {}, "label must lie .* got -1"),
        ((L, Y, G + 2), {}, "gamma must lie .* got 2.0"),
        ((L, Y, torch.zeros(2, requires_grad=True)), {}, "gamma must not require grad"),
        ((L, Y, G), {"partner": Y, "lam": torch.zeros(2, requires_grad=True)}, "lam must not require grad"),
        ((L, Y, G), {"partner": Y}, "lam must be given together with partner"),
    ]:
        with pytest.raises(ValueError, match=message):
            fused.soft_cross_entropy_short(*arguments, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_does_not_wait(name):
    arguments = example(64, 1000, torch.bfloat16)
    loss = losses(fused, name, arguments, torch.bfloat16, "mean")
    value_and_gradient(loss, arguments[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = arguments[0].detach().requires_grad_()
        loss(logits).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
