"""Error, negative log-likelihood and calibration of a classifier, exact over a whole set and all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["ClassificationMetrics"]

_BINS = 15
_COUNT, _CONFIDENCE, _CORRECT = range(3)


class ClassificationMetrics(Metric):
    """Top-1 error, NLL and expected calibration error (ECE), from sums over everything seen.

    The states are float64 sums, so splitting the set into batches or over ranks changes nothing but the
    last bits; ``compute()`` adds up the ranks of ``torch.distributed`` when it is initialised. ``update``
    reads nothing back from the device.

    ECE is the l1 calibration error over 15 bins of equal width: ``Σ_b n_b/n |acc_b - conf_b|``, with the
    counts of *all* samples (the mean of per-batch ECEs is another, biased number). Bins are ``(lo, hi]``; a
    confidence of 0 is in the first and of 1 in the last.

    Example:
        >>> metrics = ClassificationMetrics()
        >>> metrics.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        >>> float(metrics.compute()["error"])
        0.5
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    bins: Tensor
    nll: Tensor

    def __init__(self) -> None:
        super().__init__()
        # One row a bin: samples, sum of confidences, samples classified rightly.
        self.add_state("bins", torch.zeros(_BINS, 3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("nll", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            logits: ``(B, K)``, any floating dtype; the softmax is computed in float32 (float64 for float64).
            labels: ``(B,)`` int64 class numbers, ``0 <= label < K``, on the device of ``logits``.

        Raises:
            ValueError: wrong shapes or dtypes; a label out of range (checked on the CPU only: on a GPU the
                look would wait for the device, and an out-of-range label stops the kernel instead).
        """
        if logits.ndim != 2 or not logits.is_floating_point():
            raise ValueError(f"logits must be floating point of shape (B, K), got {logits.dtype} {tuple(logits.shape)}")
        if labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64 of shape ({logits.shape[0]},), got {labels.dtype} {tuple(labels.shape)}"
            )
        if labels.device.type == "cpu" and len(labels):
            low, high = labels.aminmax()
            if low < 0 or high >= logits.shape[1]:
                wrong = int(low) if low < 0 else int(high)
                raise ValueError(f"labels must be in 0..{logits.shape[1] - 1}, got {wrong}")
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_probs = logits.detach().to(dtype).log_softmax(1)
        top, predicted = log_probs.max(1)
        confidence = top.exp().double()
        inner_edges = torch.linspace(0, 1, _BINS + 1, dtype=torch.float64, device=logits.device)[1:-1]
        bin_of = torch.bucketize(confidence, inner_edges)  # right=False: edge[i-1] < value <= edge[i]
        columns = torch.stack([torch.ones_like(confidence), confidence, (predicted == labels).double()], dim=1)
        # A product with the one-hot bins, not a scatter-add: the same sum every time on a GPU too.
        one_hot = (bin_of[:, None] == torch.arange(_BINS, device=logits.device)).double()
        self.bins += one_hot.T @ columns
        self.nll -= log_probs.gather(1, labels[:, None]).double().sum()

    def compute(self) -> dict[str, Tensor]:
        """The figures of everything seen, over all ranks.

        Returns:
            ``error`` (a fraction), ``nll`` (nats a sample), ``ece`` (a fraction) and ``count`` (samples), each a
            float64 scalar tensor. Without any sample the first three are NaN.
        """
        count = self.bins[:, _COUNT].sum()
        return {
            "error": 1 - self.bins[:, _CORRECT].sum() / count,
            "nll": self.nll / count,
            # n_b/n |acc_b - conf_b| = |correct_b - confidence_b| / n: an empty bin adds 0 without a 0/0.
            "ece": (self.bins[:, _CORRECT] - self.bins[:, _CONFIDENCE]).abs().sum() / count,
            "count": count,
        }
