"""What the batch tail should take on cards that may not be at hand: bytes, arithmetic and compiled instructions.

Written down before a card measures it; a measurement that differs says which term of the model is wrong.

The model, for each launch and each card:

- **memory**: pixels and results once; scratch written by one launch and read by the next goes to memory as far as both
  launches' bytes exceed the second-level cache.
- **L2**: what blocks load and store in sectors of 32 bytes, each block by itself (a block's own re-reads hit the first
  level, unless they bypass it).
- **tensor**: multiply-adds really issued: whole blocks, over the band only.
- **issue**: instructions: one a cycle and scheduler, or one in ``WARP_CYCLES`` of each warp that is resident, if those
  are too few.
- **xu**, **imad**, **alu**, **lsu**: the same instructions against the pipes they share: 16 lanes a cycle and
  multiprocessor for MUFU and I2F, 64 for integer multiply-add (wide ones twice) and for integer logic, and for loads
  and stores 32 words.
- The *floor* is the largest of these; the *prediction* divides all but memory, whose rate is one that copies reach, by
  ``REACHED`` first. Both add half a wave of blocks at the end, the time blocks without work hold their places, and the
  gaps between launches.

Bytes, arithmetic and instructions are those of code for sm_90 that is interpreted, on all cards; registers and shared
memory are of the card's own code, as is whether its matrix instructions are the newest. A card without those of sm_90
needs more instructions for the products of the Triton kernels than are counted here.

``python bench/run.py simulate`` runs the kernels of the H200 cycle by cycle, and is the better guess for those.

Temperatures of blurred images are quantiles of Beta(1, 2), which ``bench/fused.py`` draws from; half of the images are
flipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro
from launches import CHANNELS, LaunchModel, cuda_model, times, total_of, triton_model

SIZES = (32, 64, 224, 256, 288, 384)
ROLES = {"mixed": (1 / 3, 1 / 3, 1 / 3), "clean": (1.0, 0.0, 0.0), "noise": (0.0, 1.0, 0.0), "blur": (0.0, 0.0, 1.0)}
"""Shares of clean, noised and blurred images."""

WARP_CYCLES = 7.0  # from one instruction of a warp to its next: measured on an H200, for the CUDA C++ kernel
REACHED = 0.75  # of the peak of a pipe, in kernels that do more than one thing
LAUNCH_US, GAP_US = 2.0, 1.0  # around the first launch (also of a copy), before each further one
IDLE_US = 0.5  # a block that reads its role and leaves


@dataclass(frozen=True)
class Card:
    """Public figures of a card.

    Attributes:
        architecture: that kernels are compiled for.
        multiprocessors: how many.
        ghz: boost clock.
        tb_s: memory bandwidth that a copy reaches.
        l2_mb, l2_tb_s: second-level cache; its bandwidth is as measured by others, for B200 guessed from the clock.
        tflops: dense float16, by the card's newest matrix instructions.
        mma_sync: the share of it that ``mma.sync`` reaches; for B200 a guess.
        shared_kb: shared memory of a multiprocessor.
        alu_lanes: 32-bit integer operations a cycle and multiprocessor.
    """

    architecture: int
    multiprocessors: int
    ghz: float
    tb_s: float
    l2_mb: float
    l2_tb_s: float
    tflops: float
    mma_sync: float
    shared_kb: int = 228
    alu_lanes: int = 64


CARDS = {
    "A100-SXM 80GB": Card(80, 108, 1.41, 1.8, 40, 4.5, 312, 1.0, 164),
    "H100 SXM": Card(90, 132, 1.83, 3.0, 50, 5.7, 989, 0.62),
    "H200": Card(90, 132, 1.83, 4.3, 50, 5.7, 989, 0.62),
    "B200": Card(100, 148, 1.85, 7.2, 126, 9.0, 2250, 0.3, alu_lanes=128),
}


@dataclass(frozen=True)
class Settings:
    """What is predicted."""

    batch_size: int = 256
    """Images a batch."""
    size: int = 224
    """Height and width, pixels."""
    sizes: tuple[int, ...] = SIZES
    """Further sizes, for the mixed batch alone."""


def predict(models: Sequence[LaunchModel], card: Card, shares: Sequence[float], batch: int) -> list[dict[str, Any]]:
    """Each launch's bytes, operations, bounds in µs, and the floor and the prediction, without gaps."""
    rows, before = [], 0.0
    for model in models:

        def mean(name: str, model: LaunchModel = model) -> float:
            return batch * sum(s * float(getattr(w, name)) for s, w in zip(shares, model.roles, strict=True))

        each = zip(shares, model.roles, strict=True)
        counts = total_of([times(work.instructions, share * batch) for share, work in each])
        pixels, result, taken, left = (mean(name) for name in ("pixels", "result", "scratch_in", "scratch_out"))
        own = pixels + result + taken + left
        miss_in = max(0.0, 1.0 - card.l2_mb * 1e6 / max(before + own, 1.0))
        # What is left dirty in the cache may never have to be written, if what follows reads it while it is there.
        moved = pixels + result + miss_in * (taken + left)
        before = own
        resident = max(1, min(
            65536 // (max(model.registers, 16) * model.threads), 2048 // model.threads,
            card.shared_kb * 1024 // (model.shared + 1024), 32,
        ))  # fmt: skip
        warps = resident * model.threads / 32 / 4  # of a scheduler
        cycles = card.multiprocessors * card.ghz * 1e3  # of all multiprocessors in a µs
        bounds = {
            "memory": moved / card.tb_s / 1e6,
            "l2": mean("l2") / card.l2_tb_s / 1e6,
            "tensor": mean("flops") / (card.tflops * (1.0 if model.wgmma else card.mma_sync)) / 1e6,
            "issue": counts["warp"] / 4 / cycles * max(1.0, WARP_CYCLES / warps),
            "xu": counts["xu"] * 2 / cycles,
            "imad": counts["imad_pipe"] / 2 / cycles,
            "alu": counts["alu"] * 32 / card.alu_lanes / cycles,
            "lsu": counts["lsu"] / cycles,
        }
        slots = resident * card.multiprocessors
        idle = mean("idle") * IDLE_US / slots
        tail = 1.0 + 0.5 * min(1.0, slots / max(mean("blocks"), 1.0))
        floor = max(bounds.values())
        reached = max(value / (1.0 if name == "memory" else REACHED) for name, value in bounds.items())
        rows.append({
            "launch": model.name, "resident": resident, "compulsory_bytes": pixels + result, "moved_bytes": moved,
            "l2_bytes": mean("l2"), "flops": mean("flops"), "instructions": dict(counts), "bounds_us": bounds,
            "bound": max(bounds, key=lambda name: bounds[name] / (1.0 if name == "memory" else REACHED)),
            "floor_us": floor + idle, "predicted_us": reached * tail + idle,
        })  # fmt: skip
    return rows


