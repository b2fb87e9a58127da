"""Tests of fastmoll.metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_softmax
from torch.multiprocessing.spawn import spawn
from torchmetrics.classification import MulticlassCalibrationError

from fastmoll.metrics import ClassificationMetrics, calibration_error

Array = NDArray[np.generic]


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


def equal_width(confidence: Array, right: Array, bins: int = 15) -> float:
    ece = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            ece += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return ece


def by_definition(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    log_probs = log_softmax(logits.double().numpy(), axis=1)
    truth = labels.numpy()
    confidence, right = np.exp(log_probs.max(1)), log_probs.argmax(1) == truth
    nll = -log_probs[np.arange(len(truth)), truth].mean()
    parts = np.array_split(np.argsort(confidence, kind="stable"), 15)
    adaptive = [len(x) * abs(right[x].mean() - confidence[x].mean()) for x in parts if len(x)]
    batches = [slice(start, start + 100) for start in range(0, len(truth), 100)]
    return {
        "error": 1 - right.mean(),
        "nll": nll,
        "ece": equal_width(confidence, right),
        "ece_adaptive": sum(adaptive) / len(truth),
        "ece_batch100": float(np.mean([equal_width(confidence[x], right[x]) for x in batches])),
        "count": len(truth),
    }


def figures(metrics: ClassificationMetrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.compute().items() if name != "reliability"}


def logits_of(*confidences: float) -> torch.Tensor:
    """Logits of two classes, the first of which has these probabilities, exact to float64's rounding."""
    first = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([first, 1 - first], 1).log()


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
    metrics.update(logits_of(probability), torch.tensor([0]))
    assert metrics.compute()["reliability"][:, 0].nonzero().item() == expected_bin


def test_a_confidence_between_two_bins_is_in_the_lower_one() -> None:
    metrics = ClassificationMetrics(bins=4)
    metrics.update(torch.zeros(3, 2), torch.tensor([0, 1, 1]))  # a half exactly
    assert metrics.compute()["reliability"][:, 0].tolist() == [0, 3, 0, 0]


def test_the_papers_ece_is_the_plain_mean_over_batches_with_a_smaller_last_one() -> None:
    logits, labels = random_set(150, 3)
    metrics = ClassificationMetrics()
    metrics.update(logits, labels)
    parts = [float(calibration_error(logits[rows], labels[rows])) for rows in (slice(100), slice(100, 150))]
    assert parts[0] != pytest.approx(parts[1], rel=0.01)
    assert figures(metrics)["ece_batch100"] == pytest.approx(sum(parts) / 2, rel=1e-12)


def test_many_classes_fall_in_the_first_bin() -> None:
    metrics = ClassificationMetrics()
    metrics.update(torch.zeros(4, 1000), torch.arange(4))
    assert metrics.compute()["reliability"][0, 0] == 4
    assert figures(metrics)["nll"] == pytest.approx(np.log(1000), rel=1e-6)


def test_an_impossible_label_gives_infinite_nll_and_a_nan_logit_a_nan() -> None:
    metrics = ClassificationMetrics()
    metrics.update(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1]))
    assert figures(metrics)["nll"] == np.inf
    metrics.reset()
    metrics.update(torch.tensor([[0.0, torch.nan]]), torch.tensor([0]))
    assert np.isnan(figures(metrics)["nll"]) and figures(metrics)["count"] == 1


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_a_sample_without_probabilities_is_wrong_whatever_its_label(strange: float) -> None:
    metrics = ClassificationMetrics()
    logits = torch.tensor([[1.0, 0.0]] * 4)
    logits[:3, :1] = strange
    metrics.update(logits, torch.tensor([0, 1, 0, 0]))
    found = figures(metrics)
    assert found["error"] == 0.75
    assert all(np.isnan(found[name]) for name in ("nll", "ece", "ece_adaptive", "ece_batch100"))


def test_figures_of_a_small_set_are_those_computed_by_hand() -> None:
    # Bins of a fifteenth: 0.55 and 0.58 are in the ninth, 0.62 in the tenth, 0.95 and 1 in the last.
    metrics = ClassificationMetrics()
    metrics.update(logits_of(0.55, 0.95, 0.58, 1.0, 0.62), torch.tensor([0, 1, 0, 0, 1]))
    found = metrics.compute()
    assert float(found["error"]) == pytest.approx(2 / 5, abs=1e-15)
    assert float(found["nll"]) == pytest.approx(-np.log([0.55, 0.05, 0.58, 1.0, 0.38]).mean(), rel=1e-12)
    assert float(found["ece"]) == pytest.approx((abs(2 - 1.13) + abs(0 - 0.62) + abs(1 - 1.95)) / 5, rel=1e-12)
    # Fifteen bins for five samples: each has one of its own, or none.
    assert float(found["ece_adaptive"]) == pytest.approx((0.45 + 0.42 + 0.62 + 0.95 + 0) / 5, rel=1e-12)
    expected = torch.zeros(15, 3, dtype=torch.float64)
    expected[8], expected[9], expected[14] = torch.tensor([[2, 1.13, 2], [1, 0.62, 0], [2, 1.95, 1]])
    torch.testing.assert_close(found["reliability"], expected, rtol=0, atol=1e-7)


