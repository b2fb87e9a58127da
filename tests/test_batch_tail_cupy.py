"""The CUDA C++ of the batch tail: run on the CPU through ``cuda_shim.h`` and, where there is one, on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_shim import BF16, CONTIGUOUS, F16, F32, LAST, MEAN, STD, U8, check, compile_shim, launch_shim, make
from scipy.fft import dctn, idctn
from torch import Tensor

from fastmoll.kernels import batch_tail_cupy as backend
from fastmoll.kernels.batch_tail import Tail, batch_tail
from fastmoll.kernels.batch_tail_torch import batch_tail_torch
from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, CLEAN, NOISE, PURE_NOISE

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a block may have on a card of compute capability 9.0."""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to run CUDA C++ on the CPU")


@pytest.fixture(scope="session")
def shim_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shim")


@pytest.fixture
def run(shim_folder: Path) -> Any:
    """Return a function that runs the kernel, launched as CuPy would launch it, into an output full of NaN."""

    def launch(tail: Tail, out: Tensor | None = None, limit: int = SHARED_LIMIT) -> Tensor:
        if out is None:
            shape = (tail.batch, tail.channels, tail.height, tail.width)
            out = torch.empty(shape, dtype=tail.dtype, memory_format=tail.memory_format)
        out.fill_(torch.nan)
        plan = backend.plan(tail, out, limit)
        assert plan.shared <= limit
        launch_shim(compile_shim(plan.macros, shim_folder), plan)
        return out

    return launch


def error(got: Tensor, want: Tensor) -> float:
    """The largest ``|got - want| / (1 + |want|)``; NaN counts as infinite."""
    difference = (got.double() - want.double()).abs() / (1.0 + want.double().abs())
    return float(difference.nan_to_num(nan=torch.inf).max())


def define(tail: Tail) -> Tensor:
    return batch_tail_torch(dataclasses.replace(tail, dtype=F32))


# Rounding alone is half a unit in the last place: 2^-9 of the value for bfloat16, 2^-12 for float16. The rest comes
# from the operands of the blur, and from the noise.
LIMITS = {F32: 4e-6, F16: 1.5e-3, BF16: 4e-3}

CASES = {
    "fast": ((4, 3, 64, 64), U8, None, BF16, LAST),
    "fast contiguous": ((4, 3, 40, 72), U8, None, BF16, CONTIGUOUS),
    "fast mixup": ((5, 3, 40, 72), U8, "mixup", BF16, LAST),
    "fast cutmix float16": ((8, 3, 40, 72), U8, "cutmix", F16, LAST),
    "fast tall": ((4, 3, 200, 8), U8, None, BF16, LAST),
    "fast wide": ((4, 3, 8, 296), U8, None, BF16, LAST),
    "fast tallest": ((2, 3, 512, 8), U8, None, F16, LAST),
    "fast widest": ((2, 3, 8, 512), U8, None, F16, LAST),
    "odd": ((4, 3, 33, 21), U8, None, BF16, LAST),
    "odd mixup": ((4, 3, 33, 21), U8, "mixup", BF16, CONTIGUOUS),
    "odd cutmix": ((8, 3, 33, 35), U8, "cutmix", BF16, LAST),
    "one pixel": ((4, 3, 1, 1), U8, None, BF16, LAST),
    "one row": ((4, 3, 1, 37), U8, None, BF16, LAST),
    "one column": ((4, 3, 37, 1), U8, None, BF16, LAST),
    "one image": ((1, 3, 16, 16), U8, None, BF16, LAST),
    "pixels to float32": ((4, 3, 40, 35), U8, None, F32, LAST),
    "pixels to float32 contiguous": ((4, 3, 33, 48), U8, None, F32, CONTIGUOUS),
    "pixels to float32 mixup": ((4, 3, 40, 35), U8, "mixup", F32, LAST),
    "pixels to float32 cutmix": ((8, 3, 40, 35), U8, "cutmix", F32, LAST),
    "float32": ((4, 3, 40, 35), F32, None, F32, CONTIGUOUS),
    "float32 mixup": ((4, 3, 40, 35), F32, "mixup", F32, LAST),
    "float32 grey": ((4, 1, 28, 28), F32, None, F32, CONTIGUOUS),
    "float32 five channels": ((4, 5, 19, 23), F32, None, F32, LAST),
    "float32 to bfloat16": ((4, 3, 40, 35), F32, None, BF16, LAST),
    "bfloat16": ((4, 3, 40, 35), BF16, None, BF16, LAST),
    "float16 to bfloat16": ((4, 3, 40, 35), F16, None, BF16, CONTIGUOUS),
}


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_every_element_is_written_and_agrees_with_the_definition(case: str, run: Any) -> None:
    shape, source, mix, dtype, memory_format = CASES[case]
    tail = check(make(shape, source, mix, dtype=dtype, memory_format=memory_format))
    assert error(run(tail), define(tail)) < LIMITS[dtype]


