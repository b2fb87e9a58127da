"""``Mollify``: the batch that comes out is the public operations applied role by role, and nothing else."""

import copy
import subprocess
import sys

import pytest
import torch
from mollify_batches import CLASSES, MEMORY_FORMATS, batch, expected, half_of_noise, linear, square_root
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision import tv_tensors
from torchvision.transforms import v2

import fastmoll
from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE
from fastmoll.kernels.soft_labels import label_decay
from fastmoll.mollify import Mollify

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"roles": (1, 2, 3, 4), "seed": 2**64 - 1},
        {"beta": (2.0, 0.7), "k_noise": 0.5, "k_blur": 3, "kind": "temper"},
        {"sigma_min": 1.0, "sigma_max": 4.0},
    ],
)
def test_a_batch_is_the_public_operations_applied_by_role(arguments, memory_format):
    mollify = Mollify(CLASSES, **arguments)
    images, labels, index = batch()
    images = images.to(memory_format=memory_format)
    role, want_images, want_targets = expected(mollify, images, labels, index, 3)
    assert set(role.tolist()) >= {CLEAN, NOISE, BLUR}
    out, targets = mollify(images, labels, index, 3)
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out, want_images, atol=1e-6, rtol=0)
    assert torch.equal(targets, want_targets)
    assert torch.equal(out[role == CLEAN], images[role == CLEAN])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_images_keep_their_dtype_and_targets_are_float32(dtype):
    images, labels, index = batch(dtype=dtype)
    out, targets = Mollify(CLASSES)(images, labels, index)
    assert out.dtype == dtype
    assert targets.dtype == torch.float32
    assert targets.shape == (24, CLASSES)


def test_the_input_is_not_written_to_and_not_handed_back():
    images, labels, index = batch()
    before = images.clone(), labels.clone(), index.clone()
    for roles in ((1, 1, 1), (1, 0, 0)):
        out, _ = Mollify(CLASSES, roles)(images, labels, index)
        out.zero_()
        assert all(torch.equal(a, b) for a, b in zip(before, (images, labels, index), strict=True))


def test_an_image_is_mollified_alike_in_any_batch_and_order():
    mollify = Mollify(CLASSES, seed=5)
    images, labels, index = batch()
    out, targets = mollify(images, labels, index, 2)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    again, targets_again = mollify(images[order], labels[order], index[order], 2)
    torch.testing.assert_close(again, out[order], atol=1e-6, rtol=0)
    assert torch.equal(targets_again, targets[order])
    for start in range(0, 24, 5):
        part = slice(start, start + 5)
        piece, targets_piece = mollify(images[part], labels[part], index[part], 2)
        torch.testing.assert_close(piece, out[part], atol=1e-6, rtol=0)
        assert torch.equal(targets_piece, targets[part])


def test_equal_keys_give_equal_bits_and_other_epochs_and_seeds_do_not():
    images, labels, index = batch()
    out, targets = Mollify(CLASSES)(images, labels, index, 1)
    same = Mollify(CLASSES)(images, labels, index, 1)
    assert torch.equal(same[0], out)
    assert torch.equal(same[1], targets)
    assert not torch.equal(Mollify(CLASSES)(images, labels, index, 2)[0], out)
    assert not torch.equal(Mollify(CLASSES, seed=1)(images, labels, index, 1)[0], out)


def test_zero_weight_roles_never_happen():
    images, labels, index = batch(64)
    for role, roles in ((CLEAN, (1, 0, 0)), (NOISE, (0, 1, 0)), (BLUR, (0, 0, 1)), (PURE_NOISE, (0, 0, 0, 1))):
        assert (Mollify(CLASSES, roles).draw(index)[0] == role).all()
    out, targets = Mollify(CLASSES, (0, 0, 0, 1))(images, labels, index)
    torch.testing.assert_close(targets, torch.full((64, CLASSES), 1 / CLASSES))
    torch.testing.assert_close(out, cosine_noise(images, torch.ones(64), index=index), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (7, 13)])
def test_any_height_and_width_work(shape):
    images, labels, index = batch(40, *shape)
    out, _ = Mollify(CLASSES, sigma_min=2.0)(images, labels, index)
    assert out.shape == images.shape
    assert out.isfinite().all()


