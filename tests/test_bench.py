"""The benchmarks: peers do the same job as fastmoll, results are complete, nothing wrong is timed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import augment
import fused
import goals
import gpu_check
import harness
import loader
import peers
import sweep
import tune
from cuda_shim import check, make

import fastmoll
from fastmoll.kernels.batch_tail import batch_tail
from fastmoll.kernels.draw import BLUR, NOISE

RUN = Path(fused.__file__).with_name("run.py")
CPU = torch.device("cpu")


def small(**options: Any) -> fused.TailSettings:
    defaults: dict[str, Any] = {"batch_size": 6, "size": 32, "rounds": 2, "device": "cpu"}
    return fused.TailSettings(**{**defaults, **options})


def run(*arguments: str, code: int = 0) -> str:
    """Run the script as a user does; returns what it wrote."""
    command = [sys.executable, str(RUN), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_cosine_transform_by_fft_is_scipys_and_has_an_inverse(size: int) -> None:
    x = torch.randn(2, 3, 5, size, generator=torch.Generator().manual_seed(size))
    transform = peers.FourierDCT(size, CPU)
    expected = scipy.fft.dct(x.double().numpy(), axis=-1) / 2
    np.testing.assert_allclose(transform.cosines(x).numpy(), expected, atol=2e-6 * size)
    torch.testing.assert_close(transform.pixels(transform.cosines(x)), x, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("peer", [peers.DenseDCT, peers.FourierDCT, peers.ScipyDCT])
@pytest.mark.parametrize("size", [9, 16])
def test_peers_mollify_as_defined_and_leave_clean_images_alone(peer: Callable[..., Any], size: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(40, 3, size, size)
    role = torch.arange(40) % 3
    t = torch.linspace(0, 1, 40)
    out = peer(size, CPU)(images.clone(), role, t)
    torch.testing.assert_close(out[role == 0], images[role == 0], atol=0, rtol=0)
    blurred = fastmoll.heat_blur(images[role == BLUR].double(), t[role == BLUR])
    torch.testing.assert_close(out[role == BLUR].double(), blurred, atol=1e-5, rtol=0)
    level = (torch.pi / 2 * t[role == NOISE]).view(-1, 1, 1, 1)
    noise = (out[role == NOISE] - torch.cos(level) * images[role == NOISE]) / torch.sin(level)
    assert abs(float(noise.std()) - 1) < 0.05


def test_the_authors_labels_fade_with_the_images() -> None:
    torch.manual_seed(0)
    labels = torch.arange(600) % 10
    images, targets = peers.Authors(4, 10, CPU)(torch.zeros(600, 1, 4, 4), labels)
    torch.testing.assert_close(targets.sum(1), torch.ones(600))
    gamma = (1 - targets.gather(1, labels.view(-1, 1))) * 10 / 9
    clean, noised = gamma.flatten() < 1e-6, images.flatten(1).any(1)
    assert 150 < int(clean.sum()) < 250 and 150 < int(noised.sum()) < 250
    assert not (clean & noised).any()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("role", [None, 0, BLUR])
def test_plain_tail_is_the_batch_tail_without_its_noise(mixed: bool, role: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (5, 12, 12, 3), generator=generator, dtype=torch.uint8)
    options: dict[str, Any] = {"flip": torch.tensor([True, False, True, False, False])}
    if mixed:
        options |= {"partner": torch.tensor([1, 2, 3, 4, 0]), "lam": torch.rand(5, generator=generator)}
    if role is not None:
        options |= {"role": torch.full((5,), role, dtype=torch.int8), "t": torch.rand(5, generator=generator)}
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    plain = peers.PlainTail(12, mean, std, torch.float32, torch.float32, CPU)(pixels, **options)
    expected = batch_tail(pixels, mean=mean, std=std, **options, dtype=torch.float32, backend="torch")
    torch.testing.assert_close(plain, expected, atol=1e-5, rtol=0)
    assert plain.is_contiguous(memory_format=torch.channels_last)


def test_no_side_of_any_operation_is_further_off_than_rounding_and_cut_off_taps() -> None:
    tails = fused.Tails(small())
    for tail in fused.TAILS:
        sides = tails.sides(tail)
        assert sides[0].name == "fastmoll torch" and sides[-1].name == fused.COPY and len(sides) > 2
        for side in sides[:-1]:
            assert isinstance(side.apart, float) and side.apart < (1e-3 if "23" in side.name else 1e-5), side.name


def test_a_side_that_is_wrong_or_crashes_is_not_timed_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*arguments: Any, **options: Any) -> Tensor:
        return batch_tail(*arguments, **options) * 1.01

    def crash(*_: Any) -> Tensor:
        raise RuntimeError("no such kernel\nand a stack of it")

    monkeypatch.setattr(fused, "batch_tail", off)
    monkeypatch.setattr(fused, "FourierDCT", lambda *_: crash)
    tails = fused.Tails(small())
    names = [side.name for side in tails.sides("roles mixed")]
    assert names == ["dense DCT, masks, randn", "DCT by scipy.fft, masks, randn", fused.COPY]
    first, second = tails.failed.items()
    assert first[0] == "tail, roles mixed: fastmoll torch" and "off by 0.0" in first[1]
    assert second == ("tail, roles mixed: DCT by torch.fft, masks, randn", "RuntimeError: no such kernel")


def test_a_mixture_that_is_none_shows() -> None:
    tails = fused.Tails(small())
    x, partner = tails.prepared(), torch.arange(6).roll(1)
    assert tails._off_the_line(0.3 * x + 0.7 * x[partner], partner) < 1e-6
    assert tails._off_the_line(0.3 * x + 0.7 * x[partner.roll(1)], partner) > 0.1


def test_rows_hold_speed_ratios_to_the_copy_and_to_the_fastest_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["fastmoll a", "fastmoll b", "peer", fused.COPY]
    sides = [fused.Side("work", name, lambda: None, 6_000_000) for name in names]
    times = [{"median": ms, "min": ms, "max": ms} for ms in (4.0, 3.0, 12.0, 2.0)]
    monkeypatch.setattr(fused, "in_turns", lambda *_: times)
    rows = fused.timed(sides, harness.Clock(CPU), 1)
    assert [row["GB/s"] for row in rows] == [1.5, 2.0, 0.5, 3.0]
    assert [row["times the copy"] for row in rows] == [2.0, 1.5, 6.0, 1.0]
    assert [row["of the copy's speed"] for row in rows] == [0.5, 2 / 3, 1 / 6, 1.0]
    assert [row["times fastmoll"] for row in rows] == [4 / 3, 1.0, 4.0, 2 / 3]


def test_turns_are_taken_by_all_sides_and_the_first_are_not_counted() -> None:
    order: list[str] = []
    results = harness.in_turns([lambda: order.append("a"), lambda: order.append("b")], harness.Clock(CPU), 2)
    assert order == ["a", "b"] * 5
    assert all(0 < each["min"] <= each["median"] <= each["max"] for each in results)


def test_spread_and_table_show_median_and_extremes() -> None:
    spread = harness.spread([3.0, 1.0, 10.0, 2.0])
    assert spread == {"median": 2.5, "min": 1.0, "max": 10.0}
    assert harness.table([{"side": "a", "ms": spread}]).split("\n")[1].split() == ["a", "2.5", "(1-10)"]


def test_kernels_are_timed_and_written_where_asked(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--batch-size", "3", "--size", "16", "--rounds", "1", "--no-compile")
    output = run("kernels", *options, "--out", str(tmp_path))
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert {f"tail, {tail}" for tail in fused.TAILS} < {row["operation"] for row in result["rows"]}
    assert all(row["ms"]["median"] > 0 for row in result["rows"])
    assert f"written to {file}" in output
    # 16 pixels are too few for 23 taps.
    assert "left out: torchvision" in output and result["skipped"]
    assert result["environment"]["versions"]["torch"] == torch.__version__.partition("+")[0]


def test_a_sweep_has_every_point_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    settings = sweep.Settings(
        batch_size=2, size=16, rounds=1, device="cpu", batches=(1, 2, 4), sizes=(8, 16), backends=()
    )
    result = sweep.bench_sweep(settings)
    points = [(row["batch"], row["size"]) for row in result["rows"] if row["side"] == fused.COPY]
    assert points == [(1, 16), (2, 8), (2, 16), (4, 16)]
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({**result, "environment": {"processor": "a processor"}}))
    picture = sweep.plot(file)
    assert picture == tmp_path / "sweep.png" and 5_000 < picture.stat().st_size < 100_000


def test_only_a_sweep_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({"benchmark": "kernels"}))
    with pytest.raises(ValueError, match=r"result must be the JSON of a sweep, got .*kernels\.json"):
        sweep.plot(file)


def test_loaders_are_timed_with_and_without_mollification(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali")
    tree, out = make_tree(18), tmp_path / "out"
    options = ("--batch-size", "4", "--size", "16", "--rounds", "1", "--batches", "2", "--workers", "1")
    run("loader", str(tree), *options, "--out", str(out))
    rows = json.loads(next(out.iterdir()).read_text())["rows"]
    assert [row["job"] for row in rows] == ["crops"] * 2 + ["crops, mollified, soft labels"] * 2
    assert all(row["images/s"]["median"] > 0 and row["CPU ms/image"]["median"] >= 0 for row in rows)


@pytest.mark.usefixtures("one_thread")
def test_every_augmentation_is_timed_next_to_torchvisions(
    make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvidia.dali")
    policies = ("rand", "auto", "trivial", "augmix")
    assert augment.SMALL == ("fc", "fcr", *(f"fcr+{policy}" for policy in policies))
    assert augment.LARGE == tuple(f"none+{policy}" for policy in policies) and augment.DECODED == ("fc", "fcr")
    monkeypatch.setattr(augment, "SMALL", ("fc", "fcr+augmix"))
    monkeypatch.setattr(augment, "LARGE", ("none+trivial",))
    monkeypatch.setattr(augment, "_COMPARED", 90)
    settings = augment.Settings(sizes=(32, 136), batch_size=18, rounds=1, workers=1, batches=1, data=make_tree(18))
    result = augment.bench_augment(settings)
    jobs: dict[str, list[str]] = {}
    for row in result["rows"]:
        assert row["ms/image"]["median"] > 0 and row["times fastmoll's"] > 0
        jobs.setdefault(row["job"], []).append(row["side"])
    assert all(sides[0] == "fastmoll" and sides[1].startswith("torchvision") for sides in jobs.values())
    mixed = ", pixels to standardised batch and soft labels"
    assert [*jobs] == [
        *(f"{name}, 32 px, one thread" for name in ("fc", "fcr+augmix", f"mixup{mixed}", f"cutmix{mixed}")),
        *(f"{name}, 136 px, one thread" for name in ("none+trivial", f"mixup{mixed}", f"cutmix{mixed}")),
        *(f"{base}, JPEG to standardised batch, 136 px, CPU time" for base in ("fc", "fcr")),
        *(f"{name}, 32 px, loader, 1 CPUs" for name in ("fc", "fcr+augmix")),
    ]
    json.dumps(result)
    assert result["settings"]["data"] == "tree"


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixtures_that_are_not_torchvisions_are_not_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (6, 32, 32, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert [*augment._mixed(kind, images, 10)] == ["fastmoll", "torchvision"]
    monkeypatch.setattr("fastmoll.kernels.mix.partners", lambda values: values.roll(-1, 0))
    with pytest.raises(ValueError, match=rf"{kind} disagrees with torchvision's by \d"):
        augment._mixed(kind, images, 10)


def test_crops_that_only_one_side_rotates_are_not_timed(
    make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvidia.dali")
    monkeypatch.setattr(augment, "_COMPARED", 90)
    files = loader.Settings(data=make_tree(18), batch_size=9, size=64, workers=0)
    monkeypatch.setattr(augment, "ROTATION", 0)
    with pytest.raises(ValueError, match=r"fcr: grey levels of crops, of their corners: \["):
        augment._decoded("fcr", files)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", 0, r"batch_size must be at least 1, got 0"),
        ("size", -1, r"size must be at least 1, got -1"),
        ("rounds", 0, r"rounds must be at least 1, got 0"),
        ("device", "tpu", r"device must be 'cuda', 'cuda:<n>' or 'cpu', got 'tpu'"),
    ],
)
def test_settings_name_what_is_wrong(name: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**{name: value})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_card_that_is_not_there_is_said_in_one_line() -> None:
    assert run("kernels", "--device", "cuda", code=2).splitlines()[-1] == (
        "error: device must be 'cpu' where torch sees no CUDA device, got 'cuda'"
    )


def test_a_folder_that_cannot_be_is_said_before_the_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run("roofline", "--out", str(file / "results"), code=2).startswith("error: [Errno 20] Not a directory")


def test_help_makes_no_folder_and_is_plain_text(tmp_path: Path) -> None:
    assert "`" not in run("--help", "--out", str(tmp_path / "results"))
    assert not (tmp_path / "results").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_blocks_are_not_tuned_without_a_card() -> None:
    with pytest.raises(ValueError, match="device must be a CUDA device that torch sees, got 'cuda'"):
        tune.bench_tune(tune.Settings())


def spread(median: float) -> dict[str, float]:
    return {"median": median, "min": median, "max": median}


RESULTS: dict[str, Any] = {
    "kernels": {
        "settings": {"batch_size": 200},
        "rows": [
            {"operation": "tail, roles mixed", "side": "fastmoll triton", "times the copy": 1.6, "ms": spread(0.3)},
            {"operation": "tail, roles mixed", "side": "fastmoll cupy", "times the copy": 1.2, "ms": spread(0.2)},
            {"operation": "tail, blur alone", "side": "dense DCT, masks, randn", "times fastmoll": 20.0},
        ],
    },
    "loader": {
        "rows": [
            {"job": "crops, mollified, soft labels", "side": "fastmoll", "images/s": spread(9e3), "times less CPU": 4.0}
        ]
    },
    "train": {
        "rows": [
            {"batches": "resident", "images/s": spread(5000.0), "against resident": 1.0},
            {"batches": "real, mollified", "images/s": spread(4000.0), "against resident": 0.8},
            {"batches": "decoded by the CPU", "images/s": spread(4975.0), "against resident": 0.995},
            {"batches": "real, clean", "images/s": spread(5005.0), "against resident": 1.001},
        ]
    },
}


def test_goals_are_met_or_not_and_what_was_lost_is_said() -> None:
    rows = {row["goal"]: (row["measured"], row["met"]) for row in goals.compare(RESULTS)}
    assert rows == {
        "batch tail, roles mixed: times the copy": (1.2, "yes"),
        "batch tail, roles mixed: Triton alone": (1.6, "NO"),
        "batch tail, roles and MixUp: times the copy": ("nothing", "-"),
        "batch tail, roles and MixUp: Triton alone": ("nothing", "-"),
        "blur alone: times faster than the authors' way": (20.0, "yes"),
        "loader, mollified: images a second": (9e3, "NO"),
        "loader, mollified: times less CPU time": (4.0, "yes"),
        "training on real batches: against resident ones": (0.995, "yes"),
        "mollification: share of a training step": (pytest.approx(0.2 / 200 * 5000 / 1e3), "yes"),
    }
    assert {row["met"] for row in goals.compare({"kernels": {}, "train": {"rows": []}})} == {"-"}
    for name in ("kernels", "loader", "train"):
        stored = json.loads(Path(RUN.with_name("results"), f"{name}-NVIDIA-H200.json").read_text())
        found = [row for row in goals.compare({**RESULTS, name: stored}) if row["met"] != "-"]
        assert len(found) >= len([met for _, met in rows.values() if met != "-"]), name


def test_a_cpu_is_not_judged_by_a_cards_goals_nor_kept_beside_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(part: gpu_check.Part, log: Path, deadline: float) -> tuple[str, float]:
        log.touch()
        return "exit 0", 0.0

    monkeypatch.setattr(gpu_check, "run", end)
    monkeypatch.setattr(gpu_check, "compare", lambda found: goals.compare(RESULTS))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = {path: path.stat().st_mtime_ns for path in RUN.with_name("results").iterdir()}
    assert gpu_check.main(tmp_path, device="cpu") == 0
    assert {path: path.stat().st_mtime_ns for path in RUN.with_name("results").iterdir()} == kept
    (written,) = tmp_path.glob("gpu_check-*/gpu_check.json")
    rows = json.loads(written.read_text())["goals"]
    assert {row["met"] for row in rows} == {"-"} and {row["measured"] for row in rows} >= {1.2, 1.6}


@pytest.mark.parametrize(("width", "launch", "option"), [(64, "second", "STAGES"), (60, "down", "num_stages")])
def test_what_tuning_found_is_source_for_the_kernels(
    width: int, launch: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_tail_triton = pytest.importorskip("fastmoll.kernels.batch_tail_triton")
    monkeypatch.setattr(tune, "in_turns", lambda *_: [spread(2.0), spread(1.5)])
    tail = check(make((1, 3, 64, width)))
    present = batch_tail_triton.blocks_for(tail)
    best: Any = [
        (("cupy", "batch_tail", {"rows": 16, "warps": 28}), 1.0),
        (("cupy", "batch_tail", {"rows": 32, "warps": 21}), 1.1),
        (("triton", launch, {option: 5}), 1.8),
        (("triton", launch, {option: 3}), 1.9),
        (("triton", "", {}), 2.0),
        (("triton", dataclasses.fields(present)[0].name, {"num_warps": 1}), 2.1),
    ]
    cupy, triton = tune.entries(tail, best, harness.Clock(CPU), 1)
    assert cupy == "# CuPy, 64 pixels: 1.0000 ms\nrows=(16,), warps=28"
    heading, source = triton.split("\n")
    assert heading == "# Triton, 64 pixels: 1.5000 ms, 2.0000 with the present blocks"
    assert source.startswith("ByteBlocks(" if width == 64 else "Blocks(")
    blocks = eval(source, {name: getattr(batch_tail_triton, name) for name in ("Blocks", "ByteBlocks")})
    assert blocks == dataclasses.replace(present, **{launch: {**getattr(present, launch), option: 5}})


@pytest.mark.parametrize("width", [64, 60])
def test_candidates_are_blocks_of_the_kernels_that_an_image_has(width: int) -> None:
    batch_tail_triton = pytest.importorskip("fastmoll.kernels.batch_tail_triton")
    present = batch_tail_triton.blocks_for(check(make((1, 3, 64, width))))
    tried = [one for one in tune.candidates(by_bytes=width == 64) if one[0] == "triton"]
    assert {launch for _, launch, _ in tried} == {field.name for field in dataclasses.fields(present)}
    assert all(options.keys() <= getattr(present, launch).keys() for _, launch, options in tried)
    assert 20 < len(tried) <= 60
    if width == 64:
        # The first launch writes of a matrix what blocks of 64 rows and columns of the product read.
        assert all(options.get(name, 64) <= 64 for _, _, options in tried for name in ("ROWS", "BM", "BN"))