MIXED = [(U8, "mixup", BF16), (U8, "cutmix", F16), (F32, "mixup", F32), (F32, "cutmix", F32)]


def blurred_with_partners_of_any_flip(source: torch.dtype, mix: str, dtype: torch.dtype) -> dict[str, Any]:
    """Flips of an image and its partner: none, the partner's, both, its own; then two images with themselves."""
    arguments = make((6, 3, 40, 72), source, mix, roles=(BLUR,), dtype=dtype, t=torch.linspace(0.2, 0.7, 6))
    arguments["flip"] = torch.tensor([False, False, True, True, False, True])
    arguments["partner"] = torch.tensor([1, 2, 3, 0, 4, 5])
    if mix == "mixup":
        arguments["lam"] = torch.tensor([0.3, 0.7, 0.0, 0.6, 0.2, 0.8])
    else:
        boxes = [[39, 40, 71, 72], [5, 35, 27, 70], [0, 1, 0, 1], [0, 33, 0, 33], [3, 30, 9, 50], [7, 7, 3, 9]]
        arguments["box"] = torch.tensor(boxes, dtype=torch.int32)
    return arguments


@needs_compiler
@pytest.mark.parametrize(("source", "mix", "dtype"), MIXED)
def test_blurred_images_mix_with_partners_of_any_flip(
    source: torch.dtype, mix: str, dtype: torch.dtype, run: Any
) -> None:
    tail = check(blurred_with_partners_of_any_flip(source, mix, dtype))
    assert error(run(tail), define(tail)) < LIMITS[dtype]


@needs_compiler
@pytest.mark.parametrize("source", [U8, F32])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_strided_input_gives_the_same_bits(source: torch.dtype, dtype: torch.dtype, run: Any) -> None:
    arguments = make((4, 3, 16, 24), source, dtype=dtype)
    want = run(check(arguments))
    images = arguments["images"]
    views = [torch.cat((images, images), dim).narrow(dim, 0, images.shape[dim]) for dim in range(4)]
    views.append(images.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0))
    views.append(images[:1].expand(4, -1, -1, -1))
    for view in views[:-1]:
        # A view that misses the fast path may differ in the order of its roundings.
        assert error(run(check(arguments | {"images": view})), want) < (
            4e-3 if source == U8 and dtype == BF16 else 1e-9
        )
    repeated = check(arguments | {"images": views[-1]})
    assert error(run(repeated), define(repeated)) < LIMITS[dtype]


