"""Augmentation: `fastmoll.Augment` on batches against torchvision image by image, and the loaders around them."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import loader
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

from fastmoll import ImageNetLoader, Mollify
from fastmoll.augment import Augment, parse_augment
from fastmoll.kernels.image_ops import OPERATIONS, apply
from fastmoll.kernels.mix import MIXES
from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.policies import ROTATION, ranges
from fastmoll.pipelines.small import SmallData
from fastmoll.sample import sample_folder
from fastmoll.small_loader import SmallImageLoader

SMALL = ("fc", "fcr", "fcr+rand", "fcr+auto", "fcr+trivial", "fcr+augmix")
# Above 128 pixels, flip, crop and rotation belong to decoding, and are timed with it.
LARGE = ("none+rand", "none+auto", "none+trivial", "none+augmix")
DECODED = ("fc", "fcr")
_COMPARED = 1000  # images of each side whose grey levels are compared


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
    """Timed batches a turn, of the loaders of small images; a fifth of it for the DataLoader, and from files."""
    data: Path | None = None
    """ImageFolder tree of the JPEGs to decode; default: the bundled photographs, of 96 to 256 pixels a side."""
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
    limits, nearest = ranges("trivial", *images.shape[1:3]), v2.InterpolationMode.NEAREST
    for name in limits:
        magnitudes = limits[name].magnitudes
        magnitude = 0.0 if magnitudes is None else float(magnitudes[20])
        op = torch.full((len(images),), OPERATIONS.index(name))
        planes = images.permute(0, 3, 1, 2)
        theirs = transform._apply_image_or_video_transform(planes, name, magnitude, nearest, transform._fill)
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


def _mixed(kind: str, images: Tensor, classes: int) -> dict[str, Callable[[], Any]]:
    """A batch of pixels standardised and mixed, with its soft labels, as the loaders do it and as torchvision does.

    Raises:
        ValueError: With the same draws they give something else.
    """
    size, index = images.shape[1], torch.arange(len(images))
    labels, planes = index % classes, images.permute(0, 3, 1, 2).contiguous()
    mollify, epochs = Mollify(classes, (1, 0, 0), mix=kind), itertools.count()
    standardise = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    mix = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[kind](num_classes=classes)

    def ours() -> Any:
        return mollify.from_pixels(images, labels, index, next(epochs), mean=MEAN, std=STD)

    def theirs() -> Any:
        return mix(standardise(planes), labels)

    drawn = mollify.draw_mix(index, height=size, width=size)
    assert drawn is not None
    params: dict[str, Any] = {"lam": float(drawn.lam[0])}
    if drawn.box is not None:
        y0, y1, x0, x1 = drawn.box[0].tolist()
        params = {"box": (x0, y0, x1, y1), "lam_adjusted": float(drawn.lam[0])}
    with mock.patch.object(mix, "make_params", return_value=params):
        apart = max(float((left - right).abs().max()) for left, right in zip(ours(), theirs(), strict=True))
    if not apart < 1e-5:
        raise ValueError(f"{kind} disagrees with torchvision's by {apart}")
    return {"fastmoll": ours, "torchvision": theirs}


def _grey(batches: Iterator[Any], count: int) -> Tensor:
    """Mean grey levels of standardised batches and of the four corners of their images, float32 ``(2,)``."""
    total, std, mean = torch.zeros(2), torch.tensor(STD).view(3, 1, 1), torch.tensor(MEAN).view(3, 1, 1)
    for images, _ in itertools.islice(batches, count):
        levels = 255 * (images * std + mean)
        total += torch.stack([levels.mean(), levels[..., [0, 0, -1, -1], [0, -1, 0, -1]].mean()])
    return total / count


def _decoded(base: str, files: loader.Settings) -> tuple[list[Side], float]:
    """Standardised crops of JPEGs, by the loader and by torchvision file by file, and how far apart they are.

    Raises:
        ValueError: That is more than ten grey levels, as it would be if only one rotated, for its black corners.
    """
    ours = ImageNetLoader(files.data, "train", files.batch_size, files.size, base, device="cpu", num_threads=1)
    steps = [v2.RandomResizedCrop(files.size, antialias=True), v2.RandomHorizontalFlip()]
    steps += [v2.RandomRotation(ROTATION)] if base == "fcr" else []
    theirs = loader.torchvision_loader(files, "train", steps, True)
    # As many batches are put aside for both: while torchvision's are, the loader fills its queue.
    sides = [Side("fastmoll", base, endless(ours), 3), Side("torchvision, Pillow", base, endless(theirs), 3)]
    first, second = (_grey(side.batches, -(-_COMPARED // files.batch_size)) for side in sides)
    apart = float((first - second).abs().max())
    if not apart < 10:
        raise ValueError(f"{base}: grey levels of crops, of their corners: {first.tolist()} and {second.tolist()}")
    return sides, apart


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


def _rows(job: str, times: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """What is kept of a job: milliseconds an image of each side, fastmoll's first."""
    ours = next(iter(times.values()))["median"]
    return [
        {
            "job": job,
            "side": side,
            "ms/image": taken,
            "images/s": 1e3 / taken["median"],
            "times fastmoll's": taken["median"] / ours,
        }
        for side, taken in times.items()
    ]


