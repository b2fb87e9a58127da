"""Which of these image files stops a run, which is merely worth knowing, and why, in words.

DALI's own CPU decoder decides what is *bad*, since it is what training uses. It sees one file at a time here, because
in a pipeline one bad file fails the whole batch, often without a name. What is in the file, and Pillow, only supply the
words, and the header-level oddities of files that decode.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

TINY = 16
"""Pixels: an image with a side below this is listed as odd."""

_FORMATS = (
    (b"\xff\xd8", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
)
_UNSUPPORTED = ((b"GIF8", "GIF"), (b"8BPS", "Photoshop"), (b"\0\0\1\0", "ICO"))
_NOT_IMAGES = (
    (b"<!doctype html", "HTML page"),
    (b"<html", "HTML page"),
    (b"<svg", "SVG drawing"),
    (b"<?xml", "XML text"),
    (b"version https://git-lfs", "Git LFS pointer (the file itself was never fetched)"),
    (b"%pdf", "PDF document"),
    (b"pk\3\4", "ZIP archive"),
    (b"\x1f\x8b", "gzip archive"),
    (b"{", "JSON text"),
)
_EXTENSIONS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "BMP": (".bmp", ".dib"),
    "TIFF": (".tif", ".tiff"),
    "WebP": (".webp",),
    "PNM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "JPEG 2000": (".jp2", ".j2k", ".jpc"),
}
_ORIENTATION = 0x0112
_BITS_PER_SAMPLE = 0x0102


@dataclass(frozen=True)
class Finding:
    """One file worth a line.

    Attributes:
        path: The file, as it was given.
        kind: ``"bad"``: training stops on it. ``"odd"``: it decodes, but not everything about it is as one expects.
        reason: ``"what: detail"``, several of them separated by ``"; "``; what stands before a colon is the same for
            every file with that fault.
    """

    path: str
    kind: Literal["bad", "odd"]
    reason: str


def diagnose_files(paths: Sequence[str | os.PathLike[str]]) -> list[Finding]:
    """Look at a few files, one after the other, in this process: what a loader does with a batch that failed.

    Args:
        paths: Image files.

    Returns:
        One finding for each file that is bad or odd, in the order of ``paths``.

    Raises:
        ImportError: DALI is not installed.
    """
    return [finding for path in paths if (finding := diagnose(path)) is not None]


def diagnose(path: str | os.PathLike[str], messages: Callable[[], str] = str) -> Finding | None:
    """Read and decode one file.

    Args:
        path: Image file.
        messages: Returns what the decoder wrote to standard error since the last call. The decoder reports data that it
            decoded in spite of corruption nowhere else; without this argument such files count as good.

    Returns:
        What is bad or odd about the file, ``None`` if nothing is.

    Raises:
        ImportError: DALI is not installed.
    """
    name = os.fspath(path)
    data, unreadable = _read(name)
    if unreadable:
        return Finding(name, "bad", unreadable)
    messages()  # whatever came before is about another file
    error = decode_error(data)
    said = _clean(messages())
    if error is not None:
        return Finding(name, "bad", _why_bad(name, data, said or error))
    oddities = _oddities(name, data)
    if said:
        oddities.append(f"corrupt but decoded: {said}")
    return Finding(name, "odd", "; ".join(oddities)) if oddities else None


def decode_error(data: bytes) -> str | None:
    """Decode an encoded image with DALI on the CPU, exactly as the validation pipeline would.

    Args:
        data: The file's bytes, at least one.

    Returns:
        The decoder's message if it fails, ``None`` if it decodes.

    Raises:
        ImportError: DALI is not installed.
    """
    # Here, not above: it takes two seconds, and a parent of worker processes never needs it.
    import nvidia.dali.experimental.dynamic as ndd

    try:
        # Any other mode returns before the image is decoded.
        with ndd.EvalMode.sync_cpu:
            ndd.decoders.image(ndd.tensor(np.frombuffer(data, np.uint8)), device="cpu", adjust_orientation=False)
    except Exception as error:  # DALI raises RuntimeError, but what its plugins raise must not end a search either
        lines = str(error).strip().splitlines()
        return lines[-1].strip() if lines else type(error).__name__
    return None


def _read(path: str) -> tuple[bytes, str | None]:
    """Contents of a file, or the reason why there are none."""
    try:
        mode = os.stat(path).st_mode
        # Opening a pipe or a device would wait for ever.
        if not stat.S_ISREG(mode):
            return b"", "folder, not a file" if stat.S_ISDIR(mode) else "not a regular file"
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return b"", f"broken link: points to {os.readlink(path)}" if os.path.islink(path) else "missing file"
    except PermissionError:
        return b"", "no permission to read it"
    except OSError as error:
        return b"", f"can't be read: {error.strerror or error}"
    return data, None if data else "empty file"


def _format(data: bytes) -> str | None:
    """Name of the image format the bytes begin with, of those DALI decodes."""
    for magic, name in _FORMATS:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    if data[:1] == b"P" and data[1:2] in b"123456" and data[2:3].isspace():
        return "PNM"
    return None


def _why_bad(path: str, data: bytes, error: str) -> str:
    name = _format(data)
    if name is not None:
        cut = _is_cut(name, data)
        if cut:
            return f"truncated {name}: ends after {len(data)} bytes{cut}"
        return f"damaged {name}: {_pillow_error(path) or error}"
    for magic, what in _UNSUPPORTED:
        if data.startswith(magic):
            return f"{what}: DALI doesn't decode this format"
    if data[4:8] == b"ftyp":
        return f"{data[8:12].decode('latin-1').strip().upper()} (HEIF family): DALI doesn't decode this format"
    start = data[:512].lstrip().lower()
    for magic, what in _NOT_IMAGES:
        if start.startswith(magic):
            return f"{what}, not an image"
    if not any(data):
        return f"nothing but zeros: {len(data)} bytes"
    return f"not an image: first bytes {data[:8].hex(' ')}"


def _is_cut(name: str, data: bytes) -> str | None:
    """A phrase if the file ends before its format says it may (possibly the empty phrase), else ``None``."""
    match name:
        case "JPEG":
            # Some writers pad with zeros or newlines, so the marker need not be the very end.
            return None if b"\xff\xd9" in data[-64:] else ", without an end-of-image marker"
        case "PNG":
            return None if b"IEND" in data[-64:] else ", without an end chunk"
        case "BMP":
            return _short_of(data, int.from_bytes(data[2:6], "little"))
        case "WebP":
            return _short_of(data, int.from_bytes(data[4:8], "little") + 8)
    return None


def _short_of(data: bytes, size: int) -> str | None:
    return f" of {size}" if len(data) < size else None


def _pillow_error(path: str) -> str | None:
    """Pillow's account of a damaged file, which usually says more than an error number."""
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")
            image.load()
    except UnidentifiedImageError:
        return "the header makes no sense"
    except Exception as error:  # Pillow raises whatever its plugins do: struct.error, SyntaxError, ValueError, ...
        return str(error) or type(error).__name__
    return None