def test_the_error_is_the_nearest_number_to_its_fraction() -> None:
    logits, labels = torch.tensor([[1.0, 0.0]]).expand(200, 2), (torch.arange(200) < 33).long()
    metrics = ClassificationMetrics()
    metrics.update(logits, labels)
    assert float(metrics.compute()["error"]) == 33 / 200


def test_equal_confidences_share_their_hits_in_whatever_order_they_come() -> None:
    # Every bin of equal mass has one wrong in four then, against a confidence of 1: no order has another figure.
    labels = torch.tensor([0, 0, 0, 1]).repeat(15)
    logits = torch.tensor([[200.0, 0.0]]).expand(60, 2)
    for order in (torch.arange(60), labels.argsort(), labels.argsort(descending=True)):
        metrics = ClassificationMetrics()
        metrics.update(logits, labels[order])
        assert figures(metrics)["ece_adaptive"] == pytest.approx(0.25, abs=1e-12)
        assert figures(metrics)["ece"] == pytest.approx(0.25, abs=1e-12)


def test_the_papers_ece_reads_a_calibrated_classifier_as_0_05() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = (1 - 0.16 * torch.rand(20_000, generator=generator, dtype=torch.float64)).tolist()
    right = torch.rand(20_000, generator=generator, dtype=torch.float64) < torch.tensor(confidence).double()
    metrics = ClassificationMetrics()
    metrics.update(logits_of(*confidence), (~right).long())
    found = figures(metrics)
    assert found["error"] == pytest.approx(0.08, abs=0.006)
    assert found["ece"] < 0.008 < 0.03 < found["ece_batch100"] < 0.06


@pytest.mark.parametrize("bins", [1, 4, 40])
def test_calibration_error_is_torchmetrics_for_any_number_of_bins(bins: int) -> None:
    logits, labels = random_set(3000, 10)
    theirs = MulticlassCalibrationError(10, n_bins=bins, norm="l1")(logits, labels)
    ours = calibration_error(logits, labels, bins=bins)
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)
    metrics = ClassificationMetrics(bins)
    metrics.update(logits, labels)
    assert figures(metrics)["ece"] == float(ours) and metrics.compute()["reliability"].shape == (bins, 3)


def test_calibration_error_of_nothing_and_of_no_numbers_is_nan_and_of_one_bin_the_gap_of_the_means() -> None:
    assert calibration_error(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).isnan()
    assert calibration_error(torch.full((2, 3), torch.nan), torch.tensor([0, 1])).isnan()
    # Confidences of exactly 1, half of them wrong; in one bin with two of 0.5 of which one is right.
    logits, labels = torch.tensor([[200.0, 0.0]] * 2 + [[0.0, 0.0]] * 2), torch.tensor([0, 1, 0, 1])
    assert float(calibration_error(logits[:2], labels[:2])) == 0.5
    assert float(calibration_error(logits, labels, bins=1)) == 0.25


def test_half_precision_logits_saturate_at_1_and_are_counted() -> None:
    logits = torch.tensor([[60000.0, -60000.0], [1.0, 2.0]], dtype=torch.float16)
    error = calibration_error(logits, torch.tensor([0, 0]))
    second = 1 / (1 + np.exp(-1))
    assert float(error) == pytest.approx(second / 2, rel=1e-6)


def test_ids_put_samples_in_order_so_that_no_split_changes_a_bit() -> None:
    logits, labels = random_set(1234, 10)
    whole = ClassificationMetrics()
    whole.update(logits, labels, torch.arange(1234))
    shuffled = ClassificationMetrics()
    for rows in torch.randperm(1234, generator=torch.Generator().manual_seed(3)).split(77):
        shuffled.update(logits[rows], labels[rows], rows)
    assert figures(shuffled) == figures(whole)
    assert torch.equal(shuffled.compute()["reliability"], whole.compute()["reliability"])


def test_a_sample_that_comes_twice_or_without_its_id_is_named() -> None:
    logits, labels = random_set(10, 3)
    metrics = ClassificationMetrics()
    metrics.update(logits, labels, torch.arange(10))
    metrics.update(logits[:1], labels[:1], torch.tensor([7]))
    with pytest.raises(ValueError, match="sample 7 came twice"):
        metrics.compute()
    metrics.reset()
    metrics.update(logits, labels, torch.arange(10))
    metrics.update(logits, labels)
    with pytest.raises(
        ValueError, match=r"index must be given for all batches or for none, .* got it for 10 of 20 samples"
    ):
        metrics.compute()
    with pytest.raises(ValueError, match=r"index must be torch.int64 or .*, got torch.float32"):
        metrics.update(logits, labels, torch.arange(10.0))


