"""The CUDA C++ of the batch tail, compiled for cards that are not there: shared memory and registers in limits, matrix
instructions where they are meant, no stack in their loops."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the cuobjdump in triton's package")

from cuda_compile import compile_cuda, inner_loops
from cuda_shim import BF16, F32, LAST, U8, check, make
from triton_compile import SHARED_LIMIT

from fastmoll.kernels import batch_tail_cupy as backend
from fastmoll.kernels.draw import BLUR


@pytest.mark.parametrize("size", [1, 32, 64, 224, 256, 288, 384, 512])
@pytest.mark.parametrize("architecture", SHARED_LIMIT)
@pytest.mark.parametrize(("source", "dtype"), [(U8, BF16), (U8, F32), (F32, F32), (F32, BF16)])
def test_shared_memory_fits_every_size(size: int, architecture: int, source: torch.dtype, dtype: torch.dtype) -> None:
    for height, width in ((size, size), (512, size), (size, 512)):
        tail = check(make((1, 3, height, width), source, roles=(BLUR,), dtype=dtype))
        out = torch.empty(1, 3, height, width, dtype=dtype, memory_format=LAST)
        plan = backend.plan(tail, out, SHARED_LIMIT[architecture])
        assert plan.shared <= SHARED_LIMIT[architecture]
        assert 128 <= plan.threads <= 256


@pytest.mark.parametrize(("architecture", "size", "blocks"), [(80, 224, 3), (90, 224, 4), (90, 384, 2), (90, 32, 7)])
def test_blocks_of_a_batch_fit_a_multiprocessor_beside_each_other(architecture: int, size: int, blocks: int) -> None:
    limit = SHARED_LIMIT[architecture]
    plan = plan_for(size, 0, architecture)
    macros = dict(plan.macros)
    assert (macros["FAST"], macros["HEIGHT"], macros["WIDTH"]) == (1, size, size)
    assert (macros["ROWS"], macros["RESIDENT"]) == (32, blocks)
    assert blocks * (plan.shared + 1024) <= limit + 1024


def plan_for(size: int, mix: int, architecture: int) -> backend.Launch:
    """The launch of a fast kernel."""
    tail = check(make((2, 3, size, size), roles=(BLUR,), mix=(None, "mixup", "cutmix")[mix]))
    out = torch.empty(2, 3, size, size, dtype=BF16, memory_format=LAST)
    return backend.plan(tail, out, SHARED_LIMIT[architecture])


def assert_products_without_spills(sass: str) -> None:
    """No inner loop with matrix instructions, of which there is one, visits the stack."""
    loops = [loop for loop in inner_loops(sass) if any(text.startswith("HMMA") for text in loop)]
    assert loops and not [text for loop in loops for text in loop if text.startswith(("LDL", "STL"))]


FAST = [(224, mix, architecture) for mix in range(3) for architecture in SHARED_LIMIT]
FAST += [(size, 0, architecture) for size in (32, 64, 256, 288, 384) for architecture in SHARED_LIMIT]


@pytest.mark.parametrize(("size", "mix", "architecture"), FAST)
def test_fast_kernels_compile_to_matrix_instructions_without_spills_between_them(
    size: int, mix: int, architecture: int
) -> None:
    pytest.importorskip("cupy", reason="needs CuPy to compile CUDA C++")
    plan = plan_for(size, mix, architecture)
    use = compile_cuda(plan.macros, architecture)
    assert use.registers * plan.threads * dict(plan.macros)["RESIDENT"] <= 65536
    # More blocks beside each other are faster than fewer without a stack, as long as no inner loop visits it.
    assert use.stack <= 64
    assert_products_without_spills(use.sass)


SLOW = {"pixels": (1, 2), "pixels to float32": (1, 0), "float": (0, 2), "float to float32": (0, 0)}


@pytest.mark.parametrize("architecture", SHARED_LIMIT)
@pytest.mark.parametrize("variant", SLOW)
def test_kernels_for_any_strides_compile_without_spills_in_their_loops(variant: str, architecture: int) -> None:
    pytest.importorskip("cupy", reason="needs CuPy to compile CUDA C++")
    pixels, output = SLOW[variant]
    macros = {"PIXELS": pixels, "OUTPUT": output, "FAST": 0, "MIX": 3, "ROWS": 32, "THREADS": 256, "RESIDENT": 2}
    use = compile_cuda(tuple((macros | {"HEIGHT": 0, "WIDTH": 0}).items()), architecture)
    assert use.stack <= (8 if (variant, architecture) == ("pixels to float32", 100) else 0)
    assert use.registers <= 128, "two blocks of 256 threads must fit the registers of a multiprocessor"
    assert_products_without_spills(use.sass)


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0020*/               @P1 BRA 0x10 ;
        /*0030*/              @!P2 BRA 0x50 ;
        /*0040*/                   STL [R1], R2 ;
        /*0050*/                   STG.E.128 [R2.64], R4 ;
        /*0060*/               @P1 BRA 0x50 ;
        /*0070*/              @UP0 BRA 0x0 ;
        /*0080*/                   EXIT ;
        /*0090*/                   BRA 0x90;
"""


def test_innermost_loops_end_with_jumps_back() -> None:
    product, stream = inner_loops(SASS)
    assert product == ["HMMA.16816.F32 R4, R8, R10, R4", "BRA 0x10"]
    assert stream == ["STG.E.128 [R2.64], R4", "BRA 0x50"]