def _oddities(path: str, data: bytes) -> list[str]:
    """What is unusual about a file that decodes, from its header alone."""
    found = []
    name = _format(data)
    extension = os.path.splitext(path)[1].lower()
    if name is not None and any(extension in known for known in _EXTENSIONS.values()):
        if extension not in _EXTENSIONS[name]:
            found.append(f"{name} file named {extension}")
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("ignore")
            found += _header_oddities(image, data, name)
    except Exception as error:  # as in _pillow_error; DALI has decoded it, so this is no reason to call it bad
        found.append(f"Pillow can't read it: {error or type(error).__name__}")
    return found


def _header_oddities(image: Image.Image, data: bytes, name: str | None) -> list[str]:
    found = []
    if image.mode in ("CMYK", "YCCK"):
        found.append("CMYK colours")
    # Pillow's PNG reader shows 16-bit colour as plain RGB: the depth is byte 24 of the file, and a tag in TIFF.
    bits = image.getexif().get(_BITS_PER_SAMPLE) if name == "TIFF" else None
    depth = data[24] if name == "PNG" else max(bits) if isinstance(bits, tuple) else bits or 8
    if depth > 8 or image.mode[0] in "IF":
        found.append("more than 8 bits a channel (scaled to 8)")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        found.append("alpha channel (dropped)")
    elif image.mode == "P":
        found.append("palette")
    # Pillow decodes a whole PNG to look for an EXIF chunk behind the pixels; one in front has been read already.
    if name != "PNG" or "exif" in image.info:
        orientation = image.getexif().get(_ORIENTATION, 1)
        if orientation in range(2, 9):  # others mean nothing; 0 is common
            found.append(f"EXIF orientation (ignored by default): {orientation}")
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        found.append(f"several frames (the first is used): {frames}")
    if min(image.size) < TINY:
        found.append(f"tiny: {image.width}×{image.height} pixels")
    return found


def _clean(text: str) -> str:
    """Decoder messages as one line: no colours, no repeats, nothing about colour profiles, which are not used."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    return ", ".join(dict.fromkeys(line.strip() for line in lines if line.strip() and "iCCP" not in line))
