"""Error, negative log-likelihood and calibration of a classifier, exact over a whole set and all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torchmetrics import Metric

from fastmoll.kernels.checks import FLOATING, INTEGER, check_integer, check_tensor, check_values
from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.pipelines.errors import some

__all__ = ["ClassificationMetrics", "calibration_error", "mean_corruption_error"]

ALEXNET: Final = {
    "gaussian_noise": 88.6428,
    "shot_noise": 89.4468,
    "impulse_noise": 92.2640,
    "defocus_blur": 81.9880,
    "glass_blur": 82.6268,
    "motion_blur": 78.5948,
    "zoom_blur": 79.8360,
    "snow": 86.6816,
    "frost": 82.6572,
    "fog": 81.9324,
    "brightness": 56.4592,
    "contrast": 85.3204,
    "elastic_transform": 64.6056,
    "pixelate": 71.7840,
    "jpeg_compression": 60.6500,
}
"""AlexNet's mean error over the severities of each corruption of ImageNet-C, %, as published with it."""

_BINS_UP_TO: Final = 10_000
_BATCH = 100
_COUNT, _CONFIDENCE, _CORRECT = range(3)


class ClassificationMetrics(Metric):
    """Top-1 error, NLL and calibration errors of everything seen.

    What is kept of a sample is its id, its confidence (the largest probability), whether it was classified rightly, and
    its NLL: 32 bytes. The figures are computed from all of them in the order of their ids, so that splitting the set
    into batches or over ranks, of any sizes, changes not a bit; ``compute()`` brings the ranks of ``torch.distributed``
    together when it is initialised. ``update`` reads nothing back from the device.

    Calibration errors are l1, ``Σ_b n_b/n |acc_b - conf_b|`` over bins b of the confidence:

    - ``ece``: bins of equal width, filled with *all* samples. They are ``(lo, hi]``; a confidence of 0 is in the first
      and of 1 in the last.
    - ``ece_adaptive``: bins of equal mass: the samples in the order of their confidence, cut into parts whose sizes
      differ by one at most. Samples of the same confidence share their hits evenly, so that their order doesn't matter.
    - ``ece_batch100``: the mean of ``ece`` over batches of 100 consecutive samples (the last one may be smaller),
      whatever batches they came in. That is what the paper reports, and mostly the floor of that estimator: a perfectly
      calibrated classifier with an error of 8 % reads 0.05. For comparisons with the paper only.

    A sample without probabilities, as NaN is among its logits, is classified wrongly, and all figures but the error are
    NaN then.

    Example:
        >>> metrics = ClassificationMetrics()
        >>> metrics.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        >>> float(metrics.compute()["error"])
        0.5
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    samples: list[Tensor]
    ids: list[Tensor]

    def __init__(self, bins: int = 15, *, sync_on_compute: bool = True) -> None:
        """Start without samples.

        Args:
            bins: Number of bins of all calibration errors, up to 10,000.
            sync_on_compute: Bring the ranks together in ``compute()``, to which all of them must come then.

        Raises:
            ValueError: ``bins`` is not an integer from 1 to 10,000.
        """
        super().__init__(sync_on_compute=sync_on_compute)
        self.num_bins = check_integer("bins", bins, 1, _BINS_UP_TO + 1)
        self._num_classes: int | None = None
        # One row a sample: confidence, 1 if right, NLL. Its id (-1: none given) apart: float64 would round large ones.
        self.add_state("samples", [], dist_reduce_fx="cat")
        self.add_state("ids", [], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor, index: Tensor | None = None) -> None:
        """Count a batch.

        Args:
            logits: ``(B, K)``, K the same in all batches; float16, bfloat16, float32 or float64; the softmax is
                computed in float32 (float64 for float64).
            labels: ``(B,)`` int64 class numbers, ``0 <= label < K``, on any device.
            index: ``(B,)`` integer sample ids of at least 0, on any device: the order of the samples. Without them it
                is that in which they come, rank after rank. They are given for all batches, or for none.

        Raises:
            ValueError: no tensors, wrong shapes or dtypes, another K than before; a label out of range or an id below 0
                (checked on the CPU only: on a GPU the look would wait for the device, and an out-of-range label stops
                the kernel instead).
        """
        check_tensor("logits", logits, (None, None), FLOATING, None)
        classes = self._num_classes if len(self.samples) else logits.shape[1]
        if logits.shape[1] != classes:
            got = tuple(logits.shape)
            raise ValueError(f"logits must have shape (B, {classes}) as in the batches before, got {got}")
        check_tensor("labels", labels, (len(logits),), (torch.int64,), None)
        if index is not None:
            check_tensor("index", index, (len(logits),), INTEGER, None)
            if index.device.type == "cpu":
                check_values("index", index, index >= 0, "be at least 0")
        if labels.device.type == "cpu":
            right = (labels >= 0) & (labels < logits.shape[1])
            check_values("labels", labels, right, f"lie in [0, {logits.shape[1]})")
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_probs = logits.detach().to(dtype).log_softmax(1)
        top, predicted = log_probs.max(1)
        # Copies to a GPU are done when its next kernel reads them; nothing waits for one from a GPU.
        waitless = logits.is_cuda
        labels = labels.to(logits.device, non_blocking=waitless)
        nll = -log_probs.gather(1, labels[:, None])[:, 0]
        # The place of a NaN's maximum is no prediction.
        columns = (top.exp(), (predicted == labels) & ~top.isnan(), nll)
        self._num_classes = logits.shape[1]
        self.samples.append(torch.stack([column.double() for column in columns], 1))
        if index is None:
            index = torch.full_like(labels, -1)
        self.ids.append(index.to(logits.device, torch.int64, non_blocking=waitless))

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Bring the ranks together, as every ``Metric`` does, those without a sample too."""
        if not self.samples:
            self.samples.append(torch.empty(0, 3, dtype=torch.float64, device=self.device))
            self.ids.append(torch.empty(0, dtype=torch.int64, device=self.device))
        super().sync(*args, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """The figures of everything seen, over all ranks.

        Returns:
            ``error`` (a fraction), ``nll`` (nats a sample), ``ece``, ``ece_adaptive``, ``ece_batch100`` (fractions) and
            ``count`` (samples), each a float64 scalar, and ``reliability``, float64 ``(bins, 3)``: for each bin of
            equal width its samples, the sum of their confidences, and how many were classified rightly. On the CPU.
            Without any sample the first five are NaN.

        Raises:
            ValueError: a sample id came twice, or only some batches had ids.
        """
        samples = torch.empty(0, 3, dtype=torch.float64, device="cpu")
        if len(self.samples):
            samples = _in_order(_joined(self.samples), _joined(self.ids))
        confidence, correct, nll = samples.T.contiguous()
        count = len(samples)
        if count == 0:
            nan = torch.tensor(torch.nan, dtype=torch.float64, device="cpu")
            errors = dict.fromkeys(("error", "nll", "ece", "ece_adaptive", "ece_batch100"), nan)
        else:
            errors = {
                "error": (1 - correct).mean(),  # 0.165 for 33 of 200, not what 1 - 0.835 rounds to
                "nll": nll.mean(),
                "ece": _gap(_bin_sums(confidence, correct, self.num_bins)),
                "ece_adaptive": _adaptive(confidence, correct, self.num_bins),
                "ece_batch100": _gap(_bin_sums(confidence, correct, self.num_bins, _BATCH)),
            }
        return {
            **errors,
            "count": torch.tensor(count, dtype=torch.float64, device="cpu"),
            "reliability": _bin_sums(confidence, correct, self.num_bins)[0],
        }


def calibration_error(logits: Tensor, labels: Tensor, bins: int = 15) -> Tensor:
    """Expected calibration error of a whole set: l1, over bins of equal width of the confidence.

    Args:
        logits: ``(N, K)``, floating point, as for `ClassificationMetrics.update`, whose ``ece`` this is.
        labels: ``(N,)`` int64 class numbers, likewise.
        bins: Number of bins, up to 10,000.

    Returns:
        A fraction, a float64 scalar on the CPU; NaN without any sample.

    Raises:
        ValueError: as `ClassificationMetrics`.
    """
    metrics = ClassificationMetrics(bins)
    metrics.update(logits, labels)
    confidence, correct, _ = _joined(metrics.samples).T.contiguous()
    return _gap(_bin_sums(confidence, correct, bins))


def mean_corruption_error(cells: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """mCE of ImageNet-C: each corruption's error over its severities, relative to AlexNet's; the mean of those, in %.

    Args:
        cells: For each corruption, its severities' figures, ``"error"`` among them.

    Raises:
        ValueError: A corruption is missing, or has no severities.
    """
    missing = [name for name in CORRUPTIONS if not cells.get(name)]
    if missing:
        raise ValueError(f"cells must have figures of every corruption, got none of {some(missing)}")
    ratios = [statistics.fmean(cell["error"] for cell in cells[name]) / ALEXNET[name] for name in CORRUPTIONS]
    return {"value": 100 * statistics.fmean(ratios), "baseline": "AlexNet"}


def _joined(parts: list[Tensor] | Tensor) -> Tensor:
    """A state on the CPU: a list of batches, or after a synchronisation one tensor."""
    return torch.cat([part.cpu() for part in parts]) if isinstance(parts, list) else parts.cpu()


def _in_order(samples: Tensor, ids: Tensor) -> Tensor:
    """The rows by their ids, or as they are where there are none."""
    known = ids >= 0
    if not known.any():
        return samples
    if not known.all():
        raise ValueError(
            f"index must be given for all batches or for none, and be at least 0, got it for {int(known.sum())} of "
            f"{len(ids)} samples"
        )
    ids, order = ids.sort(stable=True)
    again = ids[1:] == ids[:-1]
    if again.any():
        raise ValueError(f"index must have each sample once, but sample {int(ids[1:][again][0])} came twice")
    return samples[order]


def _bin_sums(confidence: Tensor, correct: Tensor, bins: int, batch: int | None = None) -> Tensor:
    """Samples, confidences and hits of each bin of each batch, float64 ``(batches, bins, 3)``."""
    inner_edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device="cpu")[1:-1]
    bin_of = torch.bucketize(confidence, inner_edges)  # right=False: edge[i-1] < value <= edge[i]
    batches = 1
    if batch is not None:
        batches = -(-len(confidence) // batch)
        bin_of += torch.arange(len(confidence), device="cpu") // batch * bins
    size = batches * bins
    columns = (None, confidence, correct)
    sums = [torch.bincount(bin_of, weights, minlength=size).double() for weights in columns]
    return torch.stack(sums, 1).view(batches, bins, 3)


def _gap(sums: Tensor) -> Tensor:
    """Calibration error from the sums of bins, the mean over batches: ``(batches, bins, 3)`` to a scalar."""
    # n_b/n |acc_b - conf_b| = |correct_b - confidence_b| / n: an empty bin adds 0 without a 0/0.
    gaps = (sums[..., _CORRECT] - sums[..., _CONFIDENCE]).abs().sum(1)
    return (gaps / sums[..., _COUNT].sum(1)).mean()


def _adaptive(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    values, place, counts = torch.unique(confidence, return_inverse=True, return_counts=True)
    rate = torch.bincount(place, correct, minlength=len(values)) / counts
    gaps = (rate - values)[place.sort().values]
    sums = torch.stack([part.sum() for part in gaps.tensor_split(bins)])
    return sums.abs().sum() / len(confidence)
