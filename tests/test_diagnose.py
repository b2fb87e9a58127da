"""Which files DALI refuses, which it takes, and what is said about each."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastmoll.pipelines.diagnose import Finding, decode_error, diagnose, diagnose_files


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    """Smooth shapes and some texture: enough entropy that a cut file is cut in the middle of its data."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:90, :120]
    base = np.stack([x * 2, y * 2, (x + y) % 255], axis=2) + rng.integers(0, 30, (90, 120, 3))
    return Image.fromarray(base.clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def jpeg(picture: Image.Image) -> bytes:
    return encoded(picture, "JPEG", quality=90)


@pytest.fixture(scope="module")
def look(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Write bytes to a file and diagnose it."""
    folder = tmp_path_factory.mktemp("files")

    def look(name: str, data: bytes) -> Finding | None:
        (folder / name).write_bytes(data)
        return diagnose(folder / name)

    return look


GOOD = {
    "rgb.jpg": ("JPEG", "RGB", {}),
    "grey.JPEG": ("JPEG", "L", {}),
    "progressive.jpeg": ("JPEG", "RGB", {"progressive": True}),
    "rgb.png": ("PNG", "RGB", {}),
    "grey.png": ("PNG", "L", {}),
    "rgb.tiff": ("TIFF", "RGB", {}),
    "rgb.bmp": ("BMP", "RGB", {}),
    "rgb.webp": ("WEBP", "RGB", {}),
    "rgb.ppm": ("PPM", "RGB", {}),
}


@pytest.mark.parametrize("name", GOOD)
def test_ordinary_files_have_no_finding(name, picture, look):
    kind, mode, options = GOOD[name]
    assert look(name, encoded(picture.convert(mode), kind, **options)) is None


BAD_BYTES = {
    "empty file": b"",
    "HTML page, not an image": b"\n <!DOCTYPE html><html><body>404</body></html>",
    "XML text, not an image": b'<?xml version="1.0"?><Error>AccessDenied</Error>',
    "JSON text, not an image": b'{"error": "not found"}',
    "PDF document, not an image": b"%PDF-1.7 ...",
    "ZIP archive, not an image": b"PK\x03\x04" + bytes(30),
    "Git LFS pointer (the file itself was never fetched), not an image": b"version https://git-lfs.github.com/spec/v1\n",
    "nothing but zeros: 512 bytes": bytes(512),
    "not an image: first bytes 01 02 03 04 05 06 07 08": bytes(range(1, 200)),
    "truncated JPEG: ends after 2 bytes, without an end-of-image marker": b"\xff\xd8",
    "AVIF (HEIF family): DALI doesn't decode this format": b"\0\0\0\x20ftypavif" + bytes(60),
}


@pytest.mark.parametrize("reason", BAD_BYTES)
def test_what_is_no_image_is_bad_and_named(reason, look):
    finding = look("x.jpg", BAD_BYTES[reason])
    assert finding is not None and (finding.kind, finding.reason) == ("bad", reason)


def test_random_bytes_are_bad(look):
    finding = look("x.jpg", np.random.default_rng(1).bytes(5000))
    assert finding is not None and finding.kind == "bad"


def test_gif_is_bad_whatever_its_name(picture, look):
    finding = look("x.jpg", encoded(picture, "GIF"))
    assert finding is not None and (finding.kind, finding.reason) == ("bad", "GIF: DALI doesn't decode this format")


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("keep", [100, 0.5, -100, -2])
def test_a_jpeg_cut_anywhere_is_bad_with_its_length(keep, progressive, picture, look):
    data = encoded(picture, "JPEG", quality=90, progressive=progressive)
    data = data[: int(keep * len(data)) if isinstance(keep, float) else keep]
    finding = look("x.jpg", data)
    assert finding is not None and finding.kind == "bad"
    assert finding.reason == f"truncated JPEG: ends after {len(data)} bytes, without an end-of-image marker"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("PNG", "truncated PNG: ends after {half} bytes, without an end chunk"),
        ("BMP", "truncated BMP: ends after {half} bytes of {size}"),
        ("WEBP", "truncated WebP: ends after {half} bytes of {size}"),
        ("TIFF", "damaged TIFF: "),
    ],
)
def test_other_formats_cut_in_half_are_bad(kind, reason, picture, look):
    data = encoded(picture, kind)
    half = len(data) // 2
    finding = look(f"x.{kind.lower()}", data[:half])
    assert finding is not None and finding.kind == "bad"
    assert finding.reason.startswith(reason.format(half=half, size=len(data)))


def test_a_damaged_png_is_bad_with_more_than_an_error_number(picture, look):
    data = bytearray(encoded(picture, "PNG"))
    data[len(data) // 2] ^= 0xFF
    finding = look("x.png", bytes(data))
    assert finding is not None and finding.kind == "bad"
    what, _, detail = finding.reason.partition(": ")
    assert what == "damaged PNG" and len(detail) > 10 and "#" not in detail


def test_what_cannot_be_opened_is_bad_and_never_waited_for(tmp_path):
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "link.jpg").symlink_to("gone.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    names = ["missing.jpg", "folder.jpg", "link.jpg", "pipe.jpg"]
    found = diagnose_files([tmp_path / name for name in names])
    assert [Path(f.path).name for f in found] == names
    assert {f.kind for f in found} == {"bad"}
    assert [f.reason for f in found] == [
        "missing file",
        "folder, not a file",
        "broken link: points to gone.jpg",
        "not a regular file",
    ]


def test_a_file_without_permission_is_bad(tmp_path, jpeg, monkeypatch):
    def refuse(*_: object) -> None:  # the mode bits alone would not stop root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fastmoll.pipelines.diagnose.open", refuse, raising=False)
    (tmp_path / "x.jpg").write_bytes(jpeg)
    assert diagnose_files([tmp_path / "x.jpg"]) == [Finding(str(tmp_path / "x.jpg"), "bad", "no permission to read it")]


def test_a_link_to_a_good_file_is_good(tmp_path, jpeg):
    (tmp_path / "x.jpg").write_bytes(jpeg)
    (tmp_path / "link.jpg").symlink_to("x.jpg")
    assert diagnose(tmp_path / "link.jpg") is None


def odd_files(picture: Image.Image) -> dict[str, tuple[str, bytes]]:
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = np.asarray(picture.convert("L")).astype(np.uint16) * 257
    two = {"save_all": True, "append_images": [picture]}
    return {
        "PNG file named .jpeg": ("x.JPEG", encoded(picture, "PNG")),
        "JPEG file named .png": ("x.png", encoded(picture, "JPEG")),
        "CMYK colours": ("cmyk.jpg", encoded(picture.convert("CMYK"), "JPEG")),
        "EXIF orientation (ignored by default): 6": ("exif.jpg", encoded(picture, "JPEG", exif=exif)),
        "more than 8 bits a channel (scaled to 8)": ("deep.png", encoded(Image.fromarray(wide), "PNG")),
        "alpha channel (dropped)": ("alpha.png", encoded(picture.convert("RGBA"), "PNG")),
        "palette": ("palette.png", encoded(picture.quantize(16), "PNG")),
        "several frames (the first is used): 2": ("pages.tiff", encoded(picture, "TIFF", **two)),
        "tiny: 8×90 pixels": ("tiny.jpg", encoded(picture.crop((0, 0, 8, 90)), "JPEG")),
    }


@pytest.mark.parametrize("index", range(9))
def test_odd_files_decode_and_are_described(index, picture, look):
    reason, (name, data) = list(odd_files(picture).items())[index]
    finding = look(name, data)
    assert finding is not None and (finding.kind, finding.reason) == ("odd", reason)


def test_sixteen_bit_colour_is_noticed_though_pillow_hides_it(look):
    # An RGB PNG of 16 bits, written by hand: Pillow neither writes these nor tells them from 8 bits.
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = b"".join(b"\0" + bytes(20 * 6) for _ in range(20))
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 20, 20, 16, 2, 0, 0, 0))
    finding = look("deep.png", data + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))
    assert finding is not None and (finding.kind, finding.reason) == ("odd", "more than 8 bits a channel (scaled to 8)")


def test_several_oddities_are_all_named(picture, look):
    finding = look("x.jpg", encoded(picture.convert("RGBA").crop((0, 0, 4, 90)), "PNG"))
    assert finding is not None and finding.kind == "odd"
    assert finding.reason == "PNG file named .jpg; alpha channel (dropped); tiny: 4×90 pixels"


def test_the_decoders_messages_about_a_file_make_it_odd(tmp_path, jpeg):
    (tmp_path / "x.jpg").write_bytes(jpeg)
    text = "\x1b[0;31mCorrupt data\x1b[0m\nCorrupt data\nlibpng warning: iCCP: bad profile\n"
    said = iter(["about the file before", text])
    finding = diagnose(tmp_path / "x.jpg", lambda: next(said))
    assert finding == Finding(str(tmp_path / "x.jpg"), "odd", "corrupt but decoded: Corrupt data")


def test_bytes_overwritten_in_the_middle_still_decode(jpeg):
    data = bytearray(jpeg)
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    assert decode_error(bytes(data)) is None


def test_decoding_is_finished_when_the_verdict_is_given(jpeg):
    # In a mode that only starts the work, damage beyond the header would go unnoticed.
    assert decode_error(jpeg) is None
    assert decode_error(jpeg[:-100]) is not None


def test_a_bad_file_does_not_spoil_the_next_one(tmp_path, jpeg):
    paths = []
    for number in range(20):
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(jpeg[: len(jpeg) // 2] if number % 3 == 0 else jpeg)
        paths.append(path)
    assert [f.path for f in diagnose_files(paths)] == [str(p) for p in paths[::3]]


def test_importing_it_does_not_load_dali():
    code = "import sys, fastmoll.pipelines.diagnose; sys.exit('nvidia.dali' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
