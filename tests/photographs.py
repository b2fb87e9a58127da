"""Real photographs for tests, and what is measured on them."""

from __future__ import annotations

import functools
import importlib.resources

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fastmoll.corruptions import corrupt
from fastmoll.sample import PHOTOGRAPHS


@functools.cache
def photographs(size: int = 224) -> np.ndarray:
    """Twenty, prepared as ImageNet's are for 224: resized to 8/7 of the size, cropped; uint8 ``(20, S, S, 3)``."""
    pictures = []
    for photograph in PHOTOGRAPHS:
        with (importlib.resources.files(photograph.package) / photograph.file).open("rb") as stream:
            whole = Image.open(stream).convert("RGB")
        for box in photograph.parts(*whole.size).values():
            part = whole.crop(box)
            scale = 8 * size / 7 / min(part.size)
            width, height = (round(side * scale) for side in part.size)
            part = part.resize((width, height), Image.Resampling.BILINEAR)
            left, top = (width - size) // 2, (height - size) // 2
            pictures.append(np.asarray(part.crop((left, top, left + size, top + size))))
    return np.stack(pictures)


def figures(clean: np.ndarray, pictures: np.ndarray) -> tuple[float, float]:
    """Mean of pictures, and root mean square of their difference to the clean ones; grey levels."""
    change = pictures.astype(np.float64) - clean
    return float(pictures.mean()), float(np.sqrt((change * change).mean()))


def means(images: Tensor, name: str, severity: int, draws: int) -> tuple[float, float]:
    """Over several draws of each image, the means of the corrupted ones and of their distances to the clean ones."""
    found = []
    for index in torch.arange(len(images) * draws).split(40):
        clean = images[index % len(images)]
        ours = corrupt(clean, name, severity, index=index).float()
        distances = (ours - clean).square().mean((1, 2, 3)).sqrt()
        found.append(torch.stack([ours.mean((1, 2, 3)), distances]))
    mean, distance = torch.cat(found, 1).mean(1).tolist()
    return mean, distance
