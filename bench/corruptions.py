"""Corruptions: `fastmoll.corrupt` against imagecorruptions-imaug on photographs, cell by cell, or on a GPU against the
forward pass of the network that the pictures are for."""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import torch
import torchvision
import tyro
from harness import Clock, in_turns
from PIL import Image
from torch import Tensor

from fastmoll.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from fastmoll.kernels.checks import installed
from fastmoll.pipelines.corrupted import check_cells
from fastmoll.sample import PHOTOGRAPHS

SIZE = 224
"""Pixels; the peer has the constants of this size only."""

# Where the peer is not what made ImageNet-C: its elastic transform has other constants and no affine map, its frost
# pictures of its own in other proportions.
ELSEWHERE = ("elastic_transform", "frost")
# Grey levels that the means, and the root mean squares of what changed, may lie apart. All of a picture's fog hangs on
# a few draws: there the figures are those of more pictures, and still scatter.
LEVELS, FOG_LEVELS, FOG_COPIES = 2.0, 4.0, 8


@dataclass(frozen=True)
class Settings:
    """What is timed."""

    corruptions: tuple[str, ...] = CORRUPTIONS
    """Names; with fewer than all the last row is no longer that of the 75 cells."""
    severities: tuple[int, ...] = SEVERITIES
    """1 to 5."""
    rounds: int = 3
    """Turns of each side, one thread each on a CPU."""
    batch_size: int = 20
    """Images a batch: twenty photographs, over and over."""
    device: str = "cpu"
    """Where: cuda or cpu; the peer knows CPUs only."""

    def __post_init__(self) -> None:
        check_cells(self.corruptions, self.severities)
        for name in ("rounds", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device must be 'cpu' where torch sees no CUDA device, got {self.device!r}")


def photographs() -> np.ndarray:
    """Twenty photographs as ImageNet's are prepared: resized to 256 pixels, cropped to 224; ``(20, 224, 224, 3)``."""
    pictures = []
    for photograph in PHOTOGRAPHS:
        with (importlib.resources.files(photograph.package) / photograph.file).open("rb") as stream:
            whole = Image.open(stream).convert("RGB")
        for box in photograph.parts(*whole.size).values():
            part = whole.crop(box)
            scale = 256 / min(part.size)
            width, height = (round(side * scale) for side in part.size)
            part = part.resize((width, height), Image.Resampling.BILINEAR)
            left, top = (width - SIZE) // 2, (height - SIZE) // 2
            pictures.append(np.asarray(part.crop((left, top, left + SIZE, top + SIZE))))
    return np.stack(pictures)


def figures(clean: np.ndarray, pictures: np.ndarray) -> tuple[float, float]:
    """Mean of pictures, and root mean square of their difference to the clean ones; grey levels."""
    change = pictures.astype(np.float64) - clean
    return float(pictures.mean()), float(np.sqrt((change * change).mean()))


def _peer() -> Callable[..., Any] | None:
    if not installed("imagecorruptions"):
        return None
    importlib.import_module("cv2").setNumThreads(1)
    np.random.seed(0)
    theirs: Callable[..., Any] = importlib.import_module("imagecorruptions").corrupt
    return theirs


def _each(theirs: Callable[..., Any], pictures: list[np.ndarray], name: str, severity: int) -> np.ndarray:
    return np.stack([theirs(picture, corruption_name=name, severity=severity) for picture in pictures])


def _network(images: Tensor) -> Callable[[], Any]:
    """The forward pass of a ResNet-50, in bfloat16, channels-last."""
    model = torchvision.models.resnet50().to(images.device, memory_format=torch.channels_last).eval()
    inputs = images.float().div(128).sub(1).contiguous(memory_format=torch.channels_last)

    def forward() -> Any:
        with torch.inference_mode(), torch.autocast(images.device.type, torch.bfloat16):
            return model(inputs)

    return forward


def bench_corruptions(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Images a second of each corruption and severity, and grey levels from the peer's."""
    device = torch.device(settings.device)
    on_cpu = device.type == "cpu"
    clean = np.resize(photographs(), (settings.batch_size, SIZE, SIZE, 3))
    images = torch.from_numpy(clean).permute(0, 3, 1, 2).contiguous().to(device)
    theirs = _peer() if on_cpu else None
    skipped = {} if theirs or not on_cpu else {"imagecorruptions-imaug": "not installed"}
    rival = "imagecorruptions-imaug" if on_cpu else "ResNet-50 forward"
    if on_cpu:
        torch.set_num_threads(1)
    clock, forward = Clock(device), None if on_cpu else _network(images)
    rows: list[dict[str, Any]] = []
    sums, worst = [0.0, 0.0], [0.0, 0.0]
    for name in settings.corruptions:
        for severity in settings.severities:
            ours = functools.partial(corrupt, images, name, severity)
            copies = FOG_COPIES if name == "fog" else 1
            many = np.concatenate([clean] * copies)
            out = corrupt(images.repeat(copies, 1, 1, 1), name, severity)
            mean, rms = figures(many, out.permute(0, 2, 3, 1).cpu().numpy())
            runs: list[Callable[[], Any]] = [ours]
            apart: list[float] = []
            if theirs:
                runs.append(functools.partial(_each, theirs, list(clean), name, severity))
                mean_there, rms_there = figures(many, _each(theirs, list(many), name, severity))
                apart = [mean - mean_there, rms - rms_there]
                if name not in ELSEWHERE:
                    levels = max(map(abs, apart))
                    worst[name == "fog"] = max(worst[name == "fog"], levels)
                    if not levels < (FOG_LEVELS if name == "fog" else LEVELS):
                        raise ValueError(f"{name} at severity {severity} is {apart} grey levels from the peer's")
            elif forward:
                runs.append(forward)
            times = [taken["median"] for taken in in_turns(runs, clock, settings.rounds)]
            for side, taken in enumerate(times):
                sums[side] += taken
            rows.append(_row(f"{name} {severity}", times, settings.batch_size, rival, [mean, rms, *apart]))
    cells = len(rows)
    totals = [total / cells for total in sums[: len(times)]]
    rows.append(_row(f"mean of {cells} cells", totals, settings.batch_size, rival, []))
    return {
        "benchmark": "corruptions",
        "settings": asdict(settings),
        "grey_levels_apart": dict(zip(("most", "fog"), worst, strict=True)) if theirs else None,
        "median_ms_per_image": statistics.median(1e3 / row["images/s"] for row in rows[:-1]),
        "rows": rows,
        "skipped": skipped,
    }


def _row(cell: str, times: list[float], batch: int, rival: str, levels: list[float]) -> dict[str, Any]:
    mean, rms, mean_apart, rms_apart = [*levels, "", "", "", ""][:4]
    rates = [1e3 * batch / taken for taken in times]
    return {
        "cell": cell,
        "images/s": rates[0],
        f"{rival}, images/s": rates[1] if len(rates) > 1 else "",
        "times as fast": rates[0] / rates[1] if len(rates) > 1 else "",
        "mean": mean,
        "change (RMS)": rms,
        "mean, to the peer's": mean_apart,
        "change, to the peer's": rms_apart,
    }
