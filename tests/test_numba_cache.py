"""Numba's cache on disk watches the file of a function and no other. So a file whose functions take something from
others has a line with a digest of that: it changes, and the cache with it, when any of that does."""

from __future__ import annotations

import ast
import errno
import hashlib
import importlib
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastmoll.kernels

KERNELS = Path(fastmoll.kernels.__file__).parent
LINE = "# What comes from other files, which Numba's cache does not watch (tests/test_numba_cache.py): {}"


def shown(value: Any) -> str:
    """A constant as text; nothing else can be told from its changed self."""
    array = np.asarray(value)
    assert array.dtype.kind in "biufU", f"{value!r} is no constant: digests know constants and functions of *_numba.py"
    return f"{array.dtype} {array.shape} {array.tolist()}"


def taken(source: str) -> dict[str, str]:
    """What a file takes from the kernels: by name, the values of constants and the sources of compiled functions."""
    found, modules = {}, {}
    for node in ast.walk(ast.parse(source)):
        assert not (isinstance(node, ast.Import) and any(alias.name.startswith("fastmoll") for alias in node.names))
        if not (isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fastmoll")):
            continue
        for alias in node.names:
            whole = node.module == "fastmoll.kernels"
            name = f"{node.module}.{alias.name}" if whole else node.module
            if name.endswith("_numba"):
                found[name] = (KERNELS / f"{name.rpartition('.')[2]}.py").read_text(encoding="utf-8")
            elif whole:
                modules[alias.asname or alias.name] = importlib.import_module(name)
            else:
                found[f"{name}.{alias.name}"] = shown(getattr(importlib.import_module(name), alias.name))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            found[f"{module.__name__}.{node.attr}"] = shown(getattr(module, node.attr))
    return found


def line_of(source: str) -> str:
    """The line that a file must have, empty if it takes nothing."""
    found = taken(source)
    text = "\0".join(f"{name}\0{found[name]}" for name in sorted(found))
    return LINE.format(hashlib.sha256(text.encode()).hexdigest()[:12]) if found else ""


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*_numba.py")), ids=lambda path: path.stem)
def test_a_file_changes_with_what_its_compiled_functions_take_from_others(path):
    source = path.read_text(encoding="utf-8")
    lines = [line for line in source.splitlines() if line.startswith(LINE.format(""))]
    assert "".join(lines) == line_of(source), f"{path.name}: put the expected line below its imports"


def test_the_line_tells_values_and_functions_from_their_changed_selves(monkeypatch):
    from fastmoll.kernels import corruption_job

    constant = "from fastmoll.kernels import corruption_job\nX = corruption_job.NUDGE\n"
    function = "from fastmoll.kernels.counter_numba import take\n"
    before = line_of(constant), line_of(function)
    monkeypatch.setattr(corruption_job, "NUDGE", corruption_job.NUDGE * 2)
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: "changed")
    assert not {*before} & {line_of(constant), line_of(function), ""}


def test_another_line_alone_makes_numba_compile_anew(tmp_path):
    pytest.importorskip("numba")
    add = "import numba\n@numba.njit(cache=True)\ndef add(x):\n    return x + {}\n"
    use = "import numba\nfrom added import add\n{}\n@numba.njit(cache=True)\ndef use(x):\n    return add(x)\n"
    results = []
    for number in (1, 2):
        (tmp_path / "added.py").write_text(add.format(number))
        (tmp_path / "used.py").write_text(use.format(LINE.format(number)))
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-c", "from used import use; print(use(0))"]
        results.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert results == ["1\n", "2\n"]


def test_without_a_folder_for_the_cache_functions_are_compiled_all_the_same(monkeypatch):
    pytest.importorskip("numba")
    from numba.core.caching import FunctionCache

    from fastmoll.kernels.compiled_numba import compiled, fused

    monkeypatch.setattr(FunctionCache._impl_class, "_locator_classes", [])
    for decorate in (compiled, fused):
        assert decorate(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 40])
@pytest.mark.parametrize("decorator, call", [("compiled", "add(1)"), ("entry(float64(float64))", "add.ctypes(1.0)")])
def test_what_is_damaged_on_the_disk_is_compiled_once_more(decorator, call, left, ending, tmp_path, monkeypatch):
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    head = "from numba import float64\nfrom fastmoll.kernels.compiled_numba import compiled, entry\n"
    (tmp_path / "added.py").write_text(f"{head}@{decorator}\ndef add(x):\n    return x + 1\nresult = {call}\n")

    def run():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = runpy.run_path(str(tmp_path / "added.py"))
        assert found["result"] == 2
        return [str(warning.message) for warning in caught], found["add"]

    assert run()[0] == []
    (path,) = (tmp_path / "cache").glob(f"*/added.add-*.{ending}")
    os.truncate(path, left)
    (message,), _ = run()
    assert "add is compiled anew" in message and str(path.parent) in message
    messages, add = run()
    assert messages == [] and add._cache_hits  # from the disk again


@pytest.mark.parametrize("decorator, call", [("compiled", "add(1)"), ("entry(float64(float64))", "add.ctypes(1.0)")])
@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.filterwarnings("ignore:.*add is compiled anew")
def test_on_a_full_disk_functions_are_compiled_all_the_same(decorator, call, damaged, tmp_path, monkeypatch):
    numba = pytest.importorskip("numba")
    from numba.core.caching import IndexDataCacheFile

    def write(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    head = "from numba import float64\nfrom fastmoll.kernels.compiled_numba import compiled, entry\n"
    (tmp_path / "added.py").write_text(f"{head}@{decorator}\ndef add(x):\n    return x + 1\nresult = {call}\n")
    if damaged:
        runpy.run_path(str(tmp_path / "added.py"))
        (index,) = (tmp_path / "cache").glob("*/added.add-*.nbi")
        os.truncate(index, 0)
    monkeypatch.setattr(IndexDataCacheFile, "_open_for_write", write)
    with pytest.warns(UserWarning, match=rf"^each process compiles anew: {tmp_path}.* \(\[Errno 28\] No space left"):
        assert runpy.run_path(str(tmp_path / "added.py"))["result"] == 2
