"""Augmentation: `fastmoll.Augment` on batches against torchvision image by image, and the loaders around them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from harness import Clock, in_turns, spread
from loader import Side, endless
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from fastmoll.augment import Augment, parse_augment
from fastmoll.kernels.image_ops import OPERATIONS, apply
from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.policies import ranges
from fastmoll.pipelines.small import SmallData
from fastmoll.sample import sample_folder
from fastmoll.small_loader import SmallImageLoader

SMALL = ("fc", "fcr", "fcr+rand", "fcr+auto", "fcr+trivial", "fcr+augmix")
# Above 128 pixels, flip, crop and rotation belong to decoding: `bench/run.py loader` times them.
LARGE = ("none+rand", "none+auto", "none+trivial", "none+augmix")


@dataclass(frozen=True)
class Settings:
    """What is timed."""

    sizes: tuple[int, ...] = (32, 224)
    """Heights and widths, pixels."""
    batch_size: int = 128
    """Images a batch; above 128 pixels an eighth of it."""
    rounds: int = 9
    """Turns of each side."""
    workers: int = 2
    """Processes of the DataLoader, threads of fastmoll, for the loaders; all else runs in one thread."""
    batches: int = 40
    """Timed batches a turn, of the loaders; a fifth of it for the DataLoader."""
    device: str = "cpu"
    """Only the CPU is timed here."""


def _photographs(size: int, count: int) -> Tensor:
    """Crops of photographs, uint8 ``(count, size, size, 3)``."""
    resize = [v2.Resize(size, antialias=True), v2.CenterCrop(size), v2.PILToTensor()]
    folder = ImageFolder(str(sample_folder() / "train"), v2.Compose(resize))
    step = max(1, len(folder) // count)
    images = torch.stack([folder[i * step % len(folder)][0] for i in range(min(count, len(folder)))])
    return images.permute(0, 2, 3, 1).repeat(-(-count // len(images)), 1, 1, 1)[:count].contiguous()


def _transforms(name: str, size: int) -> list[Any]:
    """Torchvision's transforms of that name, as the paper's code has them."""
    spec = parse_augment(name)
    base = [v2.RandomHorizontalFlip(), v2.RandomCrop(size, 4), v2.RandomRotation(15)]
    policies = {
        "rand": v2.RandAugment(),
        "auto": v2.AutoAugment(),
        "trivial": v2.TrivialAugmentWide(),
        "augmix": v2.AugMix(),
    }
    kept = base[: {"none": 0, "fc": 2, "fcr": 3}[spec.base]]
    return [*kept, *([policies[spec.policy]] if spec.policy else [])]


def _agree(images: Tensor) -> float:
    """Mean difference in grey levels to torchvision over all operations; half of one is an error."""
    transform, total = v2.RandAugment(), 0.0
    limits = ranges("trivial", *images.shape[1:3])
    for name in limits:
        magnitudes = limits[name].magnitudes
        magnitude = 0.0 if magnitudes is None else float(magnitudes[20])
        op = torch.full((len(images),), OPERATIONS.index(name))
        planes = images.permute(0, 3, 1, 2)
        theirs = transform._apply_image_or_video_transform(planes, name, magnitude, "nearest", transform._fill)
        ours = apply(images, op, torch.full((len(images),), magnitude))
        total += float((ours.float() - theirs.permute(0, 2, 3, 1).float()).abs().mean()) / len(limits)
    if not total < 0.5:
        raise ValueError(f"the operations disagree with torchvision's by {total} grey levels on average")
    return total


def _dali(name: str, images: Tensor) -> Callable[[], Any] | None:
    """The policy in a DALI graph on these images, as `ImageNetLoader` has it; None for those that DALI lacks."""
    policy = parse_augment(name).policy
    if policy in (None, "augmix"):
        return None
    from nvidia.dali import fn, pipeline_def

    from fastmoll.pipelines import dali_policies

    policy_of = dali_policies.policy(str(policy), images.shape[1])
    batch = list(images.numpy())

    @pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
    def graph() -> Any:
        return policy_of(fn.external_source(source=lambda: batch, layout="HWC"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = graph(batch_size=len(batch), num_threads=1, device_id=None, seed=1, prefetch_queue_depth=1)
        pipeline.build()
    return lambda: pipeline.run()


def _each(transform: Callable[[Any], Any], images: list[Any]) -> None:
    for image in images:
        transform(image)


class _Small(Dataset[tuple[Tensor, int]]):
    """The paper's data set: an array, and transforms of one image."""

    def __init__(self, images: Any, transform: Callable[[Any], Tensor], pil: bool) -> None:
        self.images, self.transform, self.pil = images, transform, pil

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return self.transform(Image.fromarray(image) if self.pil else image), 0


