"""The fused kernels on one card (or, small, on a CPU): each operation against its peers and the copy of its bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Literal

import harness
import torch
import torch.nn.functional as F
import tyro
from harness import Clock, in_turns
from peers import DenseDCT, FourierDCT, PlainTail, ScipyDCT
from torch import Tensor
from torchvision.transforms import v2

from fastmoll import heat_blur, label_decay, soft_cross_entropy, soft_labels
from fastmoll.kernels.batch_tail import batch_tail, check_tail
from fastmoll.kernels.batch_tail_torch import batch_tail_torch
from fastmoll.kernels.checks import installed
from fastmoll.kernels.draw import BLUR, NOISE, draw
from fastmoll.pipelines import MEAN, STD

COPY = "copy of the same bytes"
TAILS = ("standardise", "MixUp", "blur alone", "roles mixed", "roles and MixUp")
_TAPS, _SCALE = 23, 3.0  # of blurs that cut the kernel off; at this scale, little of it is lost


@dataclass(frozen=True, kw_only=True)
class TailSettings(harness.Settings):
    """What of the batch tail is timed."""

    backends: tuple[Literal["triton", "cupy"], ...] = ("triton", "cupy")
    """Backends of the batch tail that are timed on a GPU; on a CPU it is torch."""


@dataclass(frozen=True, kw_only=True)
class Settings(TailSettings):
    """What is timed."""

    classes: int = 1000
    """Classes of the labels."""
    compile: bool = True
    """Time a plain batch tail under torch.compile, too: on a CPU this takes a C++ compiler."""


@dataclass(frozen=True)
class Side:
    """One way to do an operation, checked before it is timed."""

    operation: str
    name: str
    run: Callable[[], Any]
    bytes: int
    """Bytes that the operation has to read and write."""
    apart: float | str = ""
    """Distance to the definition, relative, in the Euclidean norm."""


class Tails:
    """A batch of pixels with its parameters, and the ways to turn it into the batch that a network trains on.

    Args:
        settings: what is timed.
        peers: all of them, not only the way of the paper's code.
        compiled: among them a plain batch tail under ``torch.compile``.
    """

    def __init__(self, settings: TailSettings, peers: bool = True, compiled: bool = False) -> None:
        batch, size = settings.batch_size, settings.size
        self.settings, self.peers, self.compiled = settings, peers, compiled
        self.device = device = torch.device(settings.device)
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(batch, generator=generator)
        pixels = torch.randint(0, 256, (batch, size, size, 3), dtype=torch.uint8, device=device)
        self.pixels, self.flip = pixels, (order % 2 == 0).to(device)
        self.mixing = {"partner": order.to(device), "lam": torch.rand(batch, generator=generator).to(device)}
        self.role = (torch.arange(batch) % 3).to(torch.int8)[order].to(device)
        self.t = draw(torch.arange(batch), roles=(0, 1, 0))[1].to(device)
        self.half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.bytes = pixels.nbytes + pixels.numel() * torch.finfo(self.half).bits // 8
        source = torch.empty(self.bytes // 2, dtype=torch.uint8, device=device)
        self.copy = partial(torch.empty_like(source).copy_, source)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Note down what is wrong or does not run, and go on: the others' results must not be lost with it."""
        try:
            yield
        except Exception as error:
            self.failed[what] = f"{type(error).__name__}: {error}".splitlines()[0]

    def prepared(self) -> Tensor:
        """Flipped and standardised by torchvision, float32, contiguous: where the peers' own part begins."""
        x = self.pixels.permute(0, 3, 1, 2).contiguous()
        x = v2.functional.normalize(v2.functional.to_dtype(x, torch.float32, scale=True), [*MEAN], [*STD])
        return torch.where(self.flip.view(-1, 1, 1, 1), x.flip(3), x)

    def finished(self, x: Tensor) -> Tensor:
        """In the dtype and memory format of the others' results."""
        return x.to(self.half, memory_format=torch.channels_last)

    def sides(self, tail: str) -> list[Side]:
        """The ways to do one of ``TAILS``; those that are wrong go to ``failed``."""
        operation, sides = f"tail, {tail}", []
        options: dict[str, Any] = self.mixing if "MixUp" in tail else {}
        if "roles" in tail or "blur" in tail:
            role = self.role if "roles" in tail else torch.full_like(self.role, BLUR)
            options = {**options, "role": role, "t": self.t}
        shared: dict[str, Any] = {"mean": MEAN, "std": STD, "flip": self.flip, **options}

        def ours(dtype: torch.dtype) -> dict[str, Any]:
            return {**shared, "dtype": dtype, "memory_format": torch.channels_last}

        rest: dict[str, Any] = dict.fromkeys(("partner", "lam", "box", "role", "t", "index", "sigma_max"))
        key: dict[str, Any] = {"seed": 0, "epoch": 0, "sigma_min": 0.3}
        definition = batch_tail_torch(check_tail(self.pixels, **{**rest, **key, **ours(torch.float32)}))
        # Their noise is another draw of the same distribution.
        comparable = self.role != NOISE if "roles" in tail else torch.ones_like(self.flip)

        def add(name: str, run: Callable[[], Any], apart: float | None = None) -> None:
            with self.attempt(f"{operation}: {name}"):
                if apart is None:
                    rows = slice(None) if name.startswith("fastmoll") else comparable
                    apart = distance(run()[rows], definition[rows])
                if not apart < 4e-3:
                    raise ValueError(f"off by {apart} of the norm")
                sides.append(Side(operation, name, run, self.bytes, apart))

        for backend in self.settings.backends if self.device.type == "cuda" else ("torch",):
            add(f"fastmoll {backend}", partial(batch_tail, self.pixels, **ours(self.half), backend=backend))
        if "role" in options:
            self._add_transforms(add, options)
        if self.peers:
            if self.compiled:
                plain = self._plain()
                noise = {"noise": "roles" in tail}
                compiled = partial(torch.compile(plain, dynamic=False), self.pixels, self.flip, **options, **noise)
                add("torch.compile, all dense, role chosen last" if "role" in options else "torch.compile", compiled)
            if tail == "standardise":
                add("torchvision Normalize", lambda: self.finished(self.prepared()))
            for library, add_peers in (("torchvision", self._add_torchvision), ("Kornia", self._add_kornia)):
                with self.attempt(f"{operation}: {library}"):
                    add_peers(add, tail)
        sides.append(Side(operation, COPY, self.copy, self.bytes))
        return sides

    def _plain(self) -> PlainTail:
        operand = torch.float16 if self.device.type == "cuda" else torch.float32
        return PlainTail(self.settings.size, MEAN, STD, operand, self.half, self.device)

    def _add_transforms(self, add: Callable[..., None], options: dict[str, Any]) -> None:
        """The way of the paper's code, and its cosine transforms by other libraries."""
        size, device = self.settings.size, self.device

        def run(transform: DenseDCT) -> Tensor:
            x = self.prepared()
            if "lam" in options:
                lam = options["lam"].view(-1, 1, 1, 1)
                x = lam * x + (1 - lam) * x[options["partner"]]
            return self.finished(transform(x, options["role"], self.t))

        add("dense DCT, masks, randn", partial(run, DenseDCT(size, device)))
        if self.peers:
            add("DCT by torch.fft, masks, randn", partial(run, FourierDCT(size, device)))
            if device.type == "cpu":
                add("DCT by scipy.fft, masks, randn", partial(run, ScipyDCT(size, device)))

    def _add_torchvision(self, add: Callable[..., None], tail: str) -> None:
        labels = torch.zeros(len(self.pixels), dtype=torch.int64, device=self.device)
        if tail == "MixUp":
            mixup = v2.MixUp(num_classes=1000)
            partner = torch.arange(len(labels), device=self.device).roll(1)

            def mixed() -> Tensor:
                return self.finished(mixup(self.prepared(), labels)[0])

            add("torchvision Normalize, MixUp, one λ", mixed, self._off_the_line(mixed(), partner))
        if tail == "blur alone" and self._wide_enough():
            blur = v2.GaussianBlur(_TAPS, _SCALE)

            def smooth() -> Tensor:
                return self.finished(blur(self.prepared()))

            add(f"torchvision GaussianBlur({_TAPS}), one scale", smooth, self._off_inside(smooth()))

    def _add_kornia(self, add: Callable[..., None], tail: str) -> None:
        if not installed("kornia"):
            self.skipped["Kornia"] = "not installed"
            return
        from kornia.augmentation import Normalize, RandomMixUpV2
        from kornia.filters import gaussian_blur2d

        normalise = Normalize(torch.tensor(MEAN), torch.tensor(STD))

        def prepared() -> Tensor:
            x = normalise(v2.functional.to_dtype(self.pixels.permute(0, 3, 1, 2).contiguous(), scale=True))
            return torch.where(self.flip.view(-1, 1, 1, 1), x.flip(3), x)

        if tail == "standardise":
            add("Kornia Normalize", lambda: self.finished(prepared()))
        if tail == "MixUp":
            mixup = RandomMixUpV2(data_keys=["input"])

            def mixed() -> Tensor:
                return self.finished(mixup(prepared()))

            apart = self._off_the_line(mixed(), mixup._params["mixup_pairs"].to(self.device))
            add("Kornia Normalize, RandomMixUpV2", mixed, apart)
        if tail == "blur alone" and self._wide_enough():
            scales = (0.3 * (self.settings.size / 0.3) ** self.t).unsqueeze(1).expand(-1, 2)

            def blurred(scales: Tensor = scales) -> Tensor:
                return self.finished(gaussian_blur2d(prepared(), (_TAPS, _TAPS), scales))

            apart = self._off_inside(blurred(torch.full_like(scales, _SCALE)))
            add(f"Kornia gaussian_blur2d({_TAPS}), cut off", blurred, apart)

    def _off_the_line(self, mixed: Tensor, partner: Tensor) -> float:
        """Distance to ``λ x + (1 - λ) x'`` with the λ of each image that fits best."""
        x = self.prepared()
        other = x[partner]
        apart = (x - other).flatten(1)
        lam = ((mixed.float() - other).flatten(1) * apart).sum(1) / apart.square().sum(1).clamp_min(1e-9)
        return distance(mixed, torch.lerp(other, x, lam.view(-1, 1, 1, 1)))

    def _off_inside(self, blurred: Tensor) -> float:
        """Distance to a blur whose kernel few taps hold; off the borders, which others reflect in another way."""
        right = heat_blur(self.prepared(), torch.zeros_like(self.t), sigma_min=_SCALE, sigma_max=_SCALE)
        inside = (..., *(slice(_TAPS // 2, -(_TAPS // 2)),) * 2)
        return distance(blurred[inside], right[inside])

    def _wide_enough(self) -> bool:
        if self.settings.size <= _TAPS:
            self.skipped["torchvision and Kornia blur"] = f"size must be above {_TAPS} for {_TAPS} taps"
        return self.settings.size > _TAPS


def distance(result: Tensor, expected: Tensor) -> float:
    """``|result - expected| / |expected|`` in the Euclidean norm; 0 where nothing is expected."""
    if not expected.numel():
        return 0.0
    return float((result.float() - expected).norm() / expected.norm())


def plain_draw(index: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Roles, temperatures and dense labels by the plain torch operations."""
    role, t = draw(index)
    return soft_labels(labels, label_decay(role, t), classes)


def _label_sides(settings: Settings, tails: Tails) -> list[Side]:
    device = torch.device(settings.device)
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

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x = logits.detach().requires_grad_()
        loss(x, target).backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    ours = partial(step, soft_cross_entropy)
    theirs = partial(step, lambda x, target: F.cross_entropy(x.float(), target))
    torch.testing.assert_close(ours(), theirs(), atol=1e-5, rtol=1e-2)
    sides = [
        Side("soft cross-entropy, both ways", "fastmoll", ours, loss_bytes),
        Side("soft cross-entropy, both ways", "torch", theirs, loss_bytes),
        Side("draws and labels", "fastmoll torch", lambda: plain_draw(index, labels, classes), draw_bytes),
    ]
    if device.type == "cuda":
        with tails.attempt("draws and labels: fastmoll triton"):
            from fastmoll.kernels.draw_triton import draw_batch

            fused = partial(draw_batch, index, labels=labels, num_classes=classes, validate=False)
            torch.testing.assert_close(fused().target, plain_draw(index, labels, classes), atol=1e-5, rtol=0)
            sides.append(Side("draws and labels", "fastmoll triton", fused, draw_bytes))
    return sides


def timed(sides: Sequence[Side], clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """A row for each side, in their order, with its ratios to the copy and to the fastest of fastmoll's."""
    spreads = in_turns([side.run for side in sides], clock, rounds)

    def fastest(operation: str, start: str) -> float | None:
        medians = [
            milliseconds["median"]
            for side, milliseconds in zip(sides, spreads, strict=True)
            if side.operation == operation and side.name.startswith(start)
        ]
        return min(medians, default=None)

    rows = []
    for side, milliseconds in zip(sides, spreads, strict=True):
        median = milliseconds["median"]
        copy, ours = fastest(side.operation, COPY), fastest(side.operation, "fastmoll")
        rows.append(
            {
                "operation": side.operation,
                "side": side.name,
                "ms": milliseconds,
                "GB/s": side.bytes / median / 1e6,
                "of the copy's speed": copy / median if copy else "",
                "times the copy": median / copy if copy else "",
                "times fastmoll": median / ours if ours else "",
                "apart": side.apart,
            }
        )
    return rows


def bench_kernels(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Batch tail, draws, labels and loss: milliseconds, GB/s, share of the copy's speed, ratio to each peer."""
    start = time.perf_counter()
    tails = Tails(settings, compiled=settings.compile)
    sides = [side for tail in TAILS for side in tails.sides(tail)]
    with tails.attempt("labels and loss"):
        sides += _label_sides(settings, tails)
    ready = time.perf_counter() - start
    rows = timed(sides, Clock(tails.device), settings.rounds)
    return {
        "benchmark": "kernels",
        "settings": asdict(settings),
        "seconds to compile and check": ready,
        "skipped": tails.skipped,
        "failed": tails.failed,
        "rows": rows,
    }