def bench_roofline(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Predict the batch tail from bytes, arithmetic and compiled instructions; needs no GPU."""
    for name in ("batch_size", "size"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")
    rows, details = [], []
    batch = settings.batch_size
    for size in (settings.size, *(s for s in settings.sizes if s != settings.size)):
        compiled: dict[tuple[str, int], list[LaunchModel]] = {}
        for architecture in sorted({card.architecture for card in CARDS.values()}):
            compiled["triton", architecture] = triton_model(size, batch, architecture)
            compiled["cupy", architecture] = cuda_model(size, architecture)
        for backend in ("triton", "cupy"):
            for roles, shares in ROLES.items():
                if size != settings.size and roles != "mixed":
                    continue
                for name, card in CARDS.items():
                    parts = predict(compiled[backend, card.architecture], card, shares, batch)
                    fixed = LAUNCH_US + GAP_US * (len(parts) - 1)
                    copied = 3.0 * batch * CHANNELS * size * size
                    copy = copied / card.tb_s / 1e6 + LAUNCH_US
                    row = {
                        "size": size, "backend": backend, "roles": roles, "card": name,
                        "moved MB": sum(p["moved_bytes"] for p in parts) / 1e6,
                        "GFLOP": sum(p["flops"] for p in parts) / 1e9,
                        "warp instr. M": sum(p["instructions"].get("warp", 0.0) for p in parts) / 1e6,
                        "bounds": "/".join(p["bound"] for p in parts),
                        "floor us": sum(p["floor_us"] for p in parts) + fixed,
                        "predicted us": sum(p["predicted_us"] for p in parts) + fixed, "copy us": copy,
                    }  # fmt: skip
                    rows.append(row | {"times the copy": row["predicted us"] / copy})
                    details.append({"size": size, "backend": backend, "roles": roles, "card": name, "launches": parts})
    cards = {name: asdict(card) for name, card in CARDS.items()}
    return {
        "benchmark": "roofline", "settings": asdict(settings), "cards": cards, "rows": rows, "details": details,
    }  # fmt: skip
