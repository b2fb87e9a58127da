"""What several test files share: a cache folder of their own, small image trees, sweeps, and the skip of GPU tests."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch loads OpenMP: threads that spin while they wait make a loaded machine several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has one processor
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from cifar_files import PER_FILE
from PIL import Image
from torch import Tensor

from fastmoll.pipelines import small

# Read when Triton is first imported: without a card, its kernels run in the interpreter, on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell lets the commands it puts into the background ignore SIGINT, and they hand that on to their own processes, of
# which some tests want to see what they do at it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the user's cache out of the tests, and the tests out of the user's cache."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For networks too small for more: threads that wait for each other are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes an ImageFolder tree of small noise JPEGs of varied sizes."""

    def make(samples: int, classes: int = 3, name: str = "tree", seed: int = 0) -> Path:
        rng = np.random.default_rng(seed)
        for i in range(samples):
            folder = tmp_path / name / f"class{i % classes}"
            folder.mkdir(parents=True, exist_ok=True)
            # Blocks of 8 pixels survive JPEG, so that images stay far apart.
            blocks = rng.integers(0, 256, (int(rng.integers(3, 6)), int(rng.integers(3, 6)), 3), np.uint8)
            Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(folder / f"{i:04}.jpg", quality=95)
        return tmp_path / name

    return make


@pytest.fixture
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete data sets of small images are a few images here."""
    counts = {"cifar10": (5 * PER_FILE, PER_FILE), "cifar100": (PER_FILE, PER_FILE), "tinyimagenet": (8, 5)}
    known = {name: small.KNOWN[name]._replace(train=counts[name][0], val=counts[name][1]) for name in counts}
    known["tinyimagenet"] = known["tinyimagenet"]._replace(classes=4, size=64)
    monkeypatch.setattr(small, "KNOWN", known)


@pytest.fixture
def write_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that writes the file of a sweep, ``some.toml``, into the current folder, an empty one."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("some.toml").write_text(text)
        return Path("some.toml")

    return write


@pytest.fixture(scope="session")
def paper_sweep() -> list[Any]:
    """The runs of the paper's sweep."""
    from fastmoll.sweep.arguments import find_file
    from fastmoll.sweep.file import read_sweep

    return list(read_sweep(find_file("paper.toml")))


@pytest.fixture(scope="session")
def triton_interpreter() -> None:
    """Let the interpreter of Triton 3.6 count loops under NumPy 2.5, which no longer turns ``[n]`` into an integer.

    And save all of its versions two thirds of their time: each function that a kernel calls patches the language anew,
    each type is looked up in a table made anew, and each sum of integers is done again in 64 bits to see if it fits,
    which it does where tensors are small.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton.language as tl
        from triton.runtime import interpreter

        patch, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang

        def patch_index_too(tensor: Any, *scope: Any) -> None:
            patch(tensor, *scope)
            tensor.__index__ = lambda self: int(self.handle.data.item())

        def patch_once(function: Any) -> Any:
            languages = [module for module in function.__globals__.values() if module is tl or module is tl.core]
            return patch_language(function) if any(tl.core.is_builtin(module.load) for module in languages) else None

        known_dtype = functools.cache(interpreter._get_np_dtype)

        def numpy_dtype(kind: Any) -> Any:  # of pointers, which have no hash, an address
            return np.dtype(np.uint64) if kind.scalar.is_ptr() else known_dtype(kind.scalar)

        interpreter._patch_lang_tensor = patch_index_too
        interpreter._patch_lang = patch_once
        interpreter._get_np_dtype = numpy_dtype
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` gives with NaN, or the largest integer: an element that nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def four_photographs() -> Tensor:
    """The centres of four photographs, uint8 ``(4, 3, 224, 224)``."""
    data = pytest.importorskip("skimage.data")
    found = []
    for whole in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket()):
        top, left = (whole.shape[0] - 224) // 2, (whole.shape[1] - 224) // 2
        found.append(torch.from_numpy(whole[top : top + 224, left : left + 224].copy()))
    return torch.stack(found).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(params=["compiled", "torch"])
def corruption_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two ways to compute."""
    if request.param == "torch":
        monkeypatch.setattr("fastmoll.kernels.corruption_job.installed", lambda package: False)
    else:
        pytest.importorskip("numba")
    return str(request.param)