@needs_compiler
@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_strided_parameters_give_the_same_bits(mix: str, run: Any) -> None:
    arguments = make((4, 3, 16, 24), mix=mix)
    apart = {
        name: value.repeat_interleave(2, 0)[::2] if isinstance(value, Tensor) and name != "images" else value
        for name, value in arguments.items()
    }
    assert torch.equal(run(check(apart)), run(check(arguments)))


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_blur_agrees_with_scipy_at_every_scale(dtype: torch.dtype, run: Any) -> None:
    sigmas = torch.tensor([0.3, 0.5, 0.8, 1.0, 1.5, 1.99, 2.01, 4.0, 7.9, 8.1, 12.0, 20.0, 50.0, 88.0])
    height, width = 72, 88
    t = torch.log(sigmas / 0.3) / np.log(width / 0.3)
    tail = check(make((len(t), 3, height, width), roles=(BLUR,), t=t.clamp(0, 1), flip=None, dtype=dtype))
    got = run(tail).double().numpy()
    x = (tail.images.permute(0, 3, 1, 2).double() / 255 - torch.tensor(MEAN).double().view(3, 1, 1)) / torch.tensor(
        STD
    ).double().view(3, 1, 1)
    decay = [np.exp(-0.5 * (sigmas.double().numpy()[:, None] * np.pi * np.arange(n) / n) ** 2) for n in (height, width)]
    spectrum = dctn(x.numpy(), axes=(2, 3), norm="ortho") * decay[0][:, None, :, None] * decay[1][:, None, None, :]
    want = idctn(spectrum, axes=(2, 3), norm="ortho")
    scale = np.abs(want).max()
    assert np.abs(got - want).max() / (1 + scale) < {F32: 3e-6, BF16: 4e-3}[dtype]
    if dtype == BF16:
        # In the mean over pixels, what the operands and the cut cost disappears beside the rounding of the output.
        rounding = np.abs(torch.from_numpy(want).to(BF16).double().numpy() - want)
        assert np.sqrt(((got - want) ** 2).mean()) < 1.1 * np.sqrt((rounding**2).mean())


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 3, 24, 40), (3, 2, 13, 11)])
def test_noise_agrees_with_float64_to_1e_5_even_with_the_worst_fast_functions(
    shape: tuple[int, int, int, int], run: Any
) -> None:
    arguments = make(shape, F32, roles=(NOISE, PURE_NOISE), dtype=F32, flip=None)
    tail = check(arguments)
    assert tail.index is not None and tail.t is not None
    t = torch.where(tail.role == PURE_NOISE, 1.0, tail.t).double()
    want = cosine_noise(tail.images.double(), t, seed=tail.seed, epoch=tail.epoch, index=tail.index)
    assert float((run(tail).double() - want).abs().max()) < 1e-5


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_image_does_not_depend_on_its_batch(dtype: torch.dtype, run: Any) -> None:
    arguments = make((4, 3, 40, 48), dtype=dtype)
    whole = run(check(arguments))
    order = torch.tensor([2, 0, 3])
    names = ("images", "flip", "role", "t", "index")
    part = run(check(arguments | {name: arguments[name][order] for name in names}))
    assert torch.equal(part, whole[order])


@needs_compiler
def test_a_clean_image_without_statistics_is_only_cast(run: Any) -> None:
    arguments = make((3, 3, 17, 9), BF16, roles=(CLEAN,), dtype=F32, flip=None)
    assert torch.equal(run(check(arguments)), arguments["images"].float())


@needs_compiler
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_role_means_no_mollification_and_no_memory_for_it(dtype: torch.dtype, run: Any) -> None:
    tail = check(make((3, 3, 24, 32), dtype=dtype, role=None, t=None, index=None))
    shared = backend.plan(tail, torch.empty(3, 3, 24, 32, dtype=dtype), SHARED_LIMIT).shared
    assert shared == (0 if dtype == F32 else 32 * 3 * 32)  # the pixels of a fast kernel's block
    assert error(run(tail), define(tail)) < LIMITS[dtype]


@needs_compiler
@pytest.mark.parametrize(("source", "dtype"), [(U8, BF16), (F32, F32)])
def test_sixteen_rows_a_block_give_what_32_give(source: torch.dtype, dtype: torch.dtype, run: Any) -> None:
    tail = check(make((4, 3, 56, 40), source, dtype=dtype))
    out = torch.empty(4, 3, 56, 40, dtype=dtype, memory_format=LAST)
    large = backend.plan(tail, out, SHARED_LIMIT).shared
    assert error(run(tail, limit=large - 1), run(tail, limit=large)) < {BF16: 4e-3, F32: 1e-7}[dtype]


