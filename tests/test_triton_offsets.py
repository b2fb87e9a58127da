"""Batches past 2^31 elements: every offset of a Triton kernel has 64 bits where it may need them.

Memory that is never touched costs nothing, and only the programs of the last image or row are run.
"""

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder

from fastmoll.kernels import batch_tail_triton, batch_tail_triton_bytes, draw_triton, soft_cross_entropy_triton
from fastmoll.kernels.batch_tail import check_tail

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter, and memory that is never touched"),
    # The interpreter multiplies what it read past the last row and column too.
    pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered"),
]

LIMIT = 2**31
CLEAN, NOISE, BLUR = range(3)


class Last:
    """Stands in for a kernel: runs the programs of the last image or row of its launches, and no others."""

    begin = 0

    def __init__(self, kernel, batch):
        self.kernel, self.batch = kernel, batch

    def __getitem__(self, grid):
        programs = grid[0] // self.batch

        def launch(*arguments, **options):
            Last.begin = grid[0] - programs
            self.kernel[(programs, *grid[1:])](*arguments, **options)
            Last.begin = 0

        return launch


@pytest.fixture
def last_only(monkeypatch):
    """Return a function that has the kernels of a module run for the last of so many images or rows alone."""
    create = InterpreterBuilder.create_get_program_id

    def later(builder, axis):
        handle = create(builder, axis)
        handle.data = handle.data + handle.data.dtype.type(Last.begin if axis == 0 else 0)
        return handle

    monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", later)

    def restrict(module, batch, *names):
        for name in names:
            monkeypatch.setattr(module, name, Last(getattr(module, name), batch))

    return restrict


def run_tail(images, role, mixed, memory_format):
    """The batch tail where all images have one role and, if mixed, the last one for a partner; mirrored or not."""
    batch = len(images)
    none = dict.fromkeys(("partner", "lam", "box", "sigma_max"))
    mix = {"partner": torch.full((batch,), batch - 1), "lam": torch.full((batch,), 0.3)} if mixed else {}
    tail = check_tail(
        images, mean=(0.5,) * 3, std=(0.2,) * 3, flip=torch.full((batch,), memory_format == torch.channels_last),
        role=torch.full((batch,), role, dtype=torch.int8), t=torch.full((batch,), 0.4), index=torch.full((batch,), 9),
        seed=1, epoch=2, sigma_min=0.3, dtype=torch.float16, memory_format=memory_format, **none | mix,
    )  # fmt: skip
    return batch_tail_triton.batch_tail_triton(tail)


def compare_last_image(size, module, names, role, mixed, memory_format, last_only):
    batch = LIMIT // (3 * size * size) + 2
    far = torch.empty(batch, size, size, 3, dtype=torch.uint8)
    far[-1].random_(generator=torch.Generator().manual_seed(0))
    expected = run_tail(far[-1:], role, mixed, memory_format)
    last_only(module, batch, *names)
    assert torch.equal(run_tail(far, role, mixed, memory_format)[-1], expected[0])


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("role", [CLEAN, NOISE, BLUR])
def test_the_batch_tail_reaches_its_last_image(role, mixed, memory_format, last_only):
    # Just above half the side of a matrix, whose storage is then the larger one.
    names = ("_lines", "_prepare", "_across", "_down")
    compare_last_image(33, batch_tail_triton, names, role, mixed, memory_format, last_only)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("role", [CLEAN, NOISE, BLUR])
def test_the_batch_tail_of_bytes_reaches_its_last_image(role, mixed, last_only):
    # Half the side of a matrix, whose storage is then larger than that of the image.
    compare_last_image(
        32, batch_tail_triton_bytes, ("_first", "_second"), role, mixed, torch.channels_last, last_only
    )  # fmt: skip


CLASSES = 3000
ROWS = LIMIT // CLASSES + 2


@pytest.mark.parametrize("soft", [False, True])
def test_targets_reach_their_last_row(soft, last_only):
    labels = torch.empty(ROWS, CLASSES, dtype=torch.float16) if soft else torch.empty(ROWS, dtype=torch.int64)
    labels[-1] = torch.rand(CLASSES, generator=torch.Generator().manual_seed(0)) if soft else 7
    index, partner, lam = torch.full((ROWS,), 5), torch.full((ROWS,), ROWS - 1), torch.full((ROWS,), 0.3)
    one = {"labels": labels[-1:], "partner": partner[-1:] * 0, "lam": lam[-1:]}
    expected = draw_triton.draw_batch(index[-1:], num_classes=CLASSES, **one)
    last_only(draw_triton, ROWS, "_draw")
    drawn = draw_triton.draw_batch(index, labels=labels, partner=partner, lam=lam, num_classes=CLASSES, validate=False)
    assert torch.equal(drawn.target[-1], expected.target[0])
    assert (drawn.role[-1], drawn.t[-1], drawn.gamma[-1]) == (expected.role[0], expected.t[0], expected.gamma[0])


@pytest.mark.parametrize("dense", [False, True])
def test_the_loss_and_its_gradient_reach_their_last_row(dense, last_only):
    logits, target = torch.empty(2, ROWS, CLASSES, dtype=torch.float16)
    logits[-1], target[-1] = torch.rand(2, CLASSES, generator=torch.Generator().manual_seed(0))
    short = (torch.full((ROWS,), 7), None, None, torch.full((ROWS,), 0.3))
    arguments = (logits, target, *(None,) * 4) if dense else (logits, None, *short)
    one = [None if x is None else x[-1:] for x in arguments]
    loss, gradient = soft_cross_entropy_triton._losses(*one, True, True)
    scaled = soft_cross_entropy_triton._scaled(gradient, loss)
    last_only(soft_cross_entropy_triton, ROWS, "_rows", "_scale")
    losses, gradients = soft_cross_entropy_triton._losses(*arguments, True, True)
    assert torch.equal(losses[-1], loss[0])
    assert torch.equal(gradients[-1], gradient[0])
    assert torch.equal(soft_cross_entropy_triton._scaled(gradients, losses)[-1], scaled[0])
