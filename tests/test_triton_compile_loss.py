"""The kernels of draws, labels and loss compile for real cards, without spills; no card is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# In a process of its own, because kernels here are interpreted.
SCRIPT = """
import json, sys, torch, triton_compile
from fastmoll.kernels import draw_triton, soft_cross_entropy_triton as loss
from fastmoll.mollify import beta_quantiles

index, label, half = torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.full((8,), 0.5)
pair = {"partner": label, "lam": half}
with triton_compile.recorded(draw_triton) as launches:
    draw_triton.draw_batch(index)
    draw_triton.draw_batch(index, 2, seed=2**64 - 1, beta=(2.0, 3.0), quantiles=beta_quantiles(2.0, 3.0), k_blur=1.5)
    draw_triton.draw_batch(index, labels=label, num_classes=1000, **pair)
    draw_triton.draw_batch(
        index, beta=(2.0, 3.0), quantiles=beta_quantiles(2.0, 3.0), labels=torch.zeros(8, 10), num_classes=10, **pair
    )
with triton_compile.recorded(loss) as more:
    for classes, dtype in ((10, torch.float32), (1000, torch.bfloat16), (100_000, torch.bfloat16)):
        logits = torch.zeros(8, classes, dtype=dtype, requires_grad=True)
        loss.soft_cross_entropy_short(logits, label, half, **pair).backward()
    loss.soft_cross_entropy(torch.zeros(8, 1000, dtype=torch.bfloat16), torch.zeros(8, 1000))
found = []
for launch in launches + more:
    for architecture in triton_compile.ARCHITECTURES:
        r = triton_compile.compile_launch(launch, architecture)
        found.append([r.kernel, architecture, r.registers, r.stack, r.shared])
json.dump(found, sys.stdout)
"""


def test_every_kernel_compiles_for_four_architectures_without_stack():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(folder.parent), str(folder), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {kernel for kernel, *_ in found} == {"_draw", "_rows", "_scale"}
    assert {architecture for _, architecture, *_ in found} == {80, 90, 100, 120}
    for kernel, architecture, registers, stack, shared in found:
        where = f"{kernel} for sm_{architecture}"
        assert stack == 0, where
        # Two blocks of eight warps on a multiprocessor.
        assert registers <= 128, where
        assert shared <= 8 * 1024, where