@pytest.mark.parametrize("mix", [None, "mixup", "cutmix"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.usefixtures("triton_interpreter")
def test_an_empty_batch_works(backend, mix):
    pytest.importorskip("triton")
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    for targets in ("dense", "short"):
        mollify = Mollify(CLASSES, backend=backend, mix=mix, targets=targets)
        pixels = torch.empty(0, 8, 9, 3, dtype=torch.uint8, device=DEVICE)
        for out, made in (
            mollify(torch.empty(0, 3, 8, 9, device=DEVICE), none),
            mollify.from_pixels(pixels, none, mean=(0.0,) * 3, std=(1.0,) * 3),
        ):
            assert out.shape == (0, 3, 8, 9)
            assert made.shape == (0, CLASSES) if targets == "dense" else len(made.gamma) == 0


@pytest.mark.parametrize("classes", [2, 100_000])
@pytest.mark.usefixtures("triton_interpreter")
def test_two_and_a_hundred_thousand_classes_have_the_same_targets_in_every_backend(classes):
    pytest.importorskip("triton")
    images, labels = torch.zeros(4, 3, 2, 3, device=DEVICE), torch.tensor([0, classes - 1, 1, 0], device=DEVICE)
    options = {"roles": (1, 1, 1, 1), "mix": "mixup", "seed": 3}
    plain, fused = (
        Mollify(classes, backend=name, **options)(images, labels, torch.arange(4))[1] for name in ("torch", "triton")
    )
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(fused.sum(1), torch.ones(4, device=DEVICE), atol=1e-5, rtol=0)


def test_soft_labels_are_softened_further():
    mollify = Mollify(CLASSES)
    images, labels, index = batch()
    dense = torch.nn.functional.one_hot(labels, CLASSES).float()
    mixed = 0.3 * dense + 0.7 * dense.flip(0)
    _, targets = mollify(images, mixed, index)
    role, t = mollify.draw(index)
    gamma = label_decay(role, t).unsqueeze(1)
    torch.testing.assert_close(targets, (1 - gamma) * mixed + gamma / CLASSES)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.usefixtures("triton_interpreter")
def test_short_targets_are_the_labels_and_their_decays(backend):
    pytest.importorskip("triton")
    images, labels, index = batch()
    dense, short = (Mollify(CLASSES, seed=2, kind="temper", backend=backend, targets=t) for t in ("dense", "short"))
    role, t = short.draw(index, 3)
    want, _ = dense(images, labels, index, 3)
    out, targets = short(images, labels, index, 3)
    assert torch.equal(out, want)
    assert isinstance(targets, fastmoll.SoftLabels)
    assert torch.equal(targets.label, labels)
    torch.testing.assert_close(targets.gamma, label_decay(role, t), atol=1e-7, rtol=0)
    assert targets[2:] == (None, None, "temper")
    with pytest.raises(ValueError, match=r"labels must have shape \(24\), got \(24, 7\)"):
        short(images, torch.zeros(24, CLASSES), index)


def test_short_targets_take_no_memory_for_the_classes():
    images, labels, index = batch(height=2, width=2)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            nonlocal largest
            out = function(*arguments, **(keywords or {}))
            sizes = [each.untyped_storage().nbytes() for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
            largest = max([largest, *sizes])
            return out

    def most(targets):
        nonlocal largest
        largest = 0
        with Watch():
            Mollify(10**6, targets=targets)(images, labels, index)
        return largest

    assert most("dense") >= 24 * 10**6 * 4
    assert most("short") < 10**6


def test_it_works_after_mixup_in_a_torchvision_pipeline():
    torch.manual_seed(0)
    images, labels, _ = batch()
    pipeline = v2.Compose([v2.MixUp(num_classes=CLASSES), Mollify(CLASSES, (1, 0, 0))])
    out, targets = pipeline(images, labels)
    torch.manual_seed(0)
    mixed, mixed_labels = v2.MixUp(num_classes=CLASSES)(images, labels)
    assert torch.equal(out, mixed)
    torch.testing.assert_close(targets, mixed_labels)
    out, targets = v2.Compose([v2.CutMix(num_classes=CLASSES), Mollify(CLASSES)])(tv_tensors.Image(images), labels)
    assert out.shape == images.shape
    assert targets.sum(1).tolist() == pytest.approx([1.0] * 24)


def test_it_can_be_copied_and_moved_without_changing_its_draws():
    index = torch.arange(100)
    mollify = Mollify(CLASSES, beta=(2.0, 3.0))
    role, t = mollify.draw(index)
    for other in (
        copy.deepcopy(mollify),
        Mollify(CLASSES, beta=(2.0, 3.0)).half(),
        Mollify(CLASSES, beta=(2, 3)).eval(),
    ):
        assert torch.equal(other.draw(index)[0], role)
        assert torch.equal(other.draw(index)[1], t)
    assert list(mollify.parameters()) == list(mollify.buffers()) == []


@pytest.mark.parametrize("beta", [(1.0, 2.0), (0.7, 1.5)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device")
@pytest.mark.usefixtures("triton_interpreter")
def test_triton_gives_what_torch_gives(beta):
    images, labels, index = batch()
    want, want_targets = Mollify(CLASSES, beta=beta, backend="torch")(images, labels, index, 3)
    out, targets = Mollify(CLASSES, beta=beta, backend="triton")(images, labels, index, 3)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(targets, want_targets, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="the interpreter runs where there is no CUDA device"
            ),
        ),
    ],
)
@pytest.mark.usefixtures("triton_interpreter")
def test_pixels_give_what_standardised_images_give(backend):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 20, 17, 3), generator=generator, dtype=torch.uint8)
    labels, index = torch.arange(24) % CLASSES, torch.arange(24)
    flip = torch.rand(24, generator=generator) < 0.5
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    images = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    images[flip] = images[flip].flip(3)
    want, want_targets = Mollify(CLASSES)(images, labels, index, 3)
    mollify = Mollify(CLASSES, backend=backend)
    out, targets = mollify.from_pixels(pixels, labels, index, 3, mean=mean, std=std, flip=flip)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=0)
    torch.testing.assert_close(targets, want_targets, atol=1e-6, rtol=0)
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_in_place_overwrites_the_images_with_the_same_result(fmt):
    images, labels, index = batch()
    images = images.to(memory_format=fmt)
    want, want_targets = Mollify(CLASSES)(images, labels, index)
    out, targets = Mollify(CLASSES)(images, labels, index, inplace=True)
    assert torch.equal(out, want) and torch.equal(targets, want_targets)


