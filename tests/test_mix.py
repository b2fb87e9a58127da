"""MixUp and CutMix: torchvision's arithmetic, drawn from the first sample of a batch."""

import pytest
import scipy.stats
import torch
from torchvision.transforms import v2

from fastmoll.kernels import philox
from fastmoll.kernels.mix import draw_mix, mix_images
from fastmoll.mollify import beta_quantiles

CLASSES = 7
MANY = 3000


def images(batch=5, height=12, width=9, dtype=torch.float32):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0), dtype=dtype)


def words(index, epoch, seed):
    drawn = philox.sample_words(index[:1], epoch, seed=seed, purpose=philox.MIX, blocks=1)
    return [int(word) for word in drawn]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixup_is_torchvisions_for_the_lambda_that_was_drawn(dtype, monkeypatch):
    x, index = images(dtype=dtype), torch.tensor([40, 2, 3, 5, 7])
    mix = draw_mix(index, 3, kind="mixup", height=12, width=9, seed=5)
    lam = (words(index, 3, 5)[0] + 0.5) / 2**32
    assert mix.lam.tolist() == pytest.approx([lam] * 5, abs=1e-7)
    assert mix.box is None
    theirs = v2.MixUp(num_classes=CLASSES)
    monkeypatch.setattr(theirs, "make_params", lambda _: {"lam": float(mix.lam[0])})
    want, _ = theirs(x, torch.arange(5))
    torch.testing.assert_close(mix_images(x, **mix.of_images()), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("sample", range(12))
@pytest.mark.parametrize(("height", "width"), [(12, 9), (32, 32), (1, 5), (1, 1)])
def test_cutmix_is_torchvisions_for_the_numbers_that_were_drawn(height, width, sample, monkeypatch):
    index, labels = torch.arange(sample, sample + 5), torch.tensor([0, 3, 3, 6, 1])
    x = images(5, height, width)
    mix = draw_mix(index, 2, kind="cutmix", height=height, width=width, seed=9)
    first, second, third, _ = words(index, 2, 9)
    lam = float(torch.tensor((first + 0.5) / 2**32, dtype=torch.float32))
    centres = iter([third * width >> 32, second * height >> 32])  # torchvision draws the column first
    theirs = v2.CutMix(num_classes=CLASSES)
    monkeypatch.setattr(theirs._dist, "sample", lambda _: torch.tensor(lam, dtype=torch.float64))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_, **__: torch.tensor([next(centres)]))
        want, want_labels = theirs(x, labels)
    assert torch.equal(mix_images(x, **mix.of_images()), want)
    onehot = torch.nn.functional.one_hot(labels, CLASSES)
    share = mix.lam.unsqueeze(1)
    torch.testing.assert_close(share * onehot + (1 - share) * onehot[mix.partner], want_labels, atol=1e-6, rtol=0)
    y0, y1, x0, x1 = mix.box[0].tolist()
    assert 0 <= y0 <= y1 <= height and 0 <= x0 <= x1 <= width
    assert (mix.box == mix.box[0]).all()


def test_a_box_takes_the_partners_pixels_and_nothing_else():
    x = torch.arange(2.0).view(2, 1, 1, 1).expand(2, 3, 6, 8)
    box = torch.tensor([[1, 4, 2, 8], [0, 0, 0, 0]], dtype=torch.int32)
    mixed = mix_images(x, torch.tensor([1, 0]), box=box)
    assert mixed[0, 0].sum() == 3 * 6 and (mixed[0, :, 1:4, 2:] == 1).all()
    assert (mixed[1] == 1).all()


@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_mixing_keeps_the_order_of_memory_and_the_input(fmt):
    x = images().to(memory_format=fmt)
    before = x.clone()
    for kind in ("mixup", "cutmix"):
        mixed = mix_images(x, **draw_mix(torch.arange(5), kind=kind, height=12, width=9).of_images())
        assert mixed.stride() == x.stride()
    assert torch.equal(x, before)


@pytest.mark.parametrize("alpha", [1.0, 0.2, 3.0])
def test_lambda_follows_its_beta_distribution(alpha):
    quantiles = None if alpha == 1.0 else beta_quantiles(alpha, alpha)
    lam = [
        draw_mix(
            torch.tensor([i]), kind="mixup", height=8, width=8, seed=3, alpha=alpha, quantiles=quantiles
        ).lam.item()
        for i in range(MANY)
    ]
    assert scipy.stats.kstest(lam, scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_centres_of_boxes_are_uniform_and_do_not_depend_on_lambda():
    drawn = [words(torch.tensor([i]), 0, 0) for i in range(MANY)]
    lam, row, column = (torch.tensor([word[k] for word in drawn]).double() / 2**32 for k in range(3))
    for centre in (row, column):
        assert scipy.stats.kstest(centre.numpy(), "uniform").pvalue > 1e-3
    for one, other in ((lam, row), (lam, column), (row, column)):
        assert scipy.stats.spearmanr(one.numpy(), other.numpy()).pvalue > 1e-3


def test_a_batch_is_mixed_by_its_first_sample_epoch_and_seed_alone():
    index = torch.tensor([2**47 + 5, 3, 9])

    def lam(index=index, epoch=4, seed=2**64 - 1):
        return draw_mix(index, epoch, kind="mixup", height=8, width=8, seed=seed).lam[0].item()

    assert lam() == lam(torch.tensor([2**47 + 5])) == lam(index.clone())
    others = [lam(index.flip(0)), lam(epoch=5), lam(seed=1), lam(torch.tensor([5]))]
    assert len({lam(), *others}) == 5


def test_the_stream_is_none_of_the_others():
    index = torch.arange(4)
    kinds = [philox.sample_words(index, 0, seed=0, purpose=p, blocks=1)[0] for p in range(4)]
    assert len({tuple(kind.flatten().tolist()) for kind in kinds}) == 4
    assert philox.MIX not in (philox.DRAW, philox.NOISE, philox.AUGMENT)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_and_one_mix_with_nothing_else(batch, kind):
    mix = draw_mix(torch.arange(batch), kind=kind, height=4, width=4)
    assert mix.partner.tolist() == [0] * batch
    assert mix.lam.shape == (batch,)
    x = images(batch)
    torch.testing.assert_close(mix_images(x, **mix.of_images()), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "mix"}, "kind must be one of 'mixup', 'cutmix', got 'mix'"),
        ({"alpha": 0.0}, "alpha must be .* got 0.0"),
        ({"alpha": 2.0}, r"quantiles must be given for beta = \(2.0, 2.0\)"),
        ({"height": 0}, "height must be .* got 0"),
        ({"index": torch.tensor([-1])}, "index must lie in .* got -1"),
        ({"epoch": 2**24}, "epoch must be .* got 16777216"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    good = {"index": torch.arange(3), "kind": "mixup", "height": 4, "width": 4}
    with pytest.raises(ValueError, match=message):
        draw_mix(**(good | arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_a_gpu_draws_what_the_cpu_draws_without_waiting(kind):
    options = {"kind": kind, "height": 33, "width": 20, "alpha": 0.3}
    table = beta_quantiles(0.3, 0.3)
    for first in range(8):
        index = torch.arange(first, first + 5)
        want = draw_mix(index, 1, quantiles=table, **options)
        there, placed = index.cuda(), table.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn = draw_mix(there, 1, quantiles=placed, **options)
            moved = want.on(torch.device("cuda"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one, other, third in zip(drawn, want, moved, strict=True):
            if other is not None:
                assert torch.equal(third.cpu(), other)
                torch.testing.assert_close(one.cpu(), other, atol=1e-6, rtol=0)
