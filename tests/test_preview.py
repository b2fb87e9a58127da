"""The preview picture: its tiles are the method's images, its numbers the method's numbers."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont, ImageOps
from scipy.fft import dctn, idctn

import fastmoll.preview
from fastmoll.preview import write_preview


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A picture with a gradient, an edge and some texture."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:60, :80]
    pixels = np.stack([3 * x, 4 * y, 200 * (x > 40)], axis=2) + rng.integers(0, 15, (60, 80, 3))
    path = tmp_path / "photo.png"
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
    return path


@pytest.fixture
def parts(monkeypatch):
    """What is about to be laid out: the clean tile, the column headings, and the rows."""
    seen = {}
    compose = fastmoll.preview._compose

    def record(clean, headings, rows):
        seen.update(clean=clean, headings=headings, rows={name: (tiles, captions) for name, tiles, captions in rows})
        return compose(clean, headings, rows)

    monkeypatch.setattr(fastmoll.preview, "_compose", record)
    return seen


def plain(caption) -> str:
    return " ".join("".join("_" + part if sub else part for part, sub in caption).split())


def test_numbers_are_those_of_the_paper(photo, tmp_path, parts):
    t = [0.0, 0.25, 0.6, 1.0]
    write_preview(
        photo, tmp_path / "o.png", size=40, temperatures=t, sigma_min=0.5, sigma_max=32.0, k_noise=2.0, k_blur=3.0
    )
    assert parts["headings"] == ["0", "0.25", "0.6", "1"]
    noise = [(math.sin(math.pi * x / 2), math.sin(math.pi * x / 2) ** 4) for x in t]
    blur = [(0.5 * (32.0 / 0.5) ** x, x**3) for x in t]
    for name, sub, expected in (("noise", "t", noise), ("blur", "B", blur)):
        for caption, (sigma, gamma) in zip(parts["rows"][name][1], expected, strict=True):
            words = plain(caption).split()
            assert words[0] == f"σ_{sub}" and words[3] == "γ"
            assert float(words[2]) == pytest.approx(sigma, abs=0.0051 if sigma < 10 else 0.051)
            assert float(words[5]) == pytest.approx(gamma, abs=0.0051)


def test_blur_tiles_are_the_heat_equations_solution(photo, tmp_path, parts):
    size, t = 48, 0.4
    write_preview(photo, tmp_path / "o.png", size=size, temperatures=[t])
    clean = np.asarray(parts["clean"]).astype(np.float64)
    tau = (0.3 ** (1 - t) * size**t) ** 2 / 2
    frequency = np.arange(size) ** 2 * np.pi**2 / size**2
    decay = np.exp(-tau * (frequency[:, None] + frequency[None, :]))[..., None]
    # The blur commutes with the standardisation, so the pixels themselves may be blurred.
    expected = idctn(decay * dctn(clean, axes=(0, 1), norm="ortho"), axes=(0, 1), norm="ortho")
    tile = np.asarray(parts["rows"]["blur"][0][0]).astype(np.float64)
    assert np.abs(tile - expected).max() <= 0.51


def test_noise_fades_the_image_in_and_out(photo, tmp_path, parts):
    write_preview(photo, tmp_path / "o.png", size=64, temperatures=[0.0, 0.3, 1.0])
    clean = np.asarray(parts["clean"])
    start, some, end = (np.asarray(tile) for tile in parts["rows"]["noise"][0])
    assert np.array_equal(start, clean)
    correlation = [np.corrcoef(clean.ravel(), tile.ravel())[0, 1] for tile in (some, end)]
    assert 0.6 < correlation[0] < 0.99
    # At t = 1 only the channels' means, which noise has too, are left: no trace of the image within a channel.
    within = [np.corrcoef(clean[..., c].ravel(), end[..., c].ravel())[0, 1] for c in range(3)]
    assert np.abs(within).max() < 4.5 / 64


def test_the_seed_alone_decides_the_noise(photo, tmp_path):
    names = ["a.png", "b.png", "c.png"]
    for name, seed in zip(names, (1, 1, 2), strict=True):
        write_preview(photo, tmp_path / name, size=32, temperatures=[0.5], seed=seed)
    first, second, other = ((tmp_path / name).read_bytes() for name in names)
    assert first == second != other


def test_every_tile_is_on_the_canvas_and_none_covers_another(photo, tmp_path, parts):
    write_preview(photo, tmp_path / "o.png", size=80, temperatures=[0.1, 0.5])
    canvas = np.asarray(Image.open(tmp_path / "o.png"))
    tiles = [parts["clean"], *parts["rows"]["noise"][0], *parts["rows"]["blur"][0]]
    places = []
    for tile in (np.asarray(tile) for tile in tiles):
        windows = np.argwhere((canvas[: -79 or None, : -79 or None] == tile[0, 0]).all(axis=2))
        places.append([tuple(w) for w in windows if np.array_equal(canvas[w[0] : w[0] + 80, w[1] : w[1] + 80], tile)])
    assert all(len(place) == 1 for place in places)
    corners = [place[0] for place in places]
    assert all(max(abs(a[0] - b[0]), abs(a[1] - b[1])) >= 80 for a in corners for b in corners if a is not b)
    # Noise above blur, temperatures from left to right.
    assert corners[1][0] == corners[2][0] < corners[3][0] == corners[4][0]
    assert corners[1][1] == corners[3][1] < corners[2][1] == corners[4][1]


@pytest.mark.parametrize("size", [16, 40])
def test_the_names_of_rows_are_whole_beside_tiles_of_any_size(photo, tmp_path, size):
    write_preview(photo, tmp_path / "o.png", size=size, temperatures=[0.5])
    canvas = np.asarray(Image.open(tmp_path / "o.png").convert("L"))
    for name in ("noise", "blur"):
        text = Image.new("L", (100, 30), "white")
        fastmoll.preview._Pen(ImageDraw.Draw(text), 12).write([(name, False)], 50, 20)
        ink = np.asarray(text.crop(ImageOps.invert(text).getbbox()).rotate(90, expand=True)) < 128
        windows = np.lib.stride_tricks.sliding_window_view(canvas < 128, ink.shape)
        assert (windows == ink).all(axis=(2, 3)).any()


def test_captions_are_spelled_out_without_a_greek_font(monkeypatch):
    truetype = ImageFont.truetype

    def no_system_fonts(font, *arguments, **options):
        if isinstance(font, str):
            raise OSError("cannot open resource")
        return truetype(font, *arguments, **options)

    monkeypatch.setattr(ImageFont, "truetype", no_system_fonts)
    image = Image.new("RGB", (200, 40), "white")
    pen = fastmoll.preview._Pen(ImageDraw.Draw(image), 14)
    greek, spelled = [("σ", False), ("B", True), (" = 1", False)], [("sigma ", False), ("B", True), (" = 1", False)]
    assert pen.width(greek) == pen.width(spelled)
    pen.write(greek, 100, 25)
    other = Image.new("RGB", (200, 40), "white")
    fastmoll.preview._Pen(ImageDraw.Draw(other), 14).write(spelled, 100, 25)
    assert np.array_equal(np.asarray(image), np.asarray(other)) and np.asarray(image).min() < 100


@pytest.mark.parametrize("name", ["o.png", "o.jpg", "o.JPEG"])
def test_the_suffix_chooses_the_format(name, photo, tmp_path):
    write_preview(photo, tmp_path / name, size=32, temperatures=[0.5])
    with Image.open(tmp_path / name) as image:
        assert image.format == ("PNG" if name == "o.png" else "JPEG")


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_any_kind_of_image_will_do(mode, photo, tmp_path):
    path = tmp_path / f"x.{'tiff' if mode == 'CMYK' else 'png'}"
    Image.open(photo).convert(mode).save(path)
    write_preview(path, tmp_path / "o.png", size=32, temperatures=[0.5])
    assert (tmp_path / "o.png").is_file()


def test_deep_pixels_are_scaled_as_dali_scales_them(tmp_path, parts):
    ndd = pytest.importorskip("nvidia.dali.experimental.dynamic", reason="DALI is not installed")
    y, x = np.mgrid[:64, :64]
    deep = (64 * y + x) * 16 + 7
    Image.fromarray(deep.astype("<u2")).save(tmp_path / "little.png")
    Image.fromarray(deep.astype(">u2")).save(tmp_path / "big.tif")
    (tmp_path / "i.pgm").write_bytes(b"P5 64 64 65535\n" + deep.astype(">u2").tobytes())
    Image.fromarray((deep / 65535).astype(np.float32)).save(tmp_path / "float.tif")
    for name, mode in (("little.png", "I"), ("big.tif", "I;16B"), ("i.pgm", "I"), ("float.tif", "F")):
        with Image.open(tmp_path / name) as image:
            assert image.mode.startswith(mode)
        write_preview(tmp_path / name, tmp_path / "o.png", size=64, temperatures=[0.5])
        with ndd.EvalMode.sync_cpu:
            encoded = ndd.tensor(np.fromfile(tmp_path / name, np.uint8))
            expected = np.asarray(ndd.decoders.image(encoded, device="cpu"))
        assert np.array_equal(np.asarray(parts["clean"]), expected), name
        assert len(np.unique(expected)) > 250


def test_pixels_out_of_range_are_named(tmp_path):
    for dtype, values, message in (
        (np.float32, (0, 255), r"mode F must be in \[0, 1\], these are in \[0, 255\]"),
        (np.float32, (-0.5, 1), r"in \[-0.5, 1\]"),
        (np.float32, (0, math.nan), "nan"),
        (np.int32, (0, 65536), r"mode I must be in \[0, 65535\], these are in \[0, 65536\]"),
    ):
        pixels = np.zeros((20, 20), dtype)
        pixels[0, :2] = values
        Image.fromarray(pixels).save(tmp_path / "x.tif")
        with pytest.raises(ValueError, match=f"x.tif can't be read: .*{message}"):
            write_preview(tmp_path / "x.tif", tmp_path / "o.png")


def test_the_image_itself_is_never_the_output(photo, tmp_path):
    before = photo.read_bytes()
    (tmp_path / "soft.png").symlink_to(photo)
    (tmp_path / "hard.png").hardlink_to(photo)
    for output in (photo, tmp_path / "soft.png", tmp_path / "hard.png", tmp_path / "." / photo.name):
        with pytest.raises(ValueError, match=r"output: .* is the image itself"):
            write_preview(photo, output, size=32, temperatures=[0.5])
    assert photo.read_bytes() == before
    other = tmp_path / "other.png"
    other.write_bytes(before)
    write_preview(photo, other, size=32, temperatures=[0.5])  # an equal copy is not the image itself
    assert other.read_bytes() != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": []}, "temperatures must not be empty"),
        ({"temperatures": [0.5, 1.5]}, r"temperatures .* 1\.5"),
        ({"temperatures": [math.nan]}, "temperatures .* nan"),
        ({"sigma_min": 0.0}, "sigma_min"),
        ({"sigma_max": 0.1}, "sigma_max"),
        ({"k_noise": -1.0}, "k_noise"),
        ({"k_blur": math.inf}, "k_blur"),
        ({"seed": -1}, "seed"),
    ],
)
def test_arguments_out_of_range_are_named(options, message, photo, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_preview(photo, tmp_path / "o.png", size=16, **options)


@pytest.mark.parametrize("size", [15, 2049])
def test_sizes_out_of_range_are_named(size, photo, tmp_path):
    with pytest.raises(ValueError, match=f"size .* got {size}"):
        write_preview(photo, tmp_path / "o.png", size=size)


def test_bad_files_are_named(photo, tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "folder.png").mkdir()
    header = b"IHDR" + struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = photo.read_bytes()
    (tmp_path / "bomb.png").write_bytes(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])
    (tmp_path / "cut.png").write_bytes(photo.read_bytes()[:2000])
    good = tmp_path / "o.png"
    for image, output, message in (
        (tmp_path / "none.jpg", good, "none.jpg does not exist"),
        (tmp_path / "text.jpg", good, "text.jpg is not an image"),
        (tmp_path / "folder.png", good, "folder.png can't be read: Is a directory"),
        (tmp_path / "cut.png", good, "cut.png can't be read"),
        (tmp_path / "bomb.png", good, r"bomb.png can't be read: Image size \(400000000 pixels\)"),
        (photo, tmp_path / "nowhere/o.png", "output: folder .*nowhere does not exist"),
        (photo, tmp_path / "o.gif", r"output must end in one of \.png.*o\.gif"),
        (photo, tmp_path / "folder.png", "output: .*folder.png is a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            write_preview(image, output)
    assert not good.exists()
