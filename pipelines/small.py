"""Data sets of small images, read whole into memory: CIFAR, TinyImageNet, arrays, folders, scikit-learn's digits.

Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fastmoll.pipelines import MEAN, STD
from fastmoll.pipelines.cifar import find_cifar, read_cifar
from fastmoll.pipelines.decoded import SIDE_LIMIT, decode_folder, load_array, size_of
from fastmoll.pipelines.errors import ImageSizeError, did_you_mean, nearest
from fastmoll.pipelines.files import SPLITS, ImageFolder, cache_home, check_classes, scan_folder, scan_split, stems_of

Triple = tuple[float, float, float]


class Known(NamedTuple):
    """What is published about a data set: enough to tell an incomplete copy, and how its pixels are standardised.

    Attributes:
        train: Number of training images.
        val: Number of validation images.
        size: Height and width, pixels.
        classes: Number of classes.
        mean: Mean per channel, for pixels in [0, 1].
        std: Standard deviation, likewise.
        source: Where to get it.
    """

    train: int
    val: int
    size: int
    classes: int
    mean: Triple
    std: Triple
    source: str


KNOWN = {
    "cifar10": Known(
        *(50_000, 10_000, 32, 10),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        source="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
    "cifar100": Known(
        *(50_000, 10_000, 32, 100),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        source="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    ),
    "tinyimagenet": Known(
        *(100_000, 10_000, 64, 200),
        # As in the paper: those of the images that it was made from.
        mean=MEAN,
        std=STD,
        source="http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked,",
    ),
}
NAMES = (*KNOWN, "digits")
"""Data sets with a name."""

_DIGITS_EVERY = 5  # the last of so many images of a class is for validation


@dataclass(frozen=True)
class SmallData:
    """One split of a data set, in memory.

    Attributes:
        images: uint8 ``(N, H, W, 3)``; a sample id is a position here.
        labels: Class of each sample, int64 ``(N,)``.
        classes: Class names; a class is its position here.
        root: What the split was read from: a folder, a file, or the first of several files.
        name: One of `NAMES` where it is that data set.

    Raises:
        ValueError: Arrays of another shape or type, no images, too large ones, or labels out of range; it names
            ``root``.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: list[str]
    root: Path = Path("arrays")
    name: str | None = None

    def __post_init__(self) -> None:
        """Check the arrays."""
        for name, value in (("images", self.images), ("labels", self.labels)):
            if not isinstance(value, np.ndarray):
                raise ValueError(f"{self.root}: {name} must be a NumPy array, got {type(value).__name__}")
        _check_images(self.images, self.root)
        _check_labels(self.labels, len(self.images), len(self.classes), self.root)

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of images, labels and class names."""
        digest = hashlib.blake2b(repr((self.images.shape, self.classes)).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.labels).data)
        digest.update(np.ascontiguousarray(self.images).data)
        return digest.hexdigest()

    @cached_property
    def statistics(self) -> tuple[Triple, Triple]:
        """Mean and standard deviation per channel of all pixels, in [0, 1]."""
        counts = np.zeros((3, 256), np.int64)
        for start in range(0, len(self), 1024):
            part = self.images[start : start + 1024]
            counts += [np.bincount(part[..., channel].ravel(), minlength=256) for channel in range(3)]
        share, level = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
        mean = share @ level
        std = np.sqrt((share * (level - mean[:, None]) ** 2).sum(1))
        return _triple(mean), _triple(std)


def _check_images(images: NDArray[np.uint8], root: Path, shapes: str = "(N, H, W, 3)") -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or images.size == 0:
        hint = " (channels come last)" if images.ndim == 4 and images.shape[1] == 3 else ""
        raise ValueError(f"{root}: images must be uint8 of shape {shapes}, got {images.dtype} {images.shape}{hint}")
    if max(images.shape[1:3]) > SIDE_LIMIT:
        raise ImageSizeError(f"{root} has images of {size_of(images)}, but small ones have at most {SIDE_LIMIT}")


def _check_labels(labels: NDArray[np.int64], images: int, classes: int, root: Path) -> None:
    if labels.dtype != np.int64 or labels.shape != (images,):
        wanted = f"int64 of shape ({images},), as many as images"
        raise ValueError(f"{root}: labels must be {wanted}, got {labels.dtype} {labels.shape}")
    bad = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(bad):
        raise ValueError(f"{root}: labels must be in 0..{classes - 1}, got {labels[bad[0]]} for image {bad[0]}")


def read_small(
    data: str | os.PathLike[str], split: str = "train", path: str | os.PathLike[str] | None = None
) -> SmallData:
    """Read one split of a data set of small images.

    ``data`` is a name or a path. Names: ``"cifar10"``, ``"cifar100"``, ``"tinyimagenet"``, looked for at ``path``, or
    without one in the folder ``data`` and in ``~/.cache/fastmoll/data`` (``$XDG_CACHE_HOME``); and ``"digits"``, the
    1,797 digits that scikit-learn ships, enlarged from 8 to 32 pixels, a fifth of each class for validation.

    What may be at a path:

    - an official CIFAR archive, pickled or binary, whose published MD5 is checked, or its unpacked folder. Pickles may
      hold arrays, lists, dicts, bytes, strings and numbers and nothing else, so they can run no code;
    - the folder ``tiny-imagenet-200``;
    - a folder that has one of these in it;
    - a folder of ``.npy`` files: ``train.npy``, uint8 ``(N, H, W, 3)`` or grey ``(N, H, W)`` or ``(N, H, W, 1)``, with
      ``train_labels.npy``, integers ``(N,)``, and likewise for the validation images. Those in colour are mapped, not
      copied;
    - a folder ``train/<class>/<image>`` and so on, all images of one size. Alpha is dropped, grey becomes colour. They
      are decoded once (see `decode_folder`).

    Args:
        data: Name or path.
        split: ``"train"``, or ``"val"``, which in arrays and folders may be called ``validation`` or ``test``; the
            latter two, and any other name that a folder has, are taken here, too.
        path: Where a named data set is.

    Raises:
        ValueError: An unknown name (with the nearest known one), nothing there, a checksum that is not the published
            one, a damaged, truncated or incomplete file, images of several sizes or too large ones (an
            `ImageSizeError`), a wrong shape or type, or labels out of range; it names the file.
        OSError: A file can't be read.
        ImportError: ``"digits"`` without scikit-learn.
    """
    name, place = find_small(data, path)
    if place is None:
        return _read_digits(split)
    found = _read_path(place, split, name)
    _check_complete(found, split)
    return found


def find_small(
    data: str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> tuple[str | None, Path | None]:
    """Where a data set of small images is, without reading it; arguments and errors as for `read_small`.

    Returns:
        Its name, None for a path; and the file or folder, None for the digits.
    """
    if not isinstance(data, (str, os.PathLike)):
        raise ValueError(f"data must be a name or a path, got {data!r}")
    name = str(data) if str(data) in NAMES else None
    if name == "digits":
        if path is not None:
            raise ValueError(f"path must be left out for digits, which scikit-learn brings, got {str(path)!r}")
        return name, None
    if name is None:
        if path is not None:
            raise ValueError(
                f"path must be left out for {str(data)!r}, which is none of {', '.join(KNOWN)}, got {str(path)!r}"
            )
        place = Path(data)
        if not place.exists():
            hint = did_you_mean(nearest(place.name, NAMES), f"; names are {', '.join(NAMES)}")
            raise ValueError(f"data: {str(data)!r} is no file or folder, and no name of a data set{hint}")
    elif path is not None:
        place = Path(path)
        if not place.exists():
            raise ValueError(f"path: there is no {place}, where {name} should be")
    else:
        place = _usual_place(name)
    return name, place


def standardisation(
    data: SmallData | str | os.PathLike[str], path: str | os.PathLike[str] | None = None
) -> tuple[Triple, Triple]:
    """Mean and standard deviation per channel that go with a data set, for pixels in [0, 1].

    Published ones where the data set is known, else those of its training images.

    Args:
        data: The training images, or what `read_small` reads them from; of a known data set or the digits any images.
        path: As for `read_small`.

    Raises:
        ValueError: As for `read_small`, or a channel has one value everywhere.
    """
    name = data.name if isinstance(data, SmallData) else str(data)
    if name in KNOWN:
        return KNOWN[name].mean, KNOWN[name].std
    if name == "digits" and isinstance(data, SmallData):
        data = name  # these may be the others
    images = data if isinstance(data, SmallData) else read_small(data, "train", path)
    mean, std = images.statistics
    if min(std) == 0:
        raise ValueError(f"{images.root}: the standard deviation is {std}: a colour channel never changes")
    return mean, std


def _usual_place(name: str) -> Path:
    places = [Path("data").absolute(), cache_home() / "data"]
    for place in places:
        if place.is_dir() and (find_tiny(place) if name == "tinyimagenet" else find_cifar(place, name)):
            return place
    raise ValueError(
        f"{name} is neither in {places[0]} nor in {places[1]}: put {KNOWN[name].source} there, or give its path"
    )


def _read_path(place: Path, split: str, name: str | None) -> SmallData:
    cifar = find_cifar(place, name) or find_cifar(place)
    if cifar is not None:
        layout, where = cifar
        if name not in (None, layout.name):
            raise ValueError(f"{where} is {layout.name}, not {name}")
        return SmallData(*read_cifar(where, layout, split), layout.name)
    tiny = find_tiny(place)
    if tiny is not None:
        if name not in (None, "tinyimagenet"):
            raise ValueError(f"{tiny} is tinyimagenet, not {name}")
        return _read_tiny(tiny, split)
    stems = stems_of(split)
    for stem in stems:
        if (place / f"{stem}.npy").is_file():
            return _read_arrays(place, stem, name)
    others = [f"{stem}.npy" for stem in SPLITS if (place / f"{stem}.npy").is_file()]
    if others:
        wanted = " or ".join(f"{stem}.npy" for stem in stems)
        raise ValueError(f"{place} has {', '.join(others)}, but no {wanted}")
    if place.is_dir() and not any(entry.is_dir() for entry in place.iterdir()):
        raise ValueError(
            f"{place} has no class folders {split}/<class>, no {stems[0]}.npy with {stems[0]}_labels.npy, "
            f"and is none of {', '.join(KNOWN)}"
        )
    folder = scan_split(place, split)
    return SmallData(decode_folder(folder), folder.targets, folder.classes, folder.root, name)


def _check_complete(data: SmallData, split: str) -> None:
    if data.name not in KNOWN:
        return
    known = KNOWN[data.name]
    count = known.train if split == "train" else known.val
    if (len(data), *data.images.shape[1:3], len(data.classes)) != (count, known.size, known.size, known.classes):
        raise ValueError(
            f"{data.root} is not {data.name}, or not all of it: {len(data)} images of {size_of(data.images)} in "
            f"{len(data.classes)} classes, instead of {count} of {known.size} x {known.size} in {known.classes}"
        )


# --- TinyImageNet -----------------------------------------------------------------------------------------------------


def find_tiny(place: Path) -> Path | None:
    """The folder of TinyImageNet, which a path is or has in it; None where it is not there."""
    folders = (place, place / "tiny-imagenet-200")
    return next((folder for folder in folders if (folder / "wnids.txt").is_file()), None)


def _read_tiny(folder: Path, split: str) -> SmallData:
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val' for tinyimagenet, got {split!r} (its test set has no labels)")
    classes = sorted(_text(folder / "wnids.txt").split())
    annotations = folder / "val" / "val_annotations.txt"
    if split == "val" and annotations.is_file() and (folder / "val" / "images").is_dir():
        found = _annotated(annotations, classes)
    else:
        # The training images, or validation images that were sorted into class folders, as many copies are, with or
        # without the list beside them.
        found = scan_folder(folder, split)
        check_classes(found.classes, classes, f"{found.root} and {folder / 'wnids.txt'}")
    return SmallData(decode_folder(found), found.targets, classes, found.root, "tinyimagenet")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def _annotated(annotations: Path, classes: list[str]) -> ImageFolder:
    number = {name: label for label, name in enumerate(classes)}
    paths, targets = [], []
    for at, line in enumerate(_text(annotations).splitlines(), 1):
        words = line.split("\t")
        if len(words) < 2 or words[1] not in number:
            raise ValueError(f"{annotations}, line {at}: expected an image and a class of wnids.txt, got {line[:80]!r}")
        paths.append(os.path.join("images", words[0]))
        targets.append(number[words[1]])
    if not paths:
        raise ValueError(f"{annotations} lists no images")
    return ImageFolder(annotations.parent, classes, paths, np.asarray(targets, np.int64))


# --- arrays -----------------------------------------------------------------------------------------------------------


def _read_arrays(folder: Path, stem: str, name: str | None) -> SmallData:
    path = folder / f"{stem}.npy"
    own = folder / f"{stem}_labels.npy"
    images, labels = load_array(path), _load_labels(own)
    if images.dtype == np.uint8 and (images.ndim == 3 or images.shape[3:] == (1,)):
        images = np.repeat(images.reshape(*images.shape[:3], 1), 3, axis=3)
    _check_images(images, path, "(N, H, W, 3), or grey (N, H, W) or (N, H, W, 1)")
    # Which classes there are the training labels say: another split may lack some, and must have no others.
    training = folder / "train_labels.npy"
    source = training if training.is_file() else own
    known = labels if source == own else _load_labels(source)
    present = np.unique(known)
    if not np.array_equal(present, np.arange(len(present))):
        raise ValueError(
            f"{source}: labels must be 0..K-1, each of them there, got "
            f"{len(present)} different ones from {present[0]} to {present[-1]}"
        )
    _check_labels(labels, len(images), len(present), own)
    return SmallData(images, labels, [str(label) for label in present], path, name)


def _load_labels(path: Path) -> NDArray[np.int64]:
    labels = load_array(path)
    if labels.size == 0:
        raise ValueError(f"{path} has no labels")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels must be integers of shape (N,), got {labels.dtype} {labels.shape}")
    return labels.astype(np.int64)


# --- digits -----------------------------------------------------------------------------------------------------------


def _read_digits(split: str) -> SmallData:
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val' for digits, got {split!r}")
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'fastmoll[sample]'") from error
    levels, labels = load_digits(return_X_y=True)  # grey levels 0 to 16
    labels = labels.astype(np.int64)
    validation = np.zeros(len(labels), bool)
    for label in range(10):
        validation[np.flatnonzero(labels == label)[_DIGITS_EVERY - 1 :: _DIGITS_EVERY]] = True
    chosen = validation == (split == "val")
    grey = (levels[chosen].reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    large = [np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC)) for image in grey]
    images = np.repeat(np.stack(large)[..., None], 3, axis=3)
    return SmallData(images, labels[chosen], [str(label) for label in range(10)], Path("digits") / split, "digits")


def _triple(values: NDArray[np.float64]) -> Triple:
    red, green, blue = values.tolist()
    return red, green, blue
