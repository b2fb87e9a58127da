"""The operations inside compiled code: no graph break, no second compilation, and what eager code gives."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("triton")

from fastmoll import corruptions as corruptions_module
from fastmoll import mollify as mollify_module
from fastmoll.corruptions import corrupt
from fastmoll.kernels import batch_tail as batch_tail_module
from fastmoll.kernels import draw_triton
from fastmoll.kernels.batch_tail import batch_tail
from fastmoll.kernels.draw_triton import draw_batch
from fastmoll.kernels.heat_blur import heat_blur
from fastmoll.kernels.soft_labels import label_decay
from fastmoll.mollify import Mollify, beta_quantiles
from fastmoll.mollify_operator import mollify_operator

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    # The interpreter multiplies what it read past the last row and column too.
    pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH, CLASSES = 6, 5
SEEDS = (2**64 - 3, 2**63, 7, 8)


class Whole:
    """``torch.compile`` without graph breaks; counts the graphs, and checks what it was told about the results."""

    def __init__(self, function):
        torch.compiler.reset()
        self.graphs = 0
        self._call = torch.compile(function, fullgraph=True, backend=self._compile)

    def _compile(self, graph, example):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def __call__(self, *arguments):
        return self._call(*arguments)


def same(ours, theirs):
    """Equal to the bit, and in the same places in memory."""
    assert type(ours) is type(theirs)
    for our, their in zip(ours, theirs, strict=True):
        if not isinstance(their, torch.Tensor):
            if isinstance(their, tuple):
                same(our, their)
            else:
                assert our == their
            continue
        assert torch.equal(our, their)
        assert (our.dtype, our.stride(), our.device) == (their.dtype, their.stride(), their.device)


def images(channels=3, height=8, width=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, channels, height, width, generator=generator).to(DEVICE)


def pixels():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (BATCH, 7, 9, 3), generator=generator, dtype=torch.uint8).to(DEVICE)


INDEX = torch.arange(BATCH, device=DEVICE) + 2**40
LABELS = torch.arange(BATCH, device=DEVICE) % CLASSES
PARTNER = INDEX.flip(0) - 2**40
LAM = torch.linspace(0.0, 1.0, BATCH, device=DEVICE)
ROLES = {
    "role": torch.tensor([0, 1, 2, 3, 2, 1], dtype=torch.int8, device=DEVICE),
    "t": torch.linspace(0.1, 0.9, BATCH, device=DEVICE),
    "index": INDEX,
}
TAILS = [
    (pixels, {"mean": MEAN, "std": STD, "flip": LABELS > 1, "partner": PARTNER, "lam": LAM, **ROLES}),
    (pixels, {"mean": MEAN, "std": STD, "dtype": torch.float32, "memory_format": torch.contiguous_format}),
    (images, {"dtype": torch.float16, "sigma_min": 0.5, "sigma_max": 4.0, **ROLES}),
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("source", "options"), TAILS)
def test_a_batch_tail_compiles_once_for_all_epochs(source, options, backend):
    def tail(x, epoch):
        return batch_tail(x, epoch=epoch, backend=backend, **options) * 2.0

    compiled, x = Whole(tail), source()
    for epoch in (0, 1, 2**24 - 1):
        same([compiled(x, torch.tensor(epoch))], [tail(x, epoch)])
    assert compiled.graphs == 1


def test_plain_numbers_compile_a_second_time_and_then_never_again():
    def tail(x, seed, epoch):
        return batch_tail(x, seed=seed, epoch=epoch, **ROLES)

    compiled, x = Whole(tail), images()
    for seed, epoch in itertools.product(SEEDS, (0, 1, 5, 2**24 - 1)):
        same([compiled(x, seed, epoch)], [tail(x, seed, epoch)])
    assert compiled.graphs <= 3  # the first, any epoch, any seed


@pytest.mark.parametrize("beta", [(1.0, 2.0), (2.0, 3.0)])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_draws_compile_once_for_all_epochs(dense, mixed, beta):
    options = {"beta": beta, "num_classes": CLASSES, "dense": dense, "labels": LABELS, "seed": SEEDS[0]}
    options |= {"partner": PARTNER, "lam": LAM} if mixed else {}
    quantiles = None if beta[0] == 1 else beta_quantiles(*beta).to(DEVICE)

    def draw(index, epoch):
        return draw_batch(index, epoch, quantiles=quantiles, **options)

    compiled = Whole(draw)
    for epoch in (0, 1, 2, 2**24 - 1):
        same(compiled(INDEX, torch.tensor(epoch)), draw(INDEX, epoch))
    assert compiled.graphs == 1


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_mollification_compiles_once_for_all_epochs(memory_format, targets, backend):
    mollify = Mollify(CLASSES, (1, 1, 1, 1), (2.0, 3.0), seed=SEEDS[0], backend=backend, targets=targets, kind="temper")
    compiled, x = Whole(mollify), images().to(memory_format=memory_format)
    before = x.clone()
    for epoch in (0, 1, 2**24 - 1):
        same(compiled(x, LABELS, INDEX, torch.tensor(epoch)), mollify(x, LABELS, INDEX, epoch))
    assert compiled.graphs == 1
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.parametrize(
    "own",
    [
        {"mix": "mixup"},
        {"mix": "cutmix", "mix_alpha": 0.5, "kind": "none"},
        # What no compiler could follow: they are called inside the operator.
        {"temperature": torch.sqrt, "label_decay": lambda role, t: torch.tensor(t.tolist(), device=t.device)},
        {"blur_scale": lambda t: torch.from_numpy(t.cpu().numpy()).to(t.device) + 1.0},
    ],
)
def test_mixing_and_the_users_schedules_compile_once_for_all_epochs(own, targets, backend):
    mollify = Mollify(CLASSES, seed=SEEDS[0], backend=backend, targets=targets, **own)
    compiled, x = Whole(mollify), images()
    for epoch in (0, 1, 2**24 - 1):
        same(compiled(x, LABELS, INDEX, torch.tensor(epoch)), mollify(x, LABELS, INDEX, epoch))
    assert compiled.graphs == 1


def test_each_module_is_itself_inside_compiled_code():
    def step(mollify, x):
        return mollify(x, LABELS, INDEX)

    class Clean(Mollify):
        def draw(self, index, epoch=0):
            role, t = super().draw(index, epoch)
            return torch.zeros_like(role), torch.zeros_like(t)

    compiled, x = Whole(step), images()
    for mollify in (Mollify(CLASSES), Mollify(CLASSES, seed=1), Clean(CLASSES, backend="torch")):
        for other in (mollify, copy.deepcopy(mollify)):
            same(compiled(other, x), step(other, x))
    assert torch.equal(compiled(mollify, x)[0], x)


def test_mollification_of_pixels_compiles_once_for_all_epochs():
    mollify = Mollify(CLASSES)

    def from_pixels(x, epoch):
        return mollify.from_pixels(x, LABELS, INDEX, epoch, mean=MEAN, std=STD, flip=LABELS > 1, dtype=torch.bfloat16)

    compiled, x = Whole(from_pixels), pixels()
    for epoch in (0, 1, 2):
        same(compiled(x, torch.tensor(epoch)), from_pixels(x, epoch))
    assert compiled.graphs == 1


def test_images_without_ids_are_numbered_on_without_compiling_again():
    inside, outside, x = Mollify(CLASSES), Mollify(CLASSES), images()
    compiled = Whole(inside)
    for _ in range(4):
        same(compiled(x, LABELS), outside(x, LABELS))
    inside.set_extra_state(torch.tensor(5))
    outside.set_extra_state(torch.tensor(5))
    same(compiled(x, LABELS), outside(x, LABELS))
    assert inside.get_extra_state() == outside.get_extra_state() == 5 + BATCH
    assert compiled.graphs == 1


@pytest.mark.parametrize("shape", [(1, 12, 10), (3, 1, 1), (1, 1, 1), (3, 1, 7)])
def test_the_compiler_knows_the_order_of_memory_also_where_a_size_is_one(shape):
    mollify = Mollify(CLASSES)
    for x in (images(*shape), images(*shape).to(memory_format=torch.channels_last)):
        torch.library.opcheck(mollify_operator, *arguments_of(mollify, x, INDEX))


def arguments_of(mollify, x, index, **more):
    """What :class:`Mollify` gives its operator inside compiled code."""
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        operator = mollify_operator
        patch.setattr(mollify_module, "mollify_operator", lambda *a, **k: given.append((a, k)) or operator(*a, **k))
        call = mollify.from_pixels if more else mollify
        call(x, LABELS, index, 3, **more)
    return given[0]


@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.parametrize("index", [INDEX, None])
@pytest.mark.parametrize("mix", [None, "cutmix"])
def test_the_mollification_keeps_its_promises_to_the_compiler(mix, index, targets):
    mollify = Mollify(CLASSES, seed=SEEDS[0], targets=targets, mix=mix)
    torch.library.opcheck(mollify_operator, *arguments_of(mollify, images(), index))
    arguments = arguments_of(mollify, pixels(), index, mean=MEAN, std=STD, dtype=torch.float16)
    torch.library.opcheck(mollify_operator, *arguments)


@pytest.mark.parametrize(("source", "options"), TAILS)
def test_the_batch_tail_keeps_its_promises_to_the_compiler(source, options):
    names = ("flip", "partner", "lam", "box", "role", "t", "index")
    last = options.get("memory_format", torch.channels_last) == torch.channels_last
    others = {"mean": None, "std": None, "sigma_min": 0.3, "sigma_max": None, "dtype": torch.bfloat16, **options}
    others = {name: value for name, value in others.items() if name not in (*names, "memory_format")}
    torch.library.opcheck(
        batch_tail_module._operator,
        (source(), *(options.get(name) for name in names), torch.tensor(3)),
        {"epoch": 0, "seed": -3, "channels_last": last, "backend": "torch", **others},
    )


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("labels", [None, LABELS])
def test_the_draws_keep_their_promises_to_the_compiler(labels, dense):
    mixed = (None, None) if labels is None else (PARTNER, LAM)
    settings = {"roles": [1.0, 1.0, 1.0], "beta": [1.0, 2.0], "k_noise": 1.0, "k_blur": 1.0, "kind": "smooth"}
    torch.library.opcheck(
        draw_triton._operator,
        (INDEX, None, None, labels, *mixed),
        {"epoch": 3, "seed": -3, "num_classes": CLASSES, "dense": dense, "validate": True, **settings},
    )


def test_bad_values_are_named_inside_compiled_code_too():
    mollify, x = Mollify(CLASSES), images().cpu()
    compiled = Whole(mollify)
    labels, index = LABELS.cpu(), INDEX.cpu()
    for arguments, message in [
        ((x, labels + 1, index, torch.tensor(0)), r"labels must lie in \[0, 5\), got 5"),
        ((x, labels, index - 2**41, torch.tensor(0)), "index must lie in"),
        ((x, labels, index, torch.tensor(-1)), "epoch must be an integer in .* got"),
        ((x, labels, index[:3], torch.tensor(0)), r"index must have shape \(6\), got \(3,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            compiled(*arguments)
    roles = {name: value.cpu() for name, value in ROLES.items()}
    tail = Whole(lambda images, t: batch_tail(images, **{**roles, "t": t}))
    with pytest.raises(ValueError, match=r"t must lie in \[0, 1\], got 1.5 at position 0"):
        tail(x, roles["t"] * 0 + 1.5)


@pytest.mark.filterwarnings("error:Dynamo detected a call to a")
def test_the_parts_have_no_graph_break_where_sizes_change():
    blur = Whole(heat_blur)
    for batch, height, width in ((4, 8, 8), (6, 8, 8), (5, 12, 12), (3, 10, 14)):
        x, t = torch.randn(batch, 3, height, width), torch.full((batch,), 0.4)
        torch.testing.assert_close(blur(x, t), heat_blur(x, t))
    assert blur.graphs <= 4
    decay = torch.compile(label_decay, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 5):
        role, t = torch.ones(batch, dtype=torch.int8), torch.rand(batch)
        torch.testing.assert_close(decay(role, t), label_decay(role, t))


@pytest.mark.filterwarnings("error:Dynamo detected a call to a")
@pytest.mark.parametrize("name", ["glass_blur", "elastic_transform", "motion_blur"])
def test_corruptions_are_one_operator_whatever_sizes_and_seed(name):
    compiled = Whole(lambda images, seed: corrupt(images, name, 3, seed=seed))
    for seed, (batch, height, width) in enumerate(((4, 32, 32), (6, 32, 32), (5, 40, 33), (3, 36, 48)), 2**64 - 4):
        x = torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8)
        assert torch.equal(compiled(x, seed), corrupt(x, name, 3, seed=seed))
    assert compiled.graphs <= 3  # a second one for any batch, a third for any sides
    with pytest.raises(ValueError, match=r"index must have shape \(3\), got \(1,\)"):
        Whole(lambda images: corrupt(images, name, 3, index=torch.zeros(1, dtype=torch.int64)))(x)
    options = {"corruption": name, "severity": 3, "seed": -3}
    torch.library.opcheck(
        corruptions_module._operator, (x.contiguous(memory_format=torch.channels_last), None), options
    )


def test_images_that_require_grad_are_refused_while_compiling():
    for function in (Mollify(CLASSES), lambda images, labels: batch_tail(images)):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="images must not require grad"):
            Whole(function)(images().requires_grad_(), LABELS)


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_that_would_take_another_module_elsewhere_is_not_exported(strict):
    with pytest.raises(Exception, match="Mollify can't be exported"):
        torch.export.export(Mollify(CLASSES), (images(), LABELS), strict=strict)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("backend", ["torch", "triton", "cupy"])
def test_inductor_and_cuda_graphs_run_it_on_a_gpu(backend, mode):
    if backend == "cupy":
        pytest.importorskip("cupy")
    mollify = Mollify(CLASSES, backend=backend)
    torch.compiler.reset()
    step = torch.compile(lambda x, epoch: mollify(x + 1.0, LABELS, INDEX, epoch)[0] * 2.0, fullgraph=True, mode=mode)
    for epoch in range(5):
        x = images() + epoch
        torch.testing.assert_close(
            step(x, torch.tensor(epoch)).clone(), mollify(x + 1.0, LABELS, INDEX, epoch)[0] * 2.0
        )