@needs_compiler
def test_a_blurred_constant_is_that_constant(run: Any) -> None:
    images = torch.full((6, 48, 64, 3), 255, dtype=U8)
    tail = check(make((6, 3, 48, 64), roles=(BLUR,), images=images, t=torch.linspace(0, 1, 6), dtype=F16))
    want = ((1 - torch.tensor(MEAN)) / torch.tensor(STD)).view(1, 3, 1, 1).expand(6, 3, 48, 64)
    assert error(run(tail), want) < 5e-4


@needs_compiler
def test_partners_and_boxes_out_of_range_are_clamped_as_on_a_gpu(run: Any) -> None:
    tail = check(make((4, 3, 24, 32), mix="cutmix", roles=(CLEAN, BLUR)))
    assert tail.box is not None and tail.partner is not None
    wild = torch.tensor([[-5, 99, -7, 99], [3, 99, -9, 5], [-1, 4, 8, 99], [9, 2, 7, 3]], dtype=torch.int32)
    tame = torch.tensor([[0, 24, 0, 32], [3, 24, 0, 5], [0, 4, 8, 32], [0, 0, 0, 0]], dtype=torch.int32)
    partner = torch.tensor([-3, 77, 1, 0])
    got = run(dataclasses.replace(tail, box=wild, partner=partner))
    want = run(dataclasses.replace(tail, box=tame, partner=partner.clamp(0, 3)))
    assert torch.equal(got, want)


@needs_compiler
@pytest.mark.parametrize(("source", "dtype"), [(U8, BF16), (F32, BF16)])
def test_offsets_past_2_to_31_elements(source: torch.dtype, dtype: torch.dtype, run: Any) -> None:
    arguments = make((2, 3, 16, 16), source, roles=(NOISE, BLUR), dtype=dtype)
    want = run(check(arguments))
    images, far = arguments["images"], 2**31 + 64
    # Memory that is never touched costs nothing.
    store = torch.empty(far + 768, dtype=source).as_strided((2, *images.shape[1:]), (far, *images.stride()[1:]))
    store.copy_(images)
    out = torch.empty(far + 768, dtype=dtype).as_strided(want.shape, (far, *want.stride()[1:]))
    assert torch.equal(run(check(arguments | {"images": store}), out), want)


def place(images: Tensor, end: bool) -> Tensor:
    """A copy of images in memory that begins or ends at a page which ends the process if it is read."""
    page, size = mmap.PAGESIZE, images.numel() * images.element_size()
    pages = -(-size // page) + 2
    memory = mmap.mmap(-1, pages * page)
    store = torch.frombuffer(memory, dtype=U8)
    for closed in (0, pages - 1):
        address = ctypes.c_void_p(store.data_ptr() + closed * page)
        assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(page), 0) == 0
    first = (pages - 1) * page - size if end else page
    return store[first : first + size].view(images.dtype).view(images.shape).copy_(images)


@needs_compiler
@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize(("source", "mix", "dtype"), [(U8, "mixup", BF16), (U8, "cutmix", F16), (F32, "mixup", F32)])
def test_nothing_is_read_before_or_behind_the_images(
    source: torch.dtype, mix: str, dtype: torch.dtype, end: bool, run: Any
) -> None:
    # Blurred whole, so that the rows at both ends count; mirrored or not, the last columns lie at different ends.
    arguments = make((4, 3, 40, 72), source, mix, roles=(BLUR,), dtype=dtype, t=torch.ones(4))
    arguments["flip"] = torch.tensor([True, False, True, False])
    arguments["partner"] = torch.tensor([3, 0, 1, 0])
    want = run(check(arguments))
    assert torch.equal(run(check(arguments | {"images": place(arguments["images"], end)})), want)


def test_images_off_the_gpu_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"images must be on a CUDA device for backend 'cupy', got cpu"):
        batch_tail(**make((1, 3, 8, 8)), backend="cupy")


