"""Networks of torchvision by name, and weights for them from torchvision or from a file."""

from __future__ import annotations

import copy
import difflib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from fastmoll.train import checkpoint


def build_model(name: str, num_classes: int, size: int, *, fresh: bool = True) -> nn.Module:
    """A classification network of torchvision with random weights.

    Args:
        name: Name of a model of ``torchvision.models``.
        num_classes: Number of outputs.
        size: Height and width of the images it will see, pixels.
        fresh: Whether the random weights will be trained from (some networks take seconds to draw good ones).

    Raises:
        ValueError: unknown name (names close ones), or a network that can't take images of that size.
    """
    known = models.list_models(module=models)
    if name not in known:
        close = difflib.get_close_matches(name.lower().replace("-", "_"), known)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"
        raise ValueError(f"--model.name: torchvision has no classification model {name!r}; {hint}")
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # Without the auxiliary classifiers every network is a plain function from images to logits.
        options = {"aux_logits": False, "init_weights": fresh}
    elif name.startswith("vit_"):
        options = {"image_size": size}
    elif name == "maxvit_t":
        options = {"input_size": (size, size)}
    try:
        model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
        # On the meta device shapes are computed and nothing else: a network that can't take the images says so now.
        with torch.no_grad():
            copy.deepcopy(model).eval().to("meta")(torch.empty(2, 3, size, size, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ValueError(f"--model.name: {name} can't take images of {size}×{size} pixels: {error}") from error
    return model


def load_weights(model: nn.Module, name: str, weights: str, *, exact: bool = False) -> str:
    """Load weights into ``model``, in place.

    Args:
        model: Network from `build_model`.
        name: Its name.
        weights: Name of weights of torchvision (``IMAGENET1K_V1``), or a file: a state dict, or a checkpoint of this
            trainer (its average is taken where it has one).
        exact: Refuse a head for another number of classes. Otherwise the model keeps its own head then.

    Returns:
        What was loaded, in words.

    Raises:
        ValueError: unknown name, unreadable file, checkpoint of another model, or tensors that don't fit (named).
    """
    state, source = _find(name, weights)
    state = {key: value for key, value in state.items() if not key.startswith(("aux1.", "aux2.", "AuxLogits."))}
    own = model.state_dict()
    head = head_name(model)
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    wrong = [key for key in own if key in state and own[key].shape != state[key].shape]
    # A head for other classes differs in its first dimension and nowhere else.
    replaced = bool(wrong) and all(
        key.rpartition(".")[0] == head and state[key].ndim and state[key].shape[1:] == own[key].shape[1:]
        for key in wrong
    )
    if missing or unexpected or (wrong and (exact or not replaced)):
        raise ValueError(
            f"--model.weights: {source} does not fit {name}: "
            + "; ".join(
                [f"without {_some(missing)}"] * bool(missing)
                + [f"with unknown {_some(unexpected)}"] * bool(unexpected)
                + [f"{key} is {tuple(state[key].shape)} there and {tuple(own[key].shape)} here" for key in wrong[:5]]
            )
        )
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
    return names[-1]


def _find(name: str, weights: str) -> tuple[dict[str, Tensor], str]:
    known = {item.name: item for item in models.get_model_weights(name)}
    if weights in known:
        try:
            downloaded: dict[str, Tensor] = known[weights].get_state_dict(progress=False, check_hash=True)
        except OSError as error:  # urllib's errors are
            raise ValueError(
                f"--model.weights: {weights} can't be downloaded from {known[weights].url} ({error}); give a file, or "
                "None for random weights"
            ) from error
        return downloaded, f"torchvision's {name} {weights}"
    path = Path(weights)
    if not path.is_file():
        offers = f"torchvision has {', '.join(known)}" if known else "torchvision has none for this model"
        raise ValueError(f"--model.weights: {weights!r} is no file, and {offers} for {name}")
    try:
        content = checkpoint.read(path)
    except ValueError as error:
        raise ValueError(f"--model.weights: {error}") from error
    source = str(path)
    if isinstance(content, dict) and content.get("format") == checkpoint.FORMAT:
        try:
            trained, learner = content["config"]["model"]["name"], content["learner"]
            average = learner["ema"] is not None
            content = learner["ema"] if average else learner["model"]
        except (LookupError, TypeError) as error:
            raise ValueError(f"--model.weights: {path} is a damaged checkpoint") from error
        if trained != name:
            raise ValueError(f"--model.weights: {path} is a checkpoint of {trained}, not of {name}")
        source += " (average)" if average else ""
    elif isinstance(content, dict) and "model" in content:
        content = content["model"]
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) and value.layout == torch.strided
        for key, value in content.items()
    ):
        raise ValueError(f"--model.weights: {path} holds no state dict (names with dense tensors)")
    return content, source


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
