"""A folder of small image files as one array, decoded once with Pillow and kept in fastmoll's cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fastmoll.pipelines.errors import ImageSizeError
from fastmoll.pipelines.files import ImageFolder, cache_home

SIDE_LIMIT = 512
"""Largest height and width, pixels: larger images are for a loader that decodes as it goes."""


def decode_folder(folder: ImageFolder) -> NDArray[np.uint8]:
    """Decode all images, or take them from the cache if no file has changed its name, its size or its time of change.

    Alpha is dropped and grey becomes colour. The cache is a ``.npy`` file under ``$XDG_CACHE_HOME/fastmoll/small``
    (``~/.cache``); several processes may call this at once, and one of them decodes.

    Returns:
        uint8 ``(N, H, W, 3)``.

    Raises:
        ValueError: A file that is missing, can't be decoded, or is grey with more than 8 bits a pixel (of colours with
            16 bits, Pillow keeps the upper 8); an `ImageSizeError` of images of more than one size, or larger than
            `SIDE_LIMIT`; it names the file.
    """
    digest = hashlib.blake2b(folder.fingerprint.encode(), digest_size=12)
    for sample in range(len(folder)):
        try:
            status = os.stat(folder.path(sample))
        except FileNotFoundError:
            raise ValueError(f"{folder.path(sample)} is missing") from None
        digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
    place = hashlib.blake2b(os.fsencode(folder.root.absolute()), digest_size=12).hexdigest()
    store = cache_home() / "small" / f"{place}-{digest.hexdigest()}.npy"
    with _alone(store.parent / f"{place}.lock"):
        if store.is_file():
            with suppress(ValueError):  # damaged: decode again
                kept: NDArray[np.uint8] = load_array(store)
                return kept
        images = _decode(folder)
        _keep(images, store, place)
    return images


def load_array(path: Path) -> NDArray[Any]:
    """A ``.npy`` file, mapped into memory: processes share it, and only what is looked at is read.

    Raises:
        ValueError: It is missing, truncated, or holds no array of numbers; it names the file.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        # "c": what a tensor of it writes stays in this process. Unlike np.load it opens nothing but plain arrays.
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="c")
    except ValueError as error:
        raise ValueError(f"{path} is truncated, or no .npy file of numbers: {error}") from error
    return array


def image_size(path: str) -> tuple[int, int]:
    """Height and width, from the header.

    Raises:
        ValueError: No image, or none that can be opened.
    """
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} can't be read as an image: {error}") from error


def size_of(images: NDArray[np.uint8]) -> str:
    """Height and width of images ``(..., H, W, 3)``, for messages."""
    height, width = images.shape[-3:-1]
    return f"{height} x {width} pixels"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep this machine's other processes out of the block, where the file system can do that."""
    file: IO[str] | nullcontext[None] = nullcontext()
    with suppress(OSError):  # a read-only home: every process decodes for itself
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", encoding="utf-8")
    with file as opened:
        if opened is not None:
            with suppress(OSError):
                fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _keep(images: NDArray[np.uint8], store: Path, place: str) -> None:
    with suppress(OSError):  # a read-only home or a full disk: the images only take as long again the next time
        for old in store.parent.glob(f"{place}-*"):
            old.unlink()
        part = store.with_suffix(".part")
        with open(part, "wb") as file:
            np.save(file, images)
        os.replace(part, store)


def _decode(folder: ImageFolder) -> NDArray[np.uint8]:
    first = _decode_one(folder.path(0))
    if max(first.shape[:2]) > SIDE_LIMIT:
        raise ImageSizeError(f"{folder.path(0)} has {size_of(first)}, but a small image has at most {SIDE_LIMIT}")
    images = np.empty((len(folder), *first.shape), np.uint8)

    def put(sample: int) -> None:
        image = _decode_one(folder.path(sample))
        if image.shape != first.shape:
            raise ImageSizeError(
                f"images must be of one size: {folder.path(sample)} has {size_of(image)}, "
                f"{folder.path(0)} has {size_of(first)}"
            )
        images[sample] = image

    # Threads are enough: Pillow lets go of the interpreter while it decodes.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for _ in pool.map(put, range(len(folder))):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return images


def _decode_one(path: str) -> NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # whose conversion makes white of all that is above 255
                raise ValueError(f"its pixels have more than 8 bits (mode {image.mode} of Pillow)")
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError:
        raise ValueError(f"{path} is not an image") from None
    except Exception as error:  # Pillow raises whatever its plugins do: struct.error, SyntaxError, ValueError, ...
        raise ValueError(f"{path} can't be decoded: {error}") from error