def _rates(sides: list[Side]) -> dict[str, dict[str, float]]:
    return {side.name: spread([1e3 / rate for rate in side.rates]) for side in sides}


def bench_augment(settings: Annotated[Settings, tyro.conf.arg(name="")]) -> dict[str, Any]:
    """Milliseconds an image of each augmentation in one thread, of decoding, and of loaders of small images."""
    if settings.device != "cpu":
        raise ValueError(f"device must be 'cpu', got {settings.device!r}")
    data = sample_folder() if settings.data is None else settings.data
    rows: list[dict[str, Any]] = []
    clock, apart = Clock(torch.device("cpu")), {}
    for size in settings.sizes:
        torch.set_num_threads(1)
        large = size > 128
        count = max(1, settings.batch_size // 8) if large else settings.batch_size
        images, index = _photographs(size, count), torch.arange(count)
        apart[str(size)] = _agree(images)
        pictures, arrays = [Image.fromarray(image) for image in images.numpy()], list(images.numpy())
        jobs: dict[str, dict[str, Callable[[], Any]]] = {}
        for name in LARGE if large else SMALL:
            ours, steps = Augment(name, size), _transforms(name, size)
            tensors, pillow = v2.Compose([v2.ToImage(), *steps]), v2.Compose(steps)
            jobs[name] = {
                "fastmoll": functools.partial(ours, images, index),
                "torchvision, tensors": functools.partial(_each, tensors, arrays),
                "torchvision, Pillow": functools.partial(_each, pillow, pictures),
            }
            graph = _dali(name, images) if large else None
            if graph is not None:
                jobs[name]["DALI graph"] = graph
        for kind in MIXES:
            jobs[f"{kind}, pixels to standardised batch and soft labels"] = _mixed(kind, images, 1000 if large else 10)
        for job, sides in jobs.items():
            times = in_turns(list(sides.values()), clock, settings.rounds)
            each = [{key: value / count for key, value in taken.items()} for taken in times]
            rows += _rows(f"{job}, {size} px, one thread", dict(zip(sides, each, strict=True)))
        if not large:
            continue
        files = loader.Settings(data=data, batch_size=count, size=size, workers=0)
        apart[f"JPEG to {size}"] = loader.agree(files)
        for base in DECODED:
            decoders, apart[f"{base}, JPEG to {size}, means"] = _decoded(base, files)
            for _ in range(settings.rounds):
                for side in decoders:
                    side.turn(max(1, settings.batches // 5), clock.device)
            # CPU time: DALI decodes a batch while the one before is standardised, whatever its number of threads.
            used = {side.name: spread(side.cpu) for side in decoders}
            rows += _rows(f"{base}, JPEG to standardised batch, {size} px, CPU time", used)
    torch.set_num_threads(settings.workers)
    small = _photographs(32, 32 * settings.batch_size).numpy()
    for name in SMALL:
        loaders = _loaders(name, settings, small)
        for turn in range(-1, 3):
            for number, side in enumerate(loaders):
                side.turn(settings.batches if number == 0 else max(1, settings.batches // 5), clock.device)
                if turn < 0:
                    side.rates.clear()
        rows += _rows(f"{name}, 32 px, loader, {settings.workers} CPUs", _rates(loaders))
        del loaders
    return {
        "benchmark": "augment",
        "settings": {**asdict(settings), "data": data.name},
        "grey_levels_apart": apart,
        "rows": rows,
    }
