"""Networks of the user's own, made by a function of theirs, and which outputs of a network are compared."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastmoll.pipelines.errors import did_you_mean, nearest, reason_of

WEIGHTS: Final = "checkpoint (digest of its weights)"
"""What a fingerprint calls the `digest` of the weights."""
_TRIAL = 2  # images: a network that mistakes one for a whole batch shows itself


def find_function(reference: str, option: str) -> tuple[str, Callable[..., Any], ModuleType]:
    """Load what makes a network: ``"package.module:function"`` or ``"path/to/file.py:function"``.

    Modules are looked for in the working directory, too, and those that a file imports beside it, as Python does for a
    script. Afterwards that folder is the last place where modules are looked for: one that is called as one of an
    installed package stays out of the way of those who import that later. The working directory is the same
    afterwards.

    Args:
        reference: Where the function is.
        option: What the user gave it by, for messages.

    Returns:
        What to call the network, without folders, the function, and the module that it was found in.

    Raises:
        ValueError: no such module or file, one that raises an error, no such function in it, or a network there.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ValueError(f"{option} must be MODULE:FUNCTION or FILE.py:FUNCTION, got {reference!r}")
    path = Path(place).resolve() if place.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ValueError(f"{option}: there is no file {place}")
    try:
        with _staying(), _looking_in(os.getcwd() if path is None else str(path.parent)):
            module = importlib.import_module(place) if path is None else _load(path)
    except (Exception, SystemExit) as error:  # whatever the code of others raises
        raise ValueError(f"{option}: {place} can't be imported: {reason_of(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        fault = "is no function or class" if hasattr(module, name) else "does not exist"
        raise ValueError(f"{option}: {name} in {place} {fault}{did_you_mean(nearest(name, known, 3))}")
    if isinstance(function, nn.Module):
        raise ValueError(f"{option}: {name} in {place} is a network, not a function that makes one")
    return f"{place if path is None else path.name}:{name}", function, module


def digest(state: Mapping[str, Any]) -> str:
    """Hex digest of a state dict: the names and values of a network's parameters and buffers."""
    content = hashlib.blake2b(digest_size=16)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):  # what a module keeps besides
            content.update(f"{key} {value!r}".encode())
            continue
        content.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        content.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return content.hexdigest()


def describe_function(name: str, function: Callable[..., Any], module: ModuleType) -> str:
    """The name of a function and a digest of its code.

    That is the file it was found in and the one that defines it, and all imported files in their folders (of a package,
    in the folder that holds the whole package) and below, but for installed packages and fastmoll itself.

    Args:
        name: What to call it.
        function: As from `find_function`. What is in no file, or written in C, has no digest.
        module: As from `find_function`.
    """
    found = {path: _root(path, module.__name__) for path in _source(module)}
    with suppress(ValueError):  # of a function that is wrapped in itself
        inner = inspect.unwrap(function)
        if isinstance(inner, partial):
            inner = inspect.unwrap(inner.func)
        # Of an object that can be called, its class says where it is defined.
        inner = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)
        found |= {path: _root(path, "") for path in _source(inner) if not found or not _installed(path)}
    roots = sorted({*found.values()})
    for path in _imported():
        root = next((root for root in roots if path.is_relative_to(root)), None)
        if root is not None:
            found.setdefault(path, root)
    content = hashlib.blake2b(digest_size=8)
    for path, root in sorted(found.items()):
        with suppress(OSError):  # it is gone by now
            # Of one file alone the digest is that of its bytes, as in earlier versions.
            place = b"" if len(found) == 1 else os.fsencode(path.relative_to(root)) + b"\0"
            content.update(place + path.read_bytes())
    count = f"{len(found)} files" if len(found) > 1 else "file"
    return f"{name} (digest of its {count} {content.hexdigest()})" if found else name


def _source(what: Any) -> list[Path]:
    """The file of Python that a module, function or class is in; none of what is in no such file."""
    try:
        path = Path(inspect.getsourcefile(what) or "").resolve()
    except TypeError:
        return []
    return [path] if path.is_file() else []


def _root(path: Path, module: str) -> Path:
    """The folder that what a file imports is looked for in: that of the file, or the one that holds its package."""
    # A package needs no __init__.py; that of a module by its name is as many folders up as there are dots.
    root = path.parent if path.name != "__init__.py" else path.parent.parent
    for _ in range(module.count(".")):
        root = root.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root


