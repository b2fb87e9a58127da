"""A small data set of real photographs that needs no download: crops of pictures that ship inside ordinary packages.

Ten photographs, one class each. Each is cut in two by an upright line through its subject; training crops come from the
left of that line and validation crops from the right, so no pixel of one is in the other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from fastmoll.pipelines.files import cache_home

TRAIN_PER_CLASS = 80
VAL_PER_CLASS = 20
SIDES = (96, 256)
"""Shortest and longest side of a crop, in pixels."""

_HEIGHT = 480  # of a photograph before it is cropped, at most: larger ones would show texture, not their subject
_QUALITY = 90
# A change of what is written needs a new name, or old caches are taken for it.
_NAME = "sample-v1"
_STALE = 3600  # seconds


@dataclass(frozen=True)
class Photograph:
    """One class.

    Attributes:
        name: Class, a folder name.
        package: Import name of the package that ships the picture.
        file: Path inside the package.
        left: Left end of the training part, as a fraction of the width.
        cut: End of the training part and start of the validation part.
        right: End of the validation part.
    """

    name: str
    package: str
    file: str
    left: float
    cut: float
    right: float

    def parts(self, width: int, height: int) -> dict[str, tuple[int, int, int, int]]:
        """Box (left, upper, right, lower) in pixels of the part that each split is cropped from."""
        left, cut, right = (round(width * x) for x in (self.left, self.cut, self.right))
        return {"train": (left, 0, cut, height), "val": (cut, 0, right, height)}


PHOTOGRAPHS = (
    Photograph("astronaut", "skimage", "data/astronaut.png", 0.00, 0.42, 0.80),
    Photograph("cat", "skimage", "data/chelsea.png", 0.00, 0.50, 1.00),
    Photograph("coffee", "skimage", "data/coffee.png", 0.05, 0.48, 0.90),
    Photograph("dahlia", "sklearn", "datasets/images/flower.jpg", 0.20, 0.48, 0.76),
    Photograph("galaxies", "skimage", "data/hubble_deep_field.jpg", 0.00, 0.55, 1.00),
    Photograph("motorcycle", "skimage", "data/motorcycle_left.png", 0.00, 0.50, 1.00),
    Photograph("pagoda", "sklearn", "datasets/images/china.jpg", 0.05, 0.33, 0.61),
    Photograph("retina", "skimage", "data/retina.jpg", 0.00, 0.50, 1.00),
    Photograph("rocket", "skimage", "data/rocket.jpg", 0.22, 0.51, 0.80),
    Photograph("tissue", "skimage", "data/ihc.png", 0.00, 0.50, 1.00),
)
"""The photographs, in the order of their class numbers."""


def sample_folder(cache: Path | None = None) -> Path:
    """The sample data as an ImageFolder tree, made at the first call and reused afterwards.

    Holds ``train/<class>/*.jpg`` and ``val/<class>/*.jpg`` with 80 and 20 crops a class of both aspect ratios. The
    crops are the same everywhere (their compression is Pillow's). Any number of processes may call this at once.

    Args:
        cache: Folder to keep the tree in, by default ``$XDG_CACHE_HOME/fastmoll`` or ``~/.cache/fastmoll``.

    Returns:
        The tree's root.

    Raises:
        ImportError: scikit-image or scikit-learn, which ship the photographs, is not installed.
        ValueError: A tree is there, but files of it are gone.
    """
    if cache is None:
        cache = cache_home()
    folder = cache / _NAME
    for left in cache.glob(f"{_NAME}.????????"):  # of processes that were killed: it is a matter of seconds
        with contextlib.suppress(OSError):  # another one was quicker
            if left.stat().st_mtime < time.time() - _STALE:
                shutil.rmtree(left)
    if not folder.is_dir():
        sources = [_locate(photograph) for photograph in PHOTOGRAPHS]
        cache.mkdir(parents=True, exist_ok=True)
        # Made beside its place and moved there whole: what other processes see is nothing or everything.
        with tempfile.TemporaryDirectory(prefix=f"{_NAME}.", dir=cache, ignore_cleanup_errors=True) as temporary:
            made = Path(temporary) / _NAME
            for photograph, source in zip(PHOTOGRAPHS, sources, strict=True):
                _write_crops(photograph, source, made)
            try:
                os.rename(made, folder)
            except OSError:
                # Another process was quicker: a folder with files in it is never replaced.
                if not folder.is_dir():
                    raise
    count = sum(1 for _ in folder.glob("*/*/*.jpg"))
    expected = len(PHOTOGRAPHS) * (TRAIN_PER_CLASS + VAL_PER_CLASS)
    if count != expected:
        raise ValueError(f"sample data in {folder} has {count} files instead of {expected}: delete that folder")
    return folder


def _locate(photograph: Photograph) -> Path:
    # Found, not imported: importing the packages takes seconds, and their own loaders may start a download.
    spec = importlib.util.find_spec(photograph.package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / photograph.file
        if path.is_file():
            return path
    raise ImportError(
        f"the sample data needs {photograph.package}/{photograph.file} of scikit-image and scikit-learn: "
        "pip install 'fastmoll[sample]'"
    )


def _write_crops(photograph: Photograph, source: Path, root: Path) -> None:
    with Image.open(source) as file:
        whole = file.convert("RGB")
    scale = min(1.0, _HEIGHT / whole.height)
    for split, box in photograph.parts(*whole.size).items():
        # Cut first: scaling the whole would mix pixels across the line.
        part = whole.crop(box)
        part = part.resize((round(part.width * scale), round(part.height * scale)), Image.Resampling.LANCZOS)
        folder = root / split / photograph.name
        folder.mkdir(parents=True)
        draw = random.Random(f"{split}/{photograph.name}")
        for number in range(TRAIN_PER_CLASS if split == "train" else VAL_PER_CLASS):
            width, height = (draw.randint(SIDES[0], min(SIDES[1], side)) for side in part.size)
            x, y = draw.randint(0, part.width - width), draw.randint(0, part.height - height)
            part.crop((x, y, x + width, y + height)).save(folder / f"{number:03}.jpg", quality=_QUALITY)
