"""Tests of fastmoll.metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch.multiprocessing.spawn import spawn
from torchmetrics.classification import MulticlassCalibrationError

from fastmoll.metrics import ClassificationMetrics


def random_set(samples: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, classes, generator=generator)
    # Labels agree with the logits about half the time, so that every bin holds right and wrong samples.
    labels = torch.where(
        torch.rand(samples, generator=generator) < 0.5,
        logits.argmax(1),
        torch.randint(classes, (samples,), generator=generator),
    )
    return logits, labels


def by_definition(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    log_probs = log_softmax(logits.double().numpy(), axis=1)
    truth = labels.numpy()
    confidence, right = np.exp(log_probs.max(1)), log_probs.argmax(1) == truth
    ece = 0.0
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        if inside.any():
            ece += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    nll = -log_probs[np.arange(len(truth)), truth].mean()
    return {"error": 1 - right.mean(), "nll": nll, "ece": ece, "count": len(truth)}


def figures(metrics: ClassificationMetrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.compute().items()}


@pytest.mark.parametrize(("samples", "classes"), [(1, 2), (1000, 3), (2000, 50)])
def test_float64_logits_equal_the_definition(samples: int, classes: int) -> None:
    logits, labels = random_set(samples, classes)
    metrics = ClassificationMetrics()
    metrics.update(logits.double(), labels)
    assert figures(metrics) == pytest.approx(by_definition(logits, labels), rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_logits_are_scored_in_float32(dtype: torch.dtype) -> None:
    logits, labels = random_set(1000, 10)
    metrics = ClassificationMetrics()
    metrics.update(logits.to(dtype), labels)
    assert figures(metrics) == pytest.approx(by_definition(logits.to(dtype), labels), rel=1e-6, abs=1e-7)


def test_ece_equals_torchmetrics() -> None:
    logits, labels = random_set(3000, 10)
    metrics = ClassificationMetrics()
    metrics.update(logits, labels)
    theirs = MulticlassCalibrationError(10, n_bins=15, norm="l1")(logits, labels)
    assert figures(metrics)["ece"] == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize("sizes", [(999, 1), (7, 0, 500, 493)])
def test_batches_add_up_to_one_pass(sizes: tuple[int, ...]) -> None:
    logits, labels = random_set(1000, 10)
    whole, parts = ClassificationMetrics(), ClassificationMetrics()
    whole.update(logits, labels)
    for x, y in zip(torch.split(logits, list(sizes)), torch.split(labels, list(sizes)), strict=True):
        parts.update(x, y)
    assert figures(parts) == pytest.approx(figures(whole), rel=1e-6)
    assert figures(parts)["count"] == 1000


@pytest.mark.parametrize(
    ("probability", "expected_bin"),
    [(8 / 15 - 1e-12, 7), (8 / 15 + 1e-12, 8), (2 / 3 - 1e-12, 9), (2 / 3 + 1e-12, 10), (1.0, 14)],
)
def test_bins_meet_at_multiples_of_a_fifteenth(probability: float, expected_bin: int) -> None:
    metrics = ClassificationMetrics()
    metrics.update(torch.tensor([[probability, 1 - probability]], dtype=torch.float64).log(), torch.tensor([0]))
    assert metrics.bins[:, 0].nonzero().item() == expected_bin


def test_many_classes_fall_in_the_first_bin() -> None:
    metrics = ClassificationMetrics()
    metrics.update(torch.zeros(4, 1000), torch.arange(4))
    assert metrics.bins[0, 0] == 4
    assert figures(metrics)["nll"] == pytest.approx(np.log(1000), rel=1e-6)


def test_an_impossible_label_gives_infinite_nll_and_a_nan_logit_a_nan() -> None:
    metrics = ClassificationMetrics()
    metrics.update(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1]))
    assert figures(metrics)["nll"] == np.inf
    metrics.reset()
    metrics.update(torch.tensor([[0.0, torch.nan]]), torch.tensor([0]))
    assert np.isnan(figures(metrics)["nll"]) and figures(metrics)["count"] == 1


def test_reset_forgets() -> None:
    metrics = ClassificationMetrics()
    metrics.update(*random_set(10, 3))
    metrics.reset()
    logits, labels = random_set(20, 3, seed=1)
    metrics.update(logits.double(), labels)
    assert figures(metrics) == pytest.approx(by_definition(logits, labels), rel=1e-12)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"logits.*\(3,\)"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "logits.*torch.int64"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), r"labels.*\(3,\).*\(2,\)"),
        (torch.zeros(3, 2), torch.zeros(3), "labels.*torch.float32"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), r"labels must be in 0\.\.1, got 2"),
        (torch.zeros(3, 2), torch.tensor([0, 1, -100]), "got -100"),
    ],
)
def test_bad_input_is_named(logits: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    metrics = ClassificationMetrics()
    with pytest.raises(ValueError, match=message):
        metrics.update(logits, labels)
    assert metrics.bins.sum() == 0


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    logits, labels = random_set(101, 5)
    shard = slice(0, 70) if rank == 0 else slice(70, 101)  # unequal on purpose
    metrics = ClassificationMetrics()
    metrics.update(logits[shard], labels[shard])
    torch.save(figures(metrics), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_unequal_ranks_report_the_figures_of_one_pass(tmp_path: Path) -> None:
    spawn(_rank, args=(str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]
    metrics = ClassificationMetrics()
    metrics.update(*random_set(101, 5))
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(figures(metrics), rel=1e-6)
