"""Scoring a classifier on a whole set: the loop over a loader, and `fastmoll.evaluate` around it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fastmoll.distributed import Process, Stop
from fastmoll.kernels.checks import check_choice
from fastmoll.metrics import ClassificationMetrics

PRECISIONS = ("auto", "bf16", "off")


def evaluate(
    model: nn.Module,
    loader: Iterable[Sequence[Any]],
    *,
    bins: int = 15,
    precision: str = "off",
    channels_last: bool = False,
) -> dict[str, Any]:
    """Error, NLL and calibration of a classifier over a whole set.

    Where ``torch.distributed`` is initialised the figures are those of all ranks together, on every rank; each gives
    its own share, which may be of any size. Modules are left as they came, in training or evaluation mode.

    Args:
        model: From images to logits ``(B, K)``; equal on all ranks. It is put in evaluation mode, as a whole, for the
            time of the call. Images come to it in the precision of its parameters, if it has any.
        loader: Gives ``(images, labels)`` or ``(images, labels, index)``, tensors in a tuple or list: int64 class
            numbers ``(B,)`` and, where there are any, sample ids ``(B,)``. Batches go to the device of the model. Where
            it has ``num_samples`` (of all ranks), so many must come, and where it has ``classes``, the model must tell
            so many apart.
        bins: Bins of the calibration errors and of ``reliability``, up to 10,000.
        precision: ``"off"``, ``"bf16"``: bfloat16 by ``torch.autocast``, or ``"auto"``: that on a GPU. The figures are
            computed from float32 logits.
        channels_last: Bring the images in that memory order.

    Returns:
        ``error`` in %; ``nll``, nats a sample, of the plain cross-entropy; ``ece``, ``ece_adaptive`` and
        ``ece_batch100``, fractions; ``count``; and ``reliability``, for each bin ``[samples, sum of confidences, those
        classified rightly]``. See `fastmoll.ClassificationMetrics`.

    Raises:
        ValueError: batches, labels or logits of another shape or type, another number of classes than the loader's, a
            sample that came twice (where there are ids), none at all, or a bad argument.
        RuntimeError: another number of samples came than the loader's ``num_samples``; an error on another rank.
    """
    check_choice("precision", precision, PRECISIONS)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ValueError(f"loader must give batches in a for loop, got a {type(loader).__name__}")
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    process = Process.current(device)
    metrics = ClassificationMetrics(bins).to(device)
    classes = getattr(loader, "classes", None)
    try:
        with process.agree():
            score(
                model,
                loader,
                metrics,
                num_classes=None if classes is None else len(classes),
                precision=precision,
                channels_last=channels_last,
            )
    except Stop as stop:  # the trainers' one line for the user; here it is an exception like any other
        raise (stop.__cause__ or RuntimeError("the evaluation failed on another rank")) from None
    found = figures(metrics)
    expected = getattr(loader, "num_samples", None)
    if expected is not None:
        check_count(found["count"], expected)
    if not found["count"]:
        raise ValueError("loader must give at least one image, got none; a generator gives its batches once only")
    return found


@torch.no_grad()
def score(
    model: nn.Module,
    batches: Iterable[Sequence[Any]],
    metrics: ClassificationMetrics,
    *,
    num_classes: int | None = None,
    precision: str = "off",
    channels_last: bool = False,
    on_batch: Callable[[Tensor, Tensor, Tensor | None], None] | None = None,
) -> None:
    """Let ``metrics`` count what ``model`` says to ``batches``, exchanging nothing with other processes.

    Args:
        model: As for `evaluate`.
        batches: This process's share, as for `evaluate`.
        metrics: What counts; on the device of the model.
        num_classes: Number of logits that there must be.
        precision: As for `evaluate`.
        channels_last: Likewise.
        on_batch: Called with the logits, labels and sample ids of each batch.

    Raises:
        ValueError: as for `evaluate`.
    """
    device = metrics.device
    # DDP would exchange buffers with ranks that have fewer batches, and wait for them.
    bare = model.module if isinstance(model, DistributedDataParallel | DataParallel) else model
    dtype = next((tensor.dtype for tensor in bare.parameters() if tensor.is_floating_point()), None)
    with _evaluating(bare):
        for batch in batches:
            images, labels, index = _parts(batch)
            images, labels = (part.to(device, non_blocking=True) for part in (images, labels))
            # Autocast looks after that itself.
            if dtype is not None and images.is_floating_point() and not is_mixed(device, precision):
                images = images.to(dtype)
            if channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with autocast(device, precision):
                logits = bare(images)
            if not isinstance(logits, Tensor):
                raise ValueError(f"model must give logits (B, K) as a tensor, got a {type(logits).__name__}")
            if logits.ndim != 2 or len(logits) != len(images) or num_classes not in (None, logits.shape[1]):
                shape, wanted = tuple(logits.shape), "K" if num_classes is None else num_classes
                raise ValueError(
                    f"model must give logits of shape ({len(images)}, {wanted}), one row an image and one column a "
                    f"class, got {shape}"
                )
            metrics.update(logits, labels, index)
            if on_batch is not None:
                on_batch(logits, labels, index)


def figures(metrics: ClassificationMetrics) -> dict[str, Any]:
    """What `evaluate` returns, as plain numbers; all ranks must come here."""
    with warnings.catch_warnings():
        # A rank without a share is as good as the others.
        warnings.filterwarnings("ignore", "The ``compute`` method of metric")
        found = metrics.compute()
    plain: dict[str, Any] = {
        name: float(value) for name, value in found.items() if name not in ("count", "reliability")
    }
    rows = [[int(samples), confidence, int(right)] for samples, confidence, right in found["reliability"].tolist()]
    return {**plain, "error": 100 * plain["error"], "count": int(found["count"]), "reliability": rows}


def check_count(count: int, expected: int) -> None:
    """Raise ``RuntimeError`` unless ``count`` is the ``expected`` number of samples."""
    if count != expected:
        raise RuntimeError(f"evaluated {count} images of {expected}")


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The mixed precision that ``precision`` (auto, bf16 or off) means on ``device``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed(device, precision))


def image_dtype(device: torch.device, precision: str) -> torch.dtype:
    """What a loader gives: on a GPU what autocast would make of the images anyway, at half the traffic."""
    return torch.bfloat16 if device.type == "cuda" and is_mixed(device, precision) else torch.float32


def is_mixed(device: torch.device, precision: str) -> bool:
    """Whether ``precision`` means bfloat16 on ``device``."""
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def _parts(batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Images, labels and sample ids, if any, of what a loader gave."""
    wanted = "loader must give (images, labels) or (images, labels, index) as tensors"
    if not isinstance(batch, tuple | list):
        keys = f" with {', '.join(map(repr, batch))}: make it a tuple" if isinstance(batch, dict) else ""
        raise ValueError(f"{wanted}, got a {type(batch).__name__}{keys}")
    if len(batch) not in (2, 3) or not all(isinstance(part, Tensor) for part in batch):
        kinds = ", ".join(type(part).__name__ for part in batch[:5]) + (", ..." if len(batch) > 5 else "")
        raise ValueError(f"{wanted}, got {len(batch)} part(s): {kinds}")
    images, labels, *rest = batch
    return images, labels, rest[0] if rest else None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of a block; each module gets its own mode back (one may be frozen)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
