"""Draws and labels in one launch against the reference operations: in Triton's interpreter, or on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from fastmoll.kernels.draw import draw
from fastmoll.kernels.draw_triton import draw_batch
from fastmoll.kernels.soft_labels import label_decay, soft_labels
from fastmoll.mollify import beta_quantiles

pytestmark = pytest.mark.usefixtures("triton_interpreter", "nan_memory")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, CLASSES = 48, 11


def batch(classes=CLASSES):
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(2**48, (BATCH,), generator=generator)
    labels = torch.randint(classes, (BATCH,), generator=generator)
    partner = torch.randperm(BATCH, generator=generator)
    lam = torch.rand(BATCH, generator=generator)
    return tuple(tensor.to(DEVICE) for tensor in (index, labels, partner, lam))


SETTINGS = [
    {"roles": (1, 1, 1), "beta": (1.0, 2.0)},
    {"roles": (1, 1, 1, 1), "beta": (1.0, 0.3)},
    {"roles": (0, 1, 2, 1), "beta": (2.0, 3.0)},
    {"roles": (1, 2, 1), "beta": (0.5, 0.5)},
    {"roles": (0, 0, 0, 1), "beta": (1.0, 1.0)},
]
KEYS = [{}, {"seed": 1, "epoch": 1}, {"seed": 2**64 - 5, "epoch": 2**24 - 1}, {"seed": 2**63 + 2**31, "epoch": 7}]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_roles_are_those_of_the_reference_exactly_and_temperatures_to_float32(setting, key):
    index, *_ = batch()
    a, b = setting["beta"]
    quantiles = None if a == 1 else beta_quantiles(a, b).to(DEVICE)
    role, t = draw(index, quantiles=quantiles, **setting, **key)
    drawn = draw_batch(index, quantiles=quantiles, **setting, **key)
    assert torch.equal(drawn.role, role)
    assert drawn.role.dtype == torch.int8
    torch.testing.assert_close(drawn.t, t, atol=1e-7, rtol=0)
    assert drawn.partner_label is drawn.target is None


@pytest.mark.parametrize("slopes", [(1.0, 1.0), (0.0, 0.0), (2.5, 0.5), (0.5, 2.0)])
def test_label_decay_is_that_of_the_reference(slopes):
    index, *_ = batch()
    slopes = dict(zip(("k_noise", "k_blur"), slopes, strict=True))
    drawn = draw_batch(index, roles=(1, 1, 1, 1), **slopes)
    expected = label_decay(drawn.role, drawn.t.double(), **slopes)
    torch.testing.assert_close(drawn.gamma.double(), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("kind", ["smooth", "temper"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("classes", [2, CLASSES, 1500])
def test_targets_are_those_of_the_reference(classes, soft, mixed, kind):
    index, labels, partner, lam = (tensor[:40] for tensor in batch(classes))
    partner = partner % 40
    y = torch.nn.functional.one_hot(labels, classes).float()
    if soft:
        y = labels = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    pair = {}
    if mixed:
        pair = {"partner": partner, "lam": lam}
        y = lam.unsqueeze(1) * y + (1 - lam).unsqueeze(1) * y[partner]
    drawn = draw_batch(index, labels=labels, num_classes=classes, kind=kind, **pair)
    expected = soft_labels(y.double(), drawn.gamma.double(), classes, kind=kind)
    torch.testing.assert_close(drawn.target.double(), expected, atol=3e-7, rtol=0)


def test_the_short_form_gathers_the_partners_classes_and_writes_no_targets():
    index, labels, partner, lam = batch()
    drawn = draw_batch(index, labels=labels, partner=partner, lam=lam, num_classes=CLASSES, dense=False)
    assert drawn.target is None
    assert torch.equal(drawn.partner_label, labels[partner])


def test_a_draw_depends_on_its_key_alone():
    index, *_ = batch()
    drawn = draw_batch(index, 5, seed=3)
    one = draw_batch(index[33:34], 5, seed=3)
    assert (one.role[0], one.t[0], one.gamma[0]) == (drawn.role[33], drawn.t[33], drawn.gamma[33])


def test_any_integer_type_and_stride_of_ids_will_do():
    index = torch.arange(20, device=DEVICE)
    expected = draw_batch(index)
    for same in (index.int(), index.repeat_interleave(2)[::2], index.to(torch.uint8)):
        assert torch.equal(draw_batch(same).t, expected.t)


def test_an_empty_batch_draws_nothing():
    empty = torch.empty(0, dtype=torch.int64, device=DEVICE)
    drawn = draw_batch(empty, labels=empty, num_classes=5)
    assert drawn.role.shape == drawn.t.shape == drawn.gamma.shape == (0,)
    assert drawn.target.shape == (0, 5)


N = torch.arange(4)
F = torch.zeros(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"roles": (1, 1)}, "roles must be 3"),
        ({"beta": (0.0, 1.0)}, r"beta\[0\] .* got 0.0"),
        ({"beta": (2.0, 1.0)}, r"quantiles must be given for beta = \(2.0, 1.0\)"),
        ({"beta": (2.0, 1.0), "quantiles": F}, "quantiles .* got torch.float32"),
        ({"beta": (2.0, 1.0), "quantiles": F[:1].double()}, r"len\(quantiles\) .* got 1"),
        ({"seed": 2**64}, "seed .* got"),
        ({"epoch": -1}, "epoch .* got -1"),
        ({"k_noise": -1.0}, "k_noise .* got -1.0"),
        ({"k_blur": float("nan")}, "k_blur .* got nan"),
        ({"kind": "hard"}, "kind must be one of"),
        ({"labels": N}, "num_classes must be given with labels, got None"),
        ({"labels": N, "num_classes": 1}, "num_classes .* got 1"),
        ({"labels": N, "num_classes": 3}, r"labels must lie in \[0, 3\), got 3 at position 3"),
        ({"labels": torch.ones(4, 3), "num_classes": 3, "dense": False}, "dense must be True for soft labels"),
        ({"partner": N}, "lam must be given together with partner, got None"),
        ({"lam": F}, "partner must be given together with lam, got None"),
        ({"partner": N, "lam": F}, "labels must be given with partner, got None"),
        ({"labels": N, "num_classes": 4, "partner": N + 1, "lam": F}, r"partner must lie in \[0, 4\), got 4"),
        ({"labels": N, "num_classes": 4, "partner": N, "lam": F + 2}, "lam must lie .* got 2.0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_batch(N, **arguments)


@pytest.mark.parametrize("classes", [CLASSES, 1500])
def test_without_validation_bad_values_give_wrong_rows_and_reach_nothing_else(classes):
    bad = torch.tensor([-1, classes, 2**40, -(2**62), 2, 2**62, 0])
    index, labels, lam = torch.arange(7), torch.tensor([0, 1, 0, 1, 0, 1, 0]), torch.full((7,), 0.25)
    index, labels, lam, bad = (tensor.to(DEVICE) for tensor in (index, labels, lam, bad))
    fixed = {"roles": (1, 0, 0), "num_classes": classes, "validate": False}
    drawn = draw_batch(index, labels=bad, partner=index.flip(0), lam=lam, **fixed)
    assert torch.equal(drawn.partner_label, bad.flip(0))
    one_hot = (bad.unsqueeze(1) == torch.arange(classes, device=DEVICE)).float()
    torch.testing.assert_close(drawn.target, 0.25 * one_hot + 0.75 * one_hot.flip(0))
    for y in (labels, one_hot):
        drawn = draw_batch(index, labels=y, partner=bad, lam=lam, **fixed)
        same = draw_batch(index, labels=y, partner=bad.clamp(0, 6), lam=lam, **fixed)
        assert torch.equal(drawn.target, same.target)
    drawn = draw_batch(bad, **fixed | {"roles": (1, 1, 1, 1)})
    assert ((drawn.t >= 0) & (drawn.t <= 1) & (drawn.gamma >= 0) & (drawn.gamma <= 1)).all()


def test_what_costs_no_wait_is_checked_without_validation_too():
    for arguments, message in [
        ({"labels": N[:3], "num_classes": 4}, r"labels must have shape \(4\), got \(3,\)"),
        ({"labels": torch.ones(4, 3), "num_classes": 4}, r"labels must have shape \(4, 4\), got \(4, 3\)"),
        ({"labels": N, "num_classes": 4, "partner": N.int(), "lam": F}, "partner must be torch.int64"),
        ({"labels": N, "num_classes": 4, "partner": N, "lam": F[:1]}, "lam must have shape"),
        ({"seed": -1}, "seed .* got -1"),
        ({"epoch": 2**24}, "epoch .* got 16777216"),
    ]:
        with pytest.raises(ValueError, match=message):
            draw_batch(N, validate=False, **arguments)
    with pytest.raises(ValueError, match=r"index must be torch.int64 .* got torch.float32"):
        draw_batch(F, validate=False)


@pytest.mark.gpu
def test_a_gpu_does_not_wait():
    index, labels, partner, lam = batch()
    arguments = {"labels": labels, "partner": partner, "lam": lam, "num_classes": CLASSES}
    draw_batch(index, **arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw_batch(index, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