def test_arrays_of_another_library_come_back_as_they_went_in() -> None:
    arguments = make((4, 3, 12, 8), dtype=F32)
    want = batch_tail(**arguments, backend="torch")
    arrays = {name: value.numpy() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    got = backend.batch_tail_arrays(**arrays, backend="torch")
    assert isinstance(got, np.ndarray)
    assert np.array_equal(got, want.numpy())
    assert torch.equal(backend.batch_tail_arrays(**arguments, backend="torch"), want)
    standard = {name: np.array(arguments[name]) for name in ("mean", "std")}
    assert np.array_equal(backend.batch_tail_arrays(**arrays | standard, backend="torch"), want.numpy())
    with pytest.raises(ValueError, match="images must be an array that supports DLPack, got list"):
        backend.batch_tail_arrays([[1]])
    with pytest.raises(ValueError, match=r"dtype must be .* for NumPy's arrays, got torch.bfloat16"):
        backend.batch_tail_arrays(np.zeros((1, 2, 2, 3), np.uint8), backend="torch")


def test_arrays_of_a_library_without_array_namespaces_come_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # What CuPy 14 has and has not.
    class Array:
        __module__ = "cupy._core.core"
        device = types.SimpleNamespace(id=0)

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    cupy: Any = types.ModuleType("cupy")
    cupy.from_dlpack = Array
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=0))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    # There may be no device whose stream could be taken.
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    arguments = make((4, 3, 12, 8), dtype=F32)
    arrays = {name: Array(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    got = backend.batch_tail_arrays(**arrays, backend="torch")
    assert isinstance(got, Array)
    assert torch.equal(got.tensor, batch_tail(**arguments, backend="torch"))


def on_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in arguments.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_agrees_with_the_definition(case: str) -> None:
    shape, source, mix, dtype, memory_format = CASES[case]
    arguments = make(shape, source, mix, dtype=dtype, memory_format=memory_format)
    want = define(check(arguments))
    got = batch_tail(**on_gpu(arguments), backend="cupy")
    assert got.is_contiguous(memory_format=memory_format)
    assert error(got.cpu(), want) < LIMITS[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "mix", "dtype"), MIXED)
def test_a_gpu_mixes_blurred_images_with_partners_of_any_flip(
    source: torch.dtype, mix: str, dtype: torch.dtype
) -> None:
    arguments = blurred_with_partners_of_any_flip(source, mix, dtype)
    assert error(batch_tail(**on_gpu(arguments), backend="cupy").cpu(), define(check(arguments))) < LIMITS[dtype]


@pytest.mark.gpu
def test_a_gpu_blurs_an_imagenet_batch_as_defined() -> None:
    arguments = make((24, 3, 224, 224), mix="cutmix")
    assert error(batch_tail(**on_gpu(arguments), backend="cupy").cpu(), define(check(arguments))) < LIMITS[BF16]


@pytest.mark.gpu
def test_work_goes_to_the_current_stream() -> None:
    arguments = make((64, 3, 224, 224))
    device = on_gpu(arguments)
    want = batch_tail(**device, backend="cupy")
    images, empty = device["images"], torch.zeros_like(device["images"])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Long enough for a launch on another stream to overtake the copy.
        torch.cuda._sleep(50_000_000)
        empty.copy_(images)
        got = batch_tail(**(device | {"images": empty}), backend="cupy")
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_cupy_arrays_go_in_and_come_out_without_a_copy() -> None:
    cupy = pytest.importorskip("cupy")
    arguments = make((4, 3, 32, 40), dtype=F32)
    device = on_gpu(arguments)
    want = batch_tail(**device, backend="cupy")
    arrays = {name: cupy.from_dlpack(value) if isinstance(value, Tensor) else value for name, value in device.items()}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        got = backend.batch_tail_arrays(**arrays)
        stream.synchronize()
    assert isinstance(got, cupy.ndarray)
    assert torch.equal(torch.from_dlpack(got), want)
