"""``Mollify`` with schedules of one's own, or labels left alone."""

import copy
import functools
import pickle

import pytest
import torch
from mollify_batches import CLASSES, batch, half_of_noise, linear, square_root

from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, NOISE, PURE_NOISE
from fastmoll.kernels.heat_blur import heat_blur
from fastmoll.kernels.soft_labels import soft_labels
from fastmoll.mollify import Mollify


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.usefixtures("triton_interpreter")
def test_kind_none_mollifies_images_and_leaves_labels_alone(backend):
    pytest.importorskip("triton")
    images, labels, index = batch()
    want, _ = Mollify(CLASSES, backend=backend)(images, labels, index)
    out, targets = Mollify(CLASSES, kind="none", backend=backend)(images, labels, index)
    assert torch.equal(out, want)
    assert torch.equal(targets, torch.nn.functional.one_hot(labels, CLASSES).float())
    _, short = Mollify(CLASSES, kind="none", backend=backend, targets="short")(images, labels, index)
    assert torch.equal(short.label, labels) and not short.gamma.any()
    soft = torch.rand(24, CLASSES)
    assert torch.equal(Mollify(CLASSES, kind="none", backend=backend)(images, soft, index)[1], soft)


def test_a_quantile_function_takes_the_place_of_the_beta_distribution():
    index = torch.arange(5000)
    role, t = Mollify(CLASSES, temperature=square_root, seed=6).draw(index, 2)
    want_role, want = Mollify(CLASSES, beta=(2.0, 1.0), seed=6).draw(index, 2)
    assert torch.equal(role, want_role)
    torch.testing.assert_close(t, want, atol=1e-6, rtol=0)
    # And of those that have a formula, too.
    constant = Mollify(CLASSES, (0, 1, 1), temperature=lambda u: torch.full_like(u, 0.25)).draw(index)[1]
    torch.testing.assert_close(constant, torch.full_like(constant, 0.25), atol=1e-7, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.usefixtures("triton_interpreter")
def test_schedules_can_be_the_users_own_functions(targets, backend):
    pytest.importorskip("triton")
    options = {"sigma_min": 1.0, "sigma_max": 6.0, "roles": (1, 1, 1, 1), "seed": 2, "targets": targets}
    own = {"temperature": square_root, "label_decay": half_of_noise, "blur_scale": linear}
    mollify = Mollify(CLASSES, backend=backend, **own, **options)
    images, labels, index = batch(height=16, width=16)
    out, made = mollify(images, labels, index, 1)
    role, t = Mollify(CLASSES, beta=(2.0, 1.0), **options).draw(index, 1)
    want = images.clone()
    for i, kind in enumerate(role.tolist()):
        one = slice(i, i + 1)
        if kind in (NOISE, PURE_NOISE):
            want[one] = cosine_noise(images[one], t[one], seed=2, epoch=1, index=index[one])
        if kind == BLUR:
            scale = float(linear(t[i]))
            want[one] = heat_blur(images[one], torch.zeros(1), sigma_min=scale, sigma_max=scale)
    torch.testing.assert_close(out, want, atol=2e-5 if backend == "torch" else 1e-4, rtol=0)
    gamma = half_of_noise(role, t)
    if targets == "dense":
        torch.testing.assert_close(made, soft_labels(labels, gamma, CLASSES), atol=1e-6, rtol=0)
    else:
        torch.testing.assert_close(made.gamma, gamma, atol=1e-6, rtol=0)


def test_schedules_survive_copies_pickles_and_are_shown_the_same_in_every_process():
    images, labels, index = batch()
    mollify = Mollify(CLASSES, temperature=square_root, label_decay=half_of_noise, mix="mixup", mix_alpha=0.3)
    want, want_targets = mollify(images, labels, index)
    for other in (pickle.loads(pickle.dumps(mollify)), copy.deepcopy(mollify), copy.copy(mollify)):
        out, targets = other(images, labels, index)
        assert torch.equal(out, want) and torch.equal(targets, want_targets)
    assert repr(mollify).endswith(
        "mix='mixup', mix_alpha=0.3, draws=1, temperature=mollify_batches.square_root, "
        "label_decay=mollify_batches.half_of_noise, blur_scale=None)"
    )
    assert " at 0x" not in repr(Mollify(CLASSES, temperature=functools.partial(torch.pow, exponent=0.5)))


def test_functions_may_work_in_place():
    images, labels, index = batch()
    plain = Mollify(CLASSES, label_decay=lambda role, t: t * 0.5, blur_scale=lambda t: 0.3 + 2 * t)
    in_place = Mollify(CLASSES, label_decay=lambda role, t: t.mul_(0.5), blur_scale=lambda t: t.mul_(2).add_(0.3))
    for a, b in zip(plain(images, labels, index), in_place(images, labels, index), strict=True):
        assert torch.equal(a, b)


def test_a_decay_with_parameters_sends_no_gradient():
    images, labels, index = batch()
    weight = torch.tensor(0.5, requires_grad=True)
    _, targets = Mollify(CLASSES, label_decay=lambda role, t: weight * t)(images, labels, index)
    assert not targets.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_decay": lambda role, t: t + 1.0}, r"label_decay\(role, t\) must lie in \[0, 1\], got"),
        ({"label_decay": lambda role, t: t[:3]}, r"label_decay\(role, t\) must have shape \(24\), got \(3,\)"),
        ({"label_decay": lambda role, t: 0.5}, r"label_decay\(role, t\) must be a torch.Tensor, got float"),
        ({"blur_scale": lambda t: t + 100.0}, r"blur_scale\(t\) must lie in \[sigma_min, sigma_max\] = \[0.3, 10.0\]"),
        ({"blur_scale": lambda t: t.sum()}, r"blur_scale\(t\) must have shape \(24\), got \(\)"),
    ],
)
def test_results_of_the_users_functions_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mollify(CLASSES, **arguments)(*batch())