def _loaders(name: str, settings: Settings, images: Any) -> list[Side]:
    """Standardised batches of 32 pixels: fastmoll's, the paper's, and the paper's on Pillow images."""
    data = SmallData(images, np.arange(len(images)) % 10, [str(k) for k in range(10)], Path("photographs"))
    ours = SmallImageLoader(data, batch_size=settings.batch_size, augment=name, device="cpu", mean=MEAN, std=STD)
    sides = [Side("fastmoll", name, endless(ours), 1)]
    tail = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    for pil in (False, True):
        transform = v2.Compose([*([] if pil else [v2.ToImage()]), *_transforms(name, 32), v2.ToImage(), *tail])
        theirs = DataLoader(
            _Small(images, transform, pil),
            settings.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=settings.workers,
            persistent_workers=True,
        )
        kind = "Pillow" if pil else "tensors"
        sides.append(Side(f"torchvision {kind}, DataLoader", name, endless(theirs), 2 * settings.workers + 1))
    return sides


def bench_augment(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Milliseconds an image of each augmentation in one thread; images a second of loaders of small images."""
    if settings.device != "cpu":
        raise ValueError(f"device must be 'cpu', got {settings.device!r}")
    rows: list[dict[str, Any]] = []
    clock, apart = Clock(torch.device("cpu")), {}
    for size in settings.sizes:
        torch.set_num_threads(1)
        count = settings.batch_size if size <= 128 else max(1, settings.batch_size // 8)
        images, index = _photographs(size, count), torch.arange(count)
        apart[str(size)] = _agree(images)
        pictures, arrays = [Image.fromarray(image) for image in images.numpy()], list(images.numpy())
        for name in SMALL if size <= 128 else LARGE:
            ours, steps = Augment(name, size), _transforms(name, size)
            tensors, pillow = v2.Compose([v2.ToImage(), *steps]), v2.Compose(steps)
            sides: dict[str, Callable[[], Any]] = {
                "fastmoll": functools.partial(ours, images, index),
                "torchvision, tensors": functools.partial(_each, tensors, arrays),
                "torchvision, Pillow": functools.partial(_each, pillow, pictures),
            }
            graph = _dali(name, images) if size > 128 else None
            if graph is not None:
                sides["DALI graph"] = graph
            times = in_turns(list(sides.values()), clock, settings.rounds)
            each = [{key: value / count for key, value in taken.items()} for taken in times]
            for side, taken in zip(sides, each, strict=True):
                rows.append(
                    {
                        "job": f"{name}, {size} px, one thread",
                        "side": side,
                        "ms/image": taken,
                        "images/s": 1e3 / taken["median"],
                        "times fastmoll's": taken["median"] / each[0]["median"],
                    }
                )
    torch.set_num_threads(settings.workers)
    small = _photographs(32, 32 * settings.batch_size).numpy()
    for name in SMALL:
        loaders = _loaders(name, settings, small)
        for turn in range(-1, 3):
            for number, loader in enumerate(loaders):
                loader.turn(settings.batches if number == 0 else max(1, settings.batches // 5), torch.device("cpu"))
                if turn < 0:
                    loader.rates.clear()
        fast = spread(loaders[0].rates)["median"]
        for loader in loaders:
            rate = spread(loader.rates)
            rows.append(
                {
                    "job": f"{name}, 32 px, loader, {settings.workers} CPUs",
                    "side": loader.name,
                    "ms/image": spread([1e3 / value for value in loader.rates]),
                    "images/s": rate["median"],
                    "times fastmoll's": fast / rate["median"],
                }
            )
        del loaders
    return {"benchmark": "augment", "settings": asdict(settings), "grey_levels_apart": apart, "rows": rows}