def _imported() -> Iterator[Path]:
    """The imported files, but those of installed packages and of fastmoll, whose version counts."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and name.partition(".")[0] not in ("fastmoll", "__main__"):
            path = Path(file).resolve()
            if not _installed(path):
                yield path


@cache
def _library() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _installed(path: Path) -> bool:
    return path.is_relative_to(_library()) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def call_function(function: Callable[..., Any], name: str, num_classes: int, option: str) -> nn.Module:
    """The network that a function makes; it is told ``num_classes`` if it has such a parameter.

    Args:
        function: As from `find_function`.
        name: What to call it.
        num_classes: Number of outputs that are wanted.
        option: As for `find_function`.

    Raises:
        ValueError: it raises an error, or returns something else, or a network without values, on the meta device.
    """
    try:
        told = "num_classes" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some that are written in C
        told = False
    try:
        with _staying():
            model = function(num_classes=num_classes) if told else function()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{option}: {name} raised {reason_of(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{option}: {name} must return a torch.nn.Module, got a {type(model).__name__}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(f"{option}: {name} must return a network with values, but it has tensors on the meta device")
    return model


@torch.no_grad()
def count_outputs(model: nn.Module, size: int, name: str) -> int:
    """Number of logits that a network in evaluation mode gives, found by showing it two images of zeros.

    Args:
        model: The network.
        size: Height and width of the images, pixels.
        name: What the user calls it, for messages.

    Raises:
        ValueError: it can't take such images, or gives something else.
    """
    like = next((x for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()), torch.empty(0))
    images = torch.zeros(_TRIAL, 3, size, size, dtype=like.dtype, device=like.device)
    try:
        logits = model(images)
    except Exception as error:  # whatever the code of others raises
        raise ValueError(f"{name} can't take images of {size} x {size} pixels: {reason_of(error)}") from error
    if not isinstance(logits, Tensor):
        raise ValueError(f"{name} must give logits (B, K) as a tensor, got a {type(logits).__name__}")
    if logits.ndim != 2 or len(logits) != _TRIAL or not logits.is_floating_point():
        raise ValueError(
            f"{name} must give logits ({_TRIAL}, K) of {_TRIAL} images, got {logits.dtype} "
            f"of shape {tuple(logits.shape)}"
        )
    return logits.shape[1]


class SomeOutputs(nn.Module):
    """A network of which only some outputs are compared.

    Args:
        model: The network.
        kept: Which outputs, in the order wanted.
    """

    kept: Tensor

    def __init__(self, model: nn.Module, kept: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("kept", torch.tensor(kept), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, len(kept))`` of images ``(B, 3, H, W)``."""
        logits: Tensor = self.model(images)
        return logits.index_select(1, self.kept)


def read_names(path: str | os.PathLike[str]) -> list[str]:
    """Class names, one a line.

    Raises:
        ValueError: no such file, one without names, or with an empty line among them.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except FileNotFoundError as error:
        raise ValueError(f"--classes: there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else reason_of(error)
        raise ValueError(f"--classes: {path} can't be read as a text file: {reason}") from error
    names = [line.strip() for line in lines]
    if not all(names):
        raise ValueError(f"--classes: {path} has an empty line, number {names.index('') + 1}")
    if not names:
        raise ValueError(f"--classes: {path} is empty")
    return names


def find_names(wanted: Sequence[str], names: Sequence[str], path: object) -> list[int]:
    """Where the names of some classes are among those of a network's outputs.

    Args:
        wanted: Class names of the data.
        names: Names of the outputs.
        path: Where ``names`` are from, for messages.

    Returns:
        For each of ``wanted``, in that order, its position in ``names``.

    Raises:
        ValueError: one isn't there, or more than once.
    """
    places = {name: place for place, name in enumerate(names)}
    for name in wanted:
        if name not in places:
            hint = did_you_mean(nearest(name, names), f"; its first is {names[0]!r}")
            more = sum(other not in places for other in wanted) - 1
            others = f" (nor {more} more)" if more else ""
            raise ValueError(f"--classes: {path} has no {name!r}, a class of the data{others}{hint}")
        if names.count(name) > 1:
            raise ValueError(f"--classes: {path} has {name!r} more than once")
    return [places[name] for name in wanted]


def describe_outputs(kept: Sequence[int], count: int) -> str:
    """Which outputs are compared, in one line."""
    digest = hashlib.blake2b(repr(list(kept)).encode(), digest_size=8).hexdigest()
    return f"{len(kept)} of {count} (digest {digest})"


@contextmanager
def _staying() -> Iterator[None]:
    """Go back to the working directory afterwards, by which the other paths of the user are named."""
    here = os.getcwd()
    try:
        yield
    finally:
        os.chdir(here)


@contextmanager
def _looking_in(folder: str) -> Iterator[None]:
    """Let modules be looked for in a folder first, as in that of a script, and afterwards in it last."""
    if folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the code of others may have changed that
            sys.path.remove(folder)
        sys.path.append(folder)


def _load(path: Path) -> Any:
    name = f"_of_user_{hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