@pytest.mark.parametrize("stride", [0, 7])
def test_in_place_does_not_write_to_memory_that_images_share(stride):
    images, labels, index = batch()
    images = images.as_strided(images.shape, (stride, *images.stride()[1:]))
    before = images.clone()
    out, _ = Mollify(CLASSES)(images, labels, index, inplace=True)
    assert torch.equal(images, before)
    assert torch.equal(out, Mollify(CLASSES)(before, labels, index)[0])


def test_images_that_require_grad_are_refused_only_where_autograd_listens():
    images, labels, index = batch()
    want, _ = Mollify(CLASSES)(images, labels, index)
    with torch.no_grad():
        out, _ = Mollify(CLASSES)(images.requires_grad_(), labels, index)
    assert not out.requires_grad
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match="images must not require grad"):
        Mollify(CLASSES)(images, labels, index)


def test_the_package_exports_the_method_and_loads_neither_dali_nor_triton():
    code = (
        "import sys, fastmoll; "
        "fastmoll.Mollify, fastmoll.heat_blur, fastmoll.cosine_noise, fastmoll.label_decay, fastmoll.soft_labels; "
        "fastmoll.soft_cross_entropy, fastmoll.soft_cross_entropy_short, fastmoll.SoftLabels, fastmoll.blur_scale; "
        "fastmoll.losses.soft_cross_entropy, fastmoll.SmallImageLoader, fastmoll.Augment; "
        "sys.stdout.write(repr([m for m in ('nvidia.dali', 'triton', 'cupy') if m in sys.modules]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("[]", "")
    assert fastmoll.Mollify is Mollify
    assert all(hasattr(fastmoll, name) for name in fastmoll.__all__)
    assert {*dir(fastmoll)} == {*fastmoll.__all__, "__version__"}


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize("labels_on_gpu", [False, True])
def test_a_gpu_mollifies_as_the_cpu_does_without_waiting(memory_format, labels_on_gpu):
    mollify = Mollify(CLASSES, roles=(1, 1, 1, 1), beta=(2.0, 3.0))
    images, labels, index = batch(64)
    gpu = images.cuda().to(memory_format=memory_format)
    placed = labels.cuda() if labels_on_gpu else labels.pin_memory()
    mollify(gpu, placed, index, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, targets = mollify(gpu, placed, index, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want, want_targets = mollify(images, labels, index, 1)
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out.cpu(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(targets.cpu(), want_targets, atol=1e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("ids_on_gpu", [False, True])
@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"mix": "mixup"},
        {"mix": "cutmix", "kind": "none"},
        {"temperature": square_root, "label_decay": half_of_noise, "blur_scale": linear, "sigma_max": 6.0},
    ],
)
def test_a_gpu_mixes_and_schedules_as_the_cpu_does_without_waiting(arguments, targets, ids_on_gpu):
    mollify = Mollify(CLASSES, targets=targets, **arguments)
    images, labels, index = batch(64)
    gpu, classes = images.cuda(), labels.cuda()
    ids = index.cuda() if ids_on_gpu else index.pin_memory()
    mollify(gpu, classes, ids, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, made = mollify(gpu, classes, ids, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want, want_made = mollify(images, labels, index, 1)
    torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=0)
    for ours, theirs in zip(tree_leaves(made), tree_leaves(want_made), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-6, rtol=0)


@pytest.mark.gpu
def test_ids_on_the_gpu_give_the_same_draws():
    mollify = Mollify(CLASSES)
    images, labels, index = batch(64)
    want, want_targets = mollify(images, labels, index)
    out, targets = mollify(images.cuda(), labels.cuda(), index.cuda())
    torch.testing.assert_close(out.cpu(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(targets.cpu(), want_targets, atol=1e-6, rtol=0)


@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_fused_backends_refuse_images_on_the_cpu_before_anything_is_drawn(backend, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mollify = Mollify(4, backend=backend)
    with pytest.raises(ValueError, match=f"CUDA device for backend '{backend}', got cpu"):
        mollify(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64))
    pixels = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"CUDA device for backend '{backend}', got cpu"):
        mollify.from_pixels(pixels, torch.zeros(2, dtype=torch.int64), mean=(0.5,) * 3, std=(0.5,) * 3)
