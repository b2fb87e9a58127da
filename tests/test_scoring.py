"""Tests of fastmoll.scoring."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassCalibrationError

from fastmoll.metrics import ClassificationMetrics
from fastmoll.scoring import evaluate, image_dtype, score

pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


class Loader:
    """Batches of random images, with what the package's loaders know."""

    num_samples = 250
    classes = ("a", "b", "c")

    def __init__(self, batch: int = 60, rows: slice = slice(None), index: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(250, 3, 2, 2, generator=generator)
        self.labels = torch.randint(3, (250,), generator=generator)
        self.rows, self.batch, self.index = torch.arange(250)[rows], batch, index

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for part in self.rows.split(self.batch):
            if len(part):
                yield (self.images[part], self.labels[part], *([part] if self.index else []))


def test_figures_are_those_of_torch_and_torchmetrics_over_the_whole_set() -> None:
    model, loader = network(), Loader()
    found = evaluate(model, loader)
    with torch.no_grad():
        logits = model.eval()(loader.images)
    assert found["error"] == pytest.approx(100 * float((logits.argmax(1) != loader.labels).double().mean()), rel=1e-12)
    assert found["nll"] == pytest.approx(float(cross_entropy(logits.double(), loader.labels)), rel=1e-6)
    theirs = MulticlassCalibrationError(3, n_bins=15, norm="l1")
    assert found["ece"] == pytest.approx(float(theirs(logits, loader.labels)), abs=1e-6)
    batches = [float(theirs(logits[rows], loader.labels[rows])) for rows in torch.arange(250).split(100)]
    assert found["ece_batch100"] == pytest.approx(sum(batches) / 3, abs=1e-6)
    assert found["count"] == 250 == sum(row[0] for row in found["reliability"])
    assert sum(row[2] for row in found["reliability"]) == 250 - round(found["error"] * 2.5)


def test_neither_batches_nor_their_order_change_the_figures() -> None:
    one, other = evaluate(network(), Loader(250)), evaluate(network(), Loader(7))
    rows = one.pop("reliability"), other.pop("reliability")
    assert other == pytest.approx(one, rel=1e-6)
    torch.testing.assert_close(*map(torch.tensor, rows), rtol=1e-6, atol=0)
    loader = Loader(50)
    loader.rows = loader.rows.flip(0)
    assert evaluate(network(), loader)["ece_batch100"] == pytest.approx(one["ece_batch100"], rel=1e-6)


def test_each_module_gets_its_own_mode_back_even_after_an_error() -> None:
    model = network().train()
    model[2].eval()  # frozen
    evaluate(model, Loader())
    assert [module.training for module in model] == [True, True, False, True, True] and model.training
    bad = Loader()
    bad.labels[200] = 3
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), got 3"):
        evaluate(model, bad)
    assert [module.training for module in model] == [True, True, False, True, True] and model.training


def test_the_logits_are_scored_in_float32_where_the_network_is_in_bfloat16() -> None:
    seen: list[Tensor] = []
    model, loader = network(), Loader()
    found = evaluate(model, loader, precision="bf16")
    metrics = ClassificationMetrics()
    score(model, loader, metrics, precision="bf16", on_batch=lambda logits, labels, index: seen.append(logits))
    logits = torch.cat(seen)
    assert logits.dtype == torch.bfloat16
    assert found["nll"] == pytest.approx(float(cross_entropy(logits.double(), loader.labels)), rel=1e-6)
    assert found["nll"] != evaluate(model, loader)["nll"]
    assert image_dtype(torch.device("cpu"), "auto") == torch.float32
    assert image_dtype(torch.device("cuda"), "auto") == torch.bfloat16


def test_samples_that_are_missing_or_come_twice_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="evaluated 200 images of 250"):
        evaluate(network(), Loader(rows=slice(200)))
    twice = Loader()
    twice.rows = torch.cat([twice.rows[:-1], twice.rows[:1]])
    with pytest.raises(ValueError, match="sample 0 came twice"):
        evaluate(network(), twice)