def test_ids_that_float64_would_round_are_told_apart() -> None:
    logits, labels = random_set(300, 3)
    index = 2**53 + torch.arange(300)
    whole, shuffled = ClassificationMetrics(), ClassificationMetrics()
    whole.update(logits, labels, index)
    for rows in torch.randperm(300, generator=torch.Generator().manual_seed(3)).split(77):
        shuffled.update(logits[rows], labels[rows], index[rows])
    assert figures(shuffled) == figures(whole)
    whole.update(logits[:1], labels[:1], torch.tensor([2**63 - 1]))
    whole.update(logits[:1], labels[:1], torch.tensor([2**63 - 1]))
    with pytest.raises(ValueError, match=f"sample {2**63 - 1} came twice"):
        whole.compute()


def test_ids_below_0_and_those_that_do_not_fit_are_refused() -> None:
    logits, labels = random_set(2, 3)
    with pytest.raises(ValueError, match="index must be at least 0, got -1"):
        ClassificationMetrics().update(logits, labels, torch.tensor([-1, -1]))
    with pytest.raises(ValueError, match=r"index must be torch.int64 or .* got torch\.uint64"):
        ClassificationMetrics().update(logits, labels, torch.tensor([0, 2**64 - 1], dtype=torch.uint64))


def test_what_is_no_tensor_is_named() -> None:
    logits, labels = random_set(4, 3)
    with pytest.raises(ValueError, match=r"logits must be a torch\.Tensor, got ndarray"):
        calibration_error(logits.numpy(), labels.numpy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"labels must be a torch\.Tensor, got list"):
        calibration_error(logits, labels.tolist())
    with pytest.raises(ValueError, match=r"index must be a torch\.Tensor, got range"):
        ClassificationMetrics().update(logits, labels, range(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("bins", [0, 1.5, True, 10_001])
def test_a_number_of_bins_that_is_none_is_refused(bins: int) -> None:
    with pytest.raises(ValueError, match="bins"):
        ClassificationMetrics(bins)


def test_batches_of_another_number_of_classes_are_refused() -> None:
    metrics = ClassificationMetrics()
    metrics.update(*random_set(10, 3))
    with pytest.raises(ValueError, match=r"logits must have shape \(B, 3\) as in the batches before, got \(5, 4\)"):
        metrics.update(*random_set(5, 4))
    assert figures(metrics)["count"] == 10


def test_reset_forgets() -> None:
    metrics = ClassificationMetrics()
    metrics.update(*random_set(10, 5))
    metrics.reset()
    logits, labels = random_set(20, 3, seed=1)
    metrics.update(logits.double(), labels)
    assert figures(metrics) == pytest.approx(by_definition(logits, labels), rel=1e-12)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"logits.*\(3,\)"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "logits.*torch.int64"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), r"labels.*\(3\).*\(2,\)"),
        (torch.zeros(3, 2), torch.zeros(3), "labels.*torch.float32"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), r"labels must lie in \[0, 2\), got 2 at position 2"),
        (torch.zeros(3, 2), torch.tensor([0, 1, -100]), "got -100"),
    ],
)
def test_bad_input_is_named(logits: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    metrics = ClassificationMetrics()
    with pytest.raises(ValueError, match=message):
        metrics.update(logits, labels)
    assert figures(metrics)["count"] == 0


# Unequal shares, and a rank that has none.
SHARES = ((0, 70), (70, 70), (70, 301))


def _rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    logits, labels = random_set(301, 5)
    for ids in (False, True):
        metrics = ClassificationMetrics()
        for part in torch.arange(*SHARES[rank]).split(40):
            if len(part):
                metrics.update(logits[part], labels[part], part if ids else None)
        torch.save(metrics.compute(), f"{folder}/{rank}-{ids}.pt")
    torch.distributed.destroy_process_group()


def test_unequal_and_empty_ranks_report_the_bits_of_one_pass(tmp_path: Path) -> None:
    spawn(_rank, args=(str(tmp_path),), nprocs=3)  # type: ignore[no-untyped-call]
    logits, labels = random_set(301, 5)
    metrics = ClassificationMetrics()
    for share in SHARES:  # the same batches: the softmax of a row may depend on them in its last bits
        for part in torch.arange(*share).split(40):
            metrics.update(logits[part], labels[part])
    for rank in range(3):
        for ids in (False, True):
            merged = torch.load(tmp_path / f"{rank}-{ids}.pt")
            assert merged["count"] == 301
            for name, value in metrics.compute().items():
                assert torch.equal(merged[name], value), (rank, ids, name)
