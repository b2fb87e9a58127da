"""CUDA C++: its sources put together, and what can be wrong with an installation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastmoll.kernels import cuda_toolchain


def test_a_source_is_put_together_from_its_files_and_every_line_keeps_its_place() -> None:
    files = {path.name: path.read_text().splitlines() for path in Path(cuda_toolchain.__file__).parent.glob("*.cu*")}
    name, place, found = "", 0, []
    for line in cuda_toolchain.read_source("batch_tail.cu").splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.+)"', line)
        if directive:
            place, name = int(directive[1]), directive[2]
            continue
        assert line == files[name][place - 1]
        found.append((name, place))
        place += 1
    lines = [(name, place) for name, text in files.items() for place in range(1, len(text) + 1)]
    assert sorted(found) == sorted((name, i) for name, i in lines if not files[name][i - 1].startswith("#include"))


@pytest.mark.parametrize(
    ("distributions", "cupy", "nvrtc", "driver", "message"),
    [
        (["cupy-cuda12x"], 12, 12, 12, None),
        (["cupy-cuda12x"], 12, 13, 13, None),
        (["cupy-cuda13x"], 13, 13, 13, None),
        (["cupy-cuda12x"], None, None, None, None),
        ([], None, None, None, r"needs CuPy: pip install 'fastmoll\[cu1[23]\]'"),
        (
            ["cupy-cuda13x", "cupy-cuda12x"],
            12,
            12,
            13,
            r"more than one CuPy is installed \(cupy-cuda12x, cupy-cuda13x\)",
        ),
        (["cupy-cuda12x"], 12, 13, 12, "driver runs CUDA 12, but CuPy was built for CUDA 12 and found .* of CUDA 13"),
        (["cupy-cuda13x"], 13, 13, 0, "needs a CUDA driver, and none is installed"),
        (["cupy-cuda13x"], 13, 12, 12, "driver runs CUDA 12, but CuPy was built for CUDA 13"),
    ],
)
def test_an_installation_that_cannot_work_is_explained(
    distributions: list[str], cupy: int | None, nvrtc: int | None, driver: int | None, message: str | None
) -> None:
    problem = cuda_toolchain.explain(distributions, cupy, nvrtc, driver)
    if message is None:
        assert problem is None
    else:
        assert problem is not None and re.search(message, problem)
