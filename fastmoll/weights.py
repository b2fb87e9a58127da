"""The trainers' networks by name, and weights for them from torchvision or from a file: a checkpoint among others."""

from __future__ import annotations

import argparse
import importlib
import zipfile
from pathlib import Path, PosixPath
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchvision import models

from fastmoll.kernels.checks import installed
from fastmoll.models import create_model, from_timm, is_timm
from fastmoll.pipelines.errors import did_you_mean, nearest, reason_of, some

FORMAT: Final = 1
"""Of the trainers' checkpoints, their ``"format"``."""
# Training scripts save their arguments and best figures, too: containers of plain values, which run no code.
_SCALAR: Final = np.float64(0).__reduce__()[0]
_PLAIN: Final[list[Any]] = [
    argparse.Namespace,
    *((PosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),  # the latter in Python 3.13
    np.dtype,
    *(type(np.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


class HeadError(ValueError):
    """Weights that fit but for their head.

    Attributes:
        outputs: Number of outputs of that head.
    """

    def __init__(self, message: str, outputs: int) -> None:
        super().__init__(message)
        self.outputs = outputs


def read_file(path: Path) -> Any:
    """``torch.load`` of tensors, plain values and numbers of NumPy, onto the CPU.

    Raises:
        ValueError: the file holds something else, or is damaged.
        OSError: it can't be opened.
    """
    try:
        with torch.serialization.safe_globals(_PLAIN):
            content = torch.load(path, map_location="cpu", weights_only=True)
        _check_sums(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except Exception as error:  # of many types, and with advice in many lines that is not for here
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = "is damaged, or no PyTorch file of tensors and plain values" if path.stat().st_size else "is empty"
        raise ValueError(f"{path} {reason}") from error
    return content


def _check_sums(path: Path) -> None:
    """Compare the records of an archive of ``torch.save`` with their CRC-32, as ``torch.load`` doesn't: 0.4 s a GB.

    Raises:
        zipfile.BadZipFile: one differs; the message names it.
    """
    if not zipfile.is_zipfile(path):  # of PyTorch before 1.6
        return
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.CRC == 0:  # torch.serialization.set_crc32_options(False), and skip_data
                continue
            with archive.open(record) as content:
                while content.read(1 << 20):
                    pass


def build_model(
    name: str,
    num_classes: int,
    size: int,
    *,
    small_stem: bool | None = False,
    fresh: bool = True,
    option: str = "--model.name",
) -> nn.Module:
    """`fastmoll.create_model` for the trainers.

    ResNets are torchvision's own at every image size, so that its weights fit, unless ``small_stem`` says otherwise.

    Args:
        name: Name of a network.
        num_classes: Number of outputs.
        size: Height and width of the images it will see, pixels.
        small_stem: As for ``create_model``, where None takes the form for small images below 128 pixels.
        fresh: Whether the random weights will be trained from.
        option: What the user gave ``name`` by, for messages.

    Raises:
        ValueError: as ``create_model``, naming the option.
    """
    try:
        return create_model(name, num_classes, size, small_stem=small_stem, fresh=fresh)
    except ValueError as error:
        raise ValueError(f"{option}: {str(error).removeprefix('name: ')}") from error


def load_weights(
    model: nn.Module,
    name: str,
    weights: str,
    *,
    size: int | None = None,
    exact: bool = False,
    option: str = "--model.weights",
    instead: str = "give a file, or None for random weights",
) -> str:
    """Load weights into ``model``, in place.

    Args:
        model: Network from `build_model`.
        name: Its name.
        weights: Name of weights of torchvision (``IMAGENET1K_V1``) or, for a network of timm, of timm: a tag, or
            ``timm`` for those of the tag in ``name`` or for its default; or a file: a state dict, or a checkpoint of
            this trainer (its average is taken where it has one).
        size: Height and width of the images it was built for, pixels, to which timm fits positional embeddings;
            without it, names of timm are not known.
        exact: Refuse a head for another number of classes, as `fastmoll evaluate` must. Otherwise the model keeps its
            own head then.
        option: What the user gave ``weights`` by, for messages.
        instead: What to do where they can't be downloaded, for messages.

    Returns:
        What was loaded, in words.

    Raises:
        HeadError: with ``exact``, weights whose head alone doesn't fit.
        ValueError: unknown name, unreadable file, checkpoint of another model, or tensors that don't fit (named).
    """
    of_timm = timm_offers(name)
    if size is not None and weights in of_timm:
        return _load_timm(model, of_timm[weights], size, exact, option, instead)
    state, source = _find(name, weights, option, instead)
    own = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    for prefix in _ATTRIBUTES:
        if state and all(key.startswith(prefix) for key in state) and not all(key.startswith(prefix) for key in own):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    auxiliary = ("aux1.", "aux2.", "AuxLogits.")
    state = {key: value for key, value in state.items() if key in own or not key.startswith(auxiliary)}
    # What batch norms count matters to none of them here, and files from before PyTorch 0.4.1 don't have it.
    state |= {key: own[key] for key in own.keys() - state.keys() if key.endswith("num_batches_tracked")}
    head = head_name(model)
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    # A lazy parameter takes the shape that it is given.
    wrong = [key for key in own if key in state and not is_lazy(own[key]) and own[key].shape != state[key].shape]
    # A head for other classes differs in its first dimension and nowhere else.
    replaced = bool(wrong) and all(
        key.rpartition(".")[0] == head and state[key].ndim and state[key].shape[1:] == own[key].shape[1:]
        for key in wrong
    )
    if missing or unexpected or (wrong and (exact or not replaced)):
        # Of one layer alone: a network of another width differs in the next one, too. It need not be the last by name.
        one_layer = len({key.rpartition(".")[0] for key in wrong}) == 1 and all(
            state[key].ndim and state[key].shape[1:] == own[key].shape[1:] for key in wrong
        )
        head_alone = exact and one_layer and not (missing or unexpected)
        message = f"{option}: {source} does not fit {name}: " + "; ".join(
            [f"without {some(missing, 5)}"] * bool(missing)
            + [f"with unknown {some(unexpected, 5)}"] * bool(unexpected)
            + [f"{key} is {tuple(state[key].shape)} there and {tuple(own[key].shape)} here" for key in wrong[:5]]
        )
        raise HeadError(message, len(state[wrong[0]])) if head_alone else ValueError(message)
    trained_for = {key.rpartition(".")[0]: len(state[key]) for key in wrong}
    for key in wrong:
        state[key] = own[key]
    model.load_state_dict(state)
    if not replaced:
        return f"weights from {source}"
    return f"weights from {source}, but a fresh head {head}: that one is for {trained_for[head]} classes"


def head_name(model: nn.Module) -> str:
    """Name of the layer that gives the logits: the last linear or convolutional one."""
    names: list[str] = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return names[-1] if names else ""


def timm_offers(name: str) -> dict[str, Any]:
    """What timm says (its ``PretrainedCfg``) of each of its weights for a network, by what `load_weights` calls them.

    They are called by their tags; ``timm`` are those that are meant by ``name``. For others' networks there are none.
    """
    if not is_timm(name):
        return {}
    network, _, tag = name.partition(".")
    every = importlib.import_module("timm.models").get_arch_pretrained_cfgs(network)
    usual = every.get(name) if tag else importlib.import_module("timm").get_pretrained_cfg(network)
    offers = {"timm": usual, **{key.removeprefix(f"{network}."): facts for key, facts in every.items()}}
    return {key: facts for key, facts in offers.items() if facts is not None and facts.has_weights}


def nearest_published(name: str, owner: str | None = None) -> str:
    """The networks of torchvision and timm that were meant, as the end of a message: ``"; did you mean timm:vit?"``.

    Args:
        name: Name of a network that there is not, or, without ``owner``, of something that may have been meant as one.
        owner: Whose it was to be: ``"torchvision"`` or ``"timm"``; others may have one of just that name.

    Returns:
        Nothing where none is near.
    """
    known = {"torchvision": models.list_models(module=models)}
    if installed("timm"):
        known["timm"] = importlib.import_module("timm").list_models()
    if owner is None and ":" in name:  # behind a misspelt owner, perhaps before weights
        name = name.split(":")[1]
    name = name.lower().replace("-", "_")
    near = [f"{other}:{name}" for other, names in known.items() if name in names]
    if not near and owner is not None:  # timm's tags are behind a dot
        near = [f"{owner}:{x}" for x in nearest(name.partition(".")[0], known[owner], 3)]
    return did_you_mean(near)


def _load_timm(model: Any, facts: Any, size: int, exact: bool, option: str, instead: str) -> str:
    """`load_weights` for those of timm that ``facts`` are about."""
    source = f"{facts.architecture}.{facts.tag}" if facts.tag else facts.architecture
    outputs = model.num_classes
    if exact and outputs != facts.num_classes:
        message = f"{option}: timm's {source} does not fit: it has {facts.num_classes} outputs there and {outputs} here"
        raise HeadError(message, facts.num_classes)
    try:
        trained = from_timm(source, outputs, size, pretrained=True)
    except Exception as error:  # the hub's errors are of many types, and none says what was asked for
        raise ValueError(f"{option}: timm's {source} can't be loaded ({reason_of(error)}); {instead}") from error
    model.load_state_dict(trained.state_dict())
    if outputs == facts.num_classes:
        return f"weights from timm's {source}"
    theirs = f"that one is for {facts.num_classes} classes" if facts.num_classes else "there is none"
    return f"weights from timm's {source}, but a fresh head: {theirs}"


def check_weights(name: str, weights: str, option: str = "--model.weights") -> None:
    """Refuse weights that are neither a file nor known by that name; arguments as for `load_weights`.

    Raises:
        ValueError: what there is for the network.
    """
    if weights not in (timm_offers(name) or _of_torchvision(name)) and not Path(weights).is_file():
        raise _unknown(name, weights, option)


def _unknown(name: str, weights: str, option: str) -> ValueError:
    path = Path(weights)
    if path.is_dir():
        inside = f" in it, {path / 'model.pt'}" if (path / "model.pt").is_file() else ""
        return ValueError(f"{option}: {weights!r} is a folder; give a file{inside}")
    if path.suffix or path.parent != Path():  # meant as a file, of whatever network
        return ValueError(f"{option}: {weights!r} is no file")
    owner, offers = ("timm", [*timm_offers(name)]) if is_timm(name) else ("torchvision", [*_of_torchvision(name)])
    hint = "; timm's own are those of networks of timm" if weights == "timm" else ""
    if hint and is_timm(f"{name}."):  # which has one of that name as well
        hint += f", --model.name {name}.TAG"
    return ValueError(
        f"{option}: {weights!r} is no file; weights that {owner} has for {name}: {', '.join(offers) or 'none'}"
        + (hint if owner == "torchvision" else "")
    )


def _of_torchvision(name: str) -> dict[str, Any]:
    known = models.list_models(module=models)
    return {item.name: item for item in models.get_model_weights(name)} if name in known else {}


def _find(name: str, weights: str, option: str, instead: str) -> tuple[dict[str, Tensor], str]:
    known = _of_torchvision(name)
    if weights in known:
        try:
            downloaded: dict[str, Tensor] = known[weights].get_state_dict(progress=False, check_hash=True)
        except OSError as error:  # urllib's errors are
            raise ValueError(
                f"{option}: {weights} can't be downloaded from {known[weights].url} ({error}); {instead}"
            ) from error
        return downloaded, f"torchvision's {name} {weights}"
    path = Path(weights)
    if not path.is_file():
        raise _unknown(name, weights, option)
    try:
        content = read_file(path)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    source = str(path)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        try:
            trained, learner = content["config"]["model"]["name"], content["learner"]
            average = learner["ema"] is not None
            content = learner["ema"] if average else learner["model"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"{option}: {path} is a damaged checkpoint") from error
        if trained != name:
            raise ValueError(f"{option}: {path} is a checkpoint of {trained}, not of {name}")
        source += " (average)" if average else ""
    elif isinstance(content, dict):
        content = next((content[key] for key in _NESTED if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for key, value in content.items()
    ):
        nested = " or ".join(map(repr, _NESTED))
        raise ValueError(f"{option}: {path} holds no state dict (names with dense tensors), nor one under {nested}")
    for prefix in _WRAPPERS:
        if content and all(key.startswith(prefix) for key in content):
            content = {key.removeprefix(prefix): value for key, value in content.items()}
    return content, source


_NESTED: Final = ("model", "state_dict", "model_state_dict", "net")
"""Where training scripts put the state dict in what they save."""
_WRAPPERS: Final = ("module.", "_orig_mod.", "module.")
"""What DDP and torch.compile, and DDP around or inside that, put in front of the names."""
_ATTRIBUTES: Final = ("model.", "net.", "_orig_mod.")
"""What a module that holds the network, as of Lightning, puts there (then torch.compile), unless it is one itself."""