class Twice(nn.Module):
    """Gives a tuple, as networks with auxiliary outputs do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_bad_arguments_are_named() -> None:
    more = Loader()
    more.classes = ("a", "b", "c", "d")  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"model must give logits of shape \(60, 4\), .* a class, got \(60, 3\)"):
        evaluate(network(), more)
    with pytest.raises(ValueError, match=r"precision must be one of .* got 'half'"):
        evaluate(network(), Loader(), precision="half")
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got a Loader"):
        evaluate(Loader(), network())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="as a tensor, got a tuple"):
        evaluate(nn.Sequential(network(), Twice()), Loader())
    with pytest.raises(ValueError, match="bins"):
        evaluate(network(), Loader(), bins=0)


IMAGES, LABELS = torch.zeros(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ({"image": IMAGES, "label": LABELS}, "got a dict with 'image', 'label': make it a tuple"),
        (IMAGES, "got a Tensor"),
        ((IMAGES,), r"got 1 part\(s\): Tensor"),
        ((IMAGES.numpy(), LABELS.numpy()), r"got 2 part\(s\): ndarray, ndarray"),
        ((IMAGES, [0, 0, 0, 0]), r"got 2 part\(s\): Tensor, list"),
        ((IMAGES, LABELS, ["a", "b", "c", "d"]), r"got 3 part\(s\): Tensor, Tensor, list"),
        ((IMAGES, LABELS, LABELS, LABELS), r"got 4 part\(s\): Tensor, Tensor, Tensor, Tensor"),
    ],
)
def test_batches_that_are_no_images_with_labels_are_refused_as_what_they_are(batch: Any, got: str) -> None:
    with pytest.raises(ValueError, match=r"^loader must give \(images, labels\) or .* as tensors, " + got):
        evaluate(network(), [batch])


def test_a_loader_without_images_is_refused() -> None:
    batches = iter([(IMAGES, LABELS)])
    assert evaluate(network(), batches)["count"] == 4
    for loader in (batches, []):
        with pytest.raises(ValueError, match="loader must give at least one image, got none"):
            evaluate(network(), loader)
    with pytest.raises(ValueError, match="loader must give batches in a for loop, got a NoneType"):
        evaluate(network(), None)  # type: ignore[arg-type]


class Half(nn.Module):
    """Gives logits of every other image."""

    def forward(self, x: Tensor) -> Tensor:
        return x[::2]


@pytest.mark.parametrize(("last", "got"), [(Half(), r"\(2, 3\)"), (nn.Unflatten(1, (3, 1)), r"\(4, 3, 1\)")])
def test_a_network_that_gives_no_row_an_image_is_refused(last: nn.Module, got: str) -> None:
    with pytest.raises(ValueError, match=r"model must give logits of shape \(4, K\), one row an image .* got " + got):
        evaluate(nn.Sequential(network(), last), [(IMAGES, LABELS)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_images_come_in_the_precision_of_the_network(dtype: torch.dtype) -> None:
    single = evaluate(network(), Loader())
    found = evaluate(network().to(dtype), Loader())
    assert found["nll"] == pytest.approx(single["nll"], rel=1e-2) and found["nll"] != single["nll"]
    # And those of a loader in another precision suit the network.
    assert evaluate(network(), [(IMAGES.to(dtype), LABELS)]) == evaluate(network(), [(IMAGES, LABELS)])


def test_a_network_without_parameters_gets_images_as_they_are() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = evaluate(nn.Identity(), [(logits, LABELS)])
    assert found["nll"] == pytest.approx(float(nn.functional.cross_entropy(logits, LABELS)), rel=1e-14)


def test_last_batches_of_one_and_two_classes_count_like_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    images, labels = torch.randn(5, 3, 2, 2), torch.tensor([0, 1, 1, 0, 1])
    parts = [(images[:4], labels[:4]), (images[4:], labels[4:])]
    found, whole = evaluate(model, parts), evaluate(model, [(images, labels)])
    assert found.pop("reliability") and whole.pop("reliability")
    assert found == pytest.approx(whole, rel=1e-6) and found["count"] == 5
    # A single class can't be missed.
    alone = evaluate(nn.Sequential(nn.Flatten(), nn.Linear(12, 1)), [(images, torch.zeros(5, dtype=torch.int64))])
    assert (alone["error"], alone["nll"], alone["ece"]) == (0, 0, 0)


SHARES = (slice(0, 190), slice(190, 190), slice(190, 250))


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    found: dict[str, Any] = evaluate(network(), Loader(50, SHARES[rank]))
    # DDP itself would wait for the ranks that have no more batches.
    wrapped = nn.parallel.DistributedDataParallel(network())
    assert evaluate(wrapped, Loader(50, SHARES[rank], index=False)) == found
    bad = Loader(50, SHARES[rank])
    bad.labels[200] = -1  # of the last rank
    try:
        evaluate(network(), bad)
    except (ValueError, RuntimeError) as error:
        found["error was"] = f"{type(error).__name__}: {error}"
    torch.save(found, f"{folder}/{rank}.pt")
    # What still holds the process group would keep its threads until the interpreter ends, which may abort it.
    del wrapped
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_all_ranks_report_the_whole_set_and_an_error_ends_all(tmp_path: Path) -> None:
    spawn(_rank, args=(str(tmp_path),), nprocs=3)  # type: ignore[no-untyped-call]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    errors = [one.pop("error was") for one in found]
    assert errors == [*["RuntimeError: the evaluation failed on another rank"] * 2, "ValueError: " + errors[2][12:]]
    assert "labels must lie in [0, 3), got -1" in errors[2]
    assert found[0] == found[1] == found[2]
    alone = evaluate(network(), Loader(50))
    for name in ("error", "nll", "ece", "ece_adaptive", "ece_batch100", "count"):
        assert found[0][name] == pytest.approx(alone[name], rel=1e-6), name
