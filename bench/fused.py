"""The fused kernels on one card (or, small, on a CPU): each operation against its peers and the copy of its bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro
from harness import spread
from peers import DenseDCT
from torch import Tensor
from torchvision.transforms import v2

from fastmoll import label_decay, soft_cross_entropy, soft_labels
from fastmoll.kernels.batch_tail import batch_tail
from fastmoll.kernels.draw import BLUR, draw
from fastmoll.pipelines import MEAN, STD

_AHEAD_CYCLES = 4_000_000  # about 2 ms in which the host gets ahead of the card, so that launches are not timed
_FLUSH_BYTES = 256 * 2**20  # more than any card's second-level cache


@dataclass(frozen=True)
class Settings:
    """What is timed."""

    batch_size: int = 256
    """Images a batch."""
    size: int = 224
    """Height and width, pixels."""
    classes: int = 1000
    """Classes of the labels."""
    rounds: int = 50
    """Turns of each side."""
    device: str = "cuda"
    """Where: cuda or cpu."""
    backends: tuple[str, ...] = ("triton", "cupy")
    """Backends of the batch tail that are timed."""


@dataclass(frozen=True)
class Side:
    """One way to do an operation."""

    operation: str
    name: str
    run: Callable[[], Any]
    bytes: int
    """Bytes that the operation has to read and write."""


class Clock:
    """Milliseconds of a call, with a cold cache; by events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch = torch.empty(_FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], Any]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        self.scratch.zero_()
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def _tail_sides(settings: Settings, device: torch.device) -> list[Side]:
    batch, size = settings.batch_size, settings.size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (batch, size, size, 3), generator=generator, dtype=torch.uint8).to(device)
    order = torch.randperm(batch, generator=generator)
    role = (torch.arange(batch) % 3).to(torch.int8)[order].to(device)
    index = torch.arange(batch, device=device)
    t = draw(index.cpu(), roles=(0, 1, 0))[1].to(device)
    flip = (order % 2 == 0).to(device)
    partner, lam = order.to(device), torch.rand(batch, generator=generator).to(device)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    shared: dict[str, Any] = {"mean": MEAN, "std": STD, "flip": flip, "role": role, "t": t, "index": index}
    tails = {
        "tail, roles mixed": shared,
        "tail, blur alone": {**shared, "role": torch.full_like(role, BLUR)},
        "tail, roles and MixUp": {**shared, "partner": partner, "lam": lam},
    }

    moved = pixels.nbytes + pixels.numel() * torch.finfo(half).bits // 8
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    theirs = DenseDCT(size, device)
    mean, std = (torch.tensor(value, device=device).view(3, 1, 1) for value in (MEAN, STD))
    blur = v2.GaussianBlur(23, 3.0)

    def prepare() -> Tensor:
        x = (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std
        return torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)

    sides = []
    for operation, options in tails.items():
        expected = batch_tail(pixels[:32].cpu(), **_head(options, 32), dtype=torch.float32, backend="torch")
        backends = settings.backends if device.type == "cuda" else ("torch",)
        for backend in backends:
            result = batch_tail(pixels[:32], **_head(options, 32, device), dtype=half, backend=backend)
            error = (result.float().cpu() - expected).norm() / expected.norm()
            if not error < 4e-3:
                raise ValueError(f"{operation} by {backend} is off by {error} of the norm")

            def run(backend: str = backend, options: dict[str, Any] = options) -> Tensor:
                return batch_tail(pixels, **options, dtype=half, backend=backend)

            sides.append(Side(operation, f"fastmoll {backend}", run, moved))
        if "partner" not in options:
            roles = options["role"]
            dense = lambda roles=roles: theirs(prepare(), roles, t).to(half)  # noqa: E731
            sides.append(Side(operation, "dense DCT, masks, randn", dense, moved))
        sides.append(Side(operation, "copy of the same bytes", lambda: target.copy_(source), moved))
    smooth = lambda: blur(prepare()).to(half)  # noqa: E731
    sides.append(Side("tail, blur alone", "torchvision GaussianBlur(23), one scale", smooth, moved))
    return sides


def _head(options: dict[str, Any], count: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The options of the first images; partners outside are taken from inside."""
    head = {k: v[:count].to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    if "partner" in head:
        head["partner"] = head["partner"] % count
    return head


def plain_draw(index: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Roles, temperatures and dense labels by the plain torch operations."""
    role, t = draw(index)
    return soft_labels(labels, label_decay(role, t), classes)


def _label_sides(settings: Settings, device: torch.device) -> list[Side]:
    batch, classes = settings.batch_size, settings.classes
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (batch,), generator=generator).to(device)
    index = torch.arange(batch, device=device)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    logits = torch.randn(batch, classes, generator=generator).to(device, half)
    target = torch.rand(batch, classes, generator=generator).to(device)
    target /= target.sum(1, keepdim=True)
    size = logits.element_size()
    loss_bytes = batch * classes * (2 * size + 4)
    draw_bytes = batch * classes * 4

    def ours() -> Tensor:
        x = logits.detach().requires_grad_()
        soft_cross_entropy(x, target).backward()
        return x.grad

    def theirs() -> Tensor:
        x = logits.detach().requires_grad_()
        F.cross_entropy(x.float(), target).backward()
        return x.grad

    torch.testing.assert_close(ours(), theirs(), atol=1e-5, rtol=1e-2)
    sides = [
        Side("soft cross-entropy, both ways", "fastmoll", ours, loss_bytes),
        Side("soft cross-entropy, both ways", "torch", theirs, loss_bytes),
        Side("draws and labels", "fastmoll torch", lambda: plain_draw(index, labels, classes), draw_bytes),
    ]
    if device.type == "cuda":
        from fastmoll.kernels.draw_triton import draw_batch

        fused = partial(draw_batch, index, labels=labels, num_classes=classes, validate=False)
        sides.append(Side("draws and labels", "fastmoll triton", fused, draw_bytes))
    return sides


def bench_kernels(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Batch tail, draws, labels and loss: milliseconds, GB/s, share of the copy's speed."""
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={settings.device!r} was asked for, but torch sees no CUDA device")
    clock = Clock(device)
    sides = _tail_sides(settings, device) + _label_sides(settings, device)
    for side in sides:
        for _ in range(3):
            clock(side.run)
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(settings.rounds):
        for side, taken in zip(sides, times, strict=True):
            taken.append(clock(side.run))
    rows = []
    for side, taken in zip(sides, times, strict=True):
        milliseconds = spread(taken)
        copies = [
            spread(t) for s, t in zip(sides, times, strict=True) if s.operation == side.operation and "copy" in s.name
        ]
        rows.append(
            {
                "operation": side.operation,
                "side": side.name,
                "ms": milliseconds,
                "GB/s": side.bytes / milliseconds["median"] / 1e6,
                "times the copy": milliseconds["median"] / copies[0]["median"] if copies else "",
            }
        )
    return {"benchmark": "kernels", "settings": asdict(settings), "rows": rows}
