"""Networks of the user's own, and the choice among a network's outputs."""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fastmoll.robustness.networks import (
    SomeOutputs,
    call_function,
    count_outputs,
    describe_function,
    find_function,
    find_names,
    read_names,
)

CODE = """
from dataclasses import dataclass

import torch
from torch import nn

from {helper} import WIDTH


@dataclass
class Settings:
    width: int = WIDTH


class Net(nn.Sequential):
    def __init__(self, num_classes=10):
        super().__init__(nn.Flatten(), nn.LazyLinear(Settings().width), nn.Linear(Settings().width, num_classes))


def fixed():
    return nn.Linear(3, 7)


def wrong():
    return {{"model": 1}}


class Maker:
    def __call__(self):
        return fixed()


network = Net(3)


def without_values():
    with torch.device("meta"):
        return fixed()


def failing(width):
    raise AssertionError


CONSTANT = 3
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with networks, and one beside it that it imports."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "helper_of_mine.py").write_text("WIDTH = 5\n")
    (tmp_path / "nets_of_mine.py").write_text(CODE.format(helper="helper_of_mine"))
    yield tmp_path / "nets_of_mine.py"
    for name in ("helper_of_mine", "nets_of_mine"):
        sys.modules.pop(name, None)


def test_a_function_is_found_in_a_file_or_a_module_of_the_working_directory(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, function, _ = find_function(f"{code}:Net", "--net")
    assert name == "nets_of_mine.py:Net"
    assert call_function(function, name, 4, "--net")[2].out_features == 4  # type: ignore[index]
    monkeypatch.chdir(code.parent)
    name, function, _ = find_function("nets_of_mine:fixed", "--net")
    assert name == "nets_of_mine:fixed"
    assert call_function(function, name, 4, "--net").out_features == 7  # it has no such parameter


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{file}:Nett", "^--net: Nett in .*nets_of_mine.py does not exist; did you mean Net"),
        ("{file}:CONSTANT", "CONSTANT in .* is no function or class"),
        ("{file}:network", "network in .*nets_of_mine.py is a network, not a function that makes one$"),
        ("{file}:", "--net must be MODULE:FUNCTION or FILE.py:FUNCTION, got"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("no_such_module:f", "no_such_module can't be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_function_that_is_not_there_is_named(code: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_function(name.format(file=code), "--net")


def test_what_is_beside_a_file_comes_first_while_it_is_loaded_and_last_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("installed", "mine"):
        (tmp_path / name).mkdir()
        for module in ("beside_of_mine", "later_of_mine"):
            (tmp_path / name / f"{module}.py").write_text(f"WHERE = {name!r}\n")
    (tmp_path / "mine" / "nets.py").write_text("import beside_of_mine\n\n\ndef f():\n    pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    for module in ("beside_of_mine", "later_of_mine"):
        monkeypatch.setitem(sys.modules, module, sys)  # so that they are gone afterwards
        del sys.modules[module]
    find_function(f"{tmp_path / 'mine' / 'nets.py'}:f", "--net")
    assert sys.modules["beside_of_mine"].WHERE == "mine"
    assert importlib.import_module("later_of_mine").WHERE == "installed"
    assert sys.path[-1] == str(tmp_path / "mine")


def test_a_function_is_told_from_one_whose_file_has_changed(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(name: str) -> str:
        return describe_function(*find_function(f"{code}:{name}", "--net"))

    code.write_text(code.read_text() + "\nimport functools\npart = functools.partial(fixed)\nmade = Maker()\n")
    code.write_text(code.read_text() + "kept = functools.lru_cache(fixed)\n")
    names = ["Net", "fixed", "part", "kept", "made"]
    before = {name: described(name) for name in names}
    assert all(re.fullmatch(rf"nets_of_mine\.py:{name} \(digest of its 2 files \w+\)", before[name]) for name in names)
    assert len({text.partition(" ")[2] for text in before.values()}) == 1
    code.write_text(code.read_text().replace("Linear(3, 7)", "Linear(3, 8)"))
    after = {name: described(name) for name in names}
    assert all(after[name] != before[name] for name in names)
    assert describe_function("math:sqrt", math.sqrt, math) == "math:sqrt"
    typed: dict[str, Any] = {}
    exec("def f(): pass", typed)
    assert describe_function("f", typed["f"], ModuleType("typed")) == "f"


def test_a_function_is_told_from_one_whose_imports_have_changed(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = "def lazy():\n    import below_of_mine.deep\n\n    return fixed()\n"
    code.write_text(code.read_text() + lazy)
    below = code.parent / "below_of_mine"
    for file in (below / "deep.py", below / "__init__.py", code.parent / "unused.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("A = 1\n")
    place = code.parent / "venv" / "lib" / "site-packages"
    place.mkdir(parents=True)
    (place / "installed_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(place))
    for name in ("below_of_mine", "below_of_mine.deep", "installed_of_mine"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that they are gone afterwards
        del sys.modules[name]
    importlib.import_module("installed_of_mine")
    _, function, module = find_function(f"{code}:lazy", "--net")
    helper = code.with_name("helper_of_mine.py")
    assert "digest of its 2 files" in describe_function("lazy", function, module)
    call_function(function, "lazy", 3, "--net")  # which imports more
    before = describe_function("lazy", function, module)
    assert "digest of its 4 files" in before
    for file, counts in ((helper, True), (below / "deep.py", True), (code.parent / "unused.py", False)):
        text = file.read_text()
        file.write_text(text + "# changed\n")
        assert (describe_function("lazy", function, module) != before) == counts, file
        file.write_text(text)
    assert describe_function("lazy", function, module) == before
    # Of what imports nothing beside it, the digest is of its bytes, as it has always been.
    alone = code.parent / "alone" / "net.py"
    alone.parent.mkdir()
    alone.write_text("def f():\n    pass\n")
    digest = hashlib.blake2b(alone.read_bytes(), digest_size=8).hexdigest()
    assert describe_function(*find_function(f"{alone}:f", "--net")) == f"net.py:f (digest of its file {digest})"


def test_a_function_made_of_an_installed_one_is_told_by_the_file_it_was_named_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, beside = tmp_path / "models_of_mine" / "nets.py", tmp_path / "common_of_mine" / "widths.py"
    for path in (file, beside):
        path.parent.mkdir()  # packages without __init__.py
    beside.write_text("WIDTH = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())

    made = (
        "part = functools.partial(torchvision.models.resnet18, num_classes={n})\n\n\n"
        "@functools.wraps(torchvision.models.resnet18)\ndef wrapped():\n    return {n}\n"
    )

    def described(n: int, reference: str, imports: str = "") -> str:
        file.write_text(f"import functools\nimport torchvision\n{imports}\n{made.format(n=n)}")
        for name in ("models_of_mine", "models_of_mine.nets", "common_of_mine", "common_of_mine.widths"):
            monkeypatch.setitem(sys.modules, name, sys)
            del sys.modules[name]
        importlib.invalidate_caches()
        return describe_function(*find_function(reference, "--net"))

    for name in ("part", "wrapped"):
        assert described(1, f"{file}:{name}") != described(22, f"{file}:{name}")
        module = f"models_of_mine.nets:{name}", "import common_of_mine.widths\n"
        before = described(1, *module)
        assert before != described(22, *module) and before == described(1, *module)
        beside.write_text(f"WIDTH = 4  # {name}\n")
        assert before != described(1, *module)


def test_code_that_fails_or_gives_no_network_is_named(code: Path, tmp_path: Path) -> None:
    for name, message in {
        "wrong": r"--net: nets_of_mine\.py:wrong must return a torch\.nn\.Module, got a dict",
        "without_values": r"must return a network with values, but it has tensors on the meta device$",
        "failing": r"nets_of_mine\.py:failing raised TypeError: failing\(\) missing 1 required .*'width'",
    }.items():
        with pytest.raises(ValueError, match=message):
            call_function(find_function(f"{code}:{name}", "--net")[1], f"{code.name}:{name}", 3, "--net")
    for text, message in {"import sys; sys.exit(3)": "SystemExit: 3", "x = (": "SyntaxError: '\\(' was never"}.items():
        (tmp_path / "script.py").write_text(text)
        with pytest.raises(ValueError, match=rf"script\.py can't be imported: {message}"):
            find_function(f"{tmp_path / 'script.py'}:f", "--net")


def test_code_may_change_its_working_directory_and_nobody_elses(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    text = code.read_text() + f"\nimport os\nos.chdir({str(code.parent)!r})\n"
    made = f"def made(num_classes):\n    os.chdir({str(code.parent)!r})\n    return nn.Linear(3, num_classes)\n"
    code.write_text(text + made)
    name, function, _ = find_function(f"{code}:made", "--net")
    assert os.getcwd() == "/"
    assert call_function(function, name, 4, "--net").out_features == 4 and os.getcwd() == "/"
    code.write_text(text + "raise OSError\n")
    with pytest.raises(ValueError, match="can't be imported"):
        find_function(f"{code}:made", "--net")
    assert os.getcwd() == "/"


class Odd(nn.Module):
    def __init__(self, answer: object) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, images: torch.Tensor) -> object:
        assert images.shape[2] == 8
        return self.answer


def test_the_logits_are_counted_and_anything_else_is_named() -> None:
    assert count_outputs(Odd(torch.zeros(2, 6)), 8, "mine") == 6
    for answer, message in (
        ((torch.zeros(2, 6),), "mine must give logits (B, K) as a tensor, got a tuple"),
        (torch.zeros(2), "mine must give logits (2, K) of 2 images, got torch.float32 of shape (2,)"),
        (torch.zeros(1, 6), "got torch.float32 of shape (1, 6)"),
        (torch.zeros(2, 6, dtype=torch.int64), "got torch.int64 of shape (2, 6)"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            count_outputs(Odd(answer), 8, "mine")
    assert count_outputs(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)).bfloat16(), 8, "mine") == 5
    with pytest.raises(ValueError, match="mine can't take images of 9 x 9 pixels: AssertionError"):
        count_outputs(Odd(torch.zeros(2, 6)), 9, "mine")


def test_some_outputs_are_those_asked_for_in_that_order() -> None:
    logits = torch.randn(5, 9)
    assert torch.equal(SomeOutputs(nn.Identity(), [7, 0, 3])(logits), logits[:, [7, 0, 3]])


def test_names_are_looked_up_and_what_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_bytes("\ufeffcat\r\ndog \r\nGröße\r\n\r\n".encode())
    names = read_names(path)
    assert names == ["cat", "dog", "Größe"]
    assert find_names(["Größe", "cat"], names, path) == [2, 0]
    with pytest.raises(ValueError, match=r"names\.txt has no 'dogs', a class of the data; did you mean dog"):
        find_names(["cat", "dogs"], names, path)
    with pytest.raises(ValueError, match=r"has no 'n01', a class of the data \(nor 1 more\); its first is 'cat'"):
        find_names(["n01", "cat", "n02"], names, path)
    with pytest.raises(ValueError, match="has 'cat' more than once"):
        find_names(["cat"], ["cat", "dog", "cat"], path)
    for content, message in ((b"", "is empty"), (b"a\n\nb", "an empty line, number 2"), (b"\xff", "can't be read")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"--classes: .*names\.txt .*{message}"):
            read_names(path)
    with pytest.raises(ValueError, match=r"^--classes: there is no file nowhere\.txt$"):
        read_names("nowhere.txt")
    with pytest.raises(ValueError, match=r"--classes: .* can't be read as a text file: Is a directory$"):
        read_names(tmp_path)
