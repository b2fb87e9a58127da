"""``Mollify``: noise or blur a batch of images and soften its labels to match, after any data loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.special import betainccinv, betaincinv
from torch import Tensor, nn

from fastmoll.kernels.checks import (
    INTEGER,
    check_choice,
    check_images,
    check_integer,
    check_labels,
    check_number,
    check_tensor,
)
from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, LOGIT_LIMIT, NOISE, PURE_NOISE, check_beta, draw, role_thresholds
from fastmoll.kernels.heat_blur import check_scales, heat_blur
from fastmoll.kernels.philox import EPOCH_BITS, check_key
from fastmoll.kernels.soft_labels import KINDS, label_decay, soft_labels

_COUNTER_BITS = 32
_QUANTILE_NODES = 4097


def beta_quantiles(a: float, b: float, nodes: int = _QUANTILE_NODES) -> Tensor:
    """The quantile table of ``Beta(a, b)`` that :func:`fastmoll.kernels.draw.draw` interpolates.

    Args:
        a: first shape parameter, positive.
        b: second shape parameter, positive.
        nodes: table size; 4097 keeps the interpolated temperature within 5e-6 of the exact quantile for ``a, b >= 0.5``
            and within 5e-5 for ``a, b >= 0.1``.

    Returns:
        float64 ``(nodes,)``, ascending, in [0, 1]: quantiles at equally spaced logits from ``-LOGIT_LIMIT`` to
        ``LOGIT_LIMIT``.

    Raises:
        ValueError: SciPy cannot invert this distribution.
    """
    logits = np.linspace(-LOGIT_LIMIT, LOGIT_LIMIT, nodes)
    # From the upper tail where that is the smaller one: 1 - u would round its last bits away.
    tail = 1.0 / (1.0 + np.exp(np.abs(logits)))
    table = np.where(logits < 0.0, betaincinv(a, b, tail), betainccinv(a, b, tail))
    if not np.all((table >= 0.0) & (table <= 1.0)):
        raise ValueError(f"beta must be a distribution whose quantiles can be computed, got ({a}, {b})")
    return torch.from_numpy(np.maximum.accumulate(table))


class Mollify(nn.Module):
    """Mollify a batch: each image stays clean, is noised or is blurred, and its label fades with it.

    Every image draws a role by the weights ``roles`` and a temperature ``t ~ Beta(a, b)``. A noised image is
    ``cos(πt/2) x + sin(πt/2) ε`` (paper, equation 4), a blurred one ``V exp(-τΛ) Vᵀ x`` (equations 5 and 6); the label
    loses ``γ`` (equations 12 and 13) and is smoothed or tempered (equations 8 and 7). Called like
    ``torchvision.transforms.v2.MixUp``, batch in, batch out, and works after it::

        mollify = fastmoll.Mollify(num_classes=1000)
        for images, labels in loader:
            images, targets = mollify(images, labels)
            loss = fastmoll.soft_cross_entropy(model(images), targets)

    All draws are functions of (seed, epoch, sample id). With ``index``, the ids of the images in the data set, an image
    gets the same role, temperature and noise in every batch, process and resumed run, and new ones each ``epoch``.
    Without it, images are numbered in the order in which this module sees them: numbering each batch ``0 ... B-1``
    would give every batch of an epoch the same draws. The process rank goes into the upper 16 bits of such a number, so
    processes differ; the count is part of ``state_dict()`` (without the rank: one state serves all), so a resumed run
    goes on with new draws. ``epoch`` is not needed then.

    ``train()`` and ``eval()`` make no difference: whoever calls it wants mollified images.

    On a GPU nothing waits for the device as long as ``index`` is None or on the CPU: roles are drawn on the host. An
    ``index`` on the GPU costs one synchronisation.

    Args:
        num_classes: ``K``, at least 2.
        roles: weights of clean, noise and blur, in this order, and optionally of pure noise (``t = 1``, label gone).
        beta: ``(a, b)`` of the temperature's distribution, both positive.
        k_noise: slope of the label decay for noise, at least 0.
        k_blur: slope of the label decay for blur, at least 0.
        sigma_min: blur scale at ``t = 0``, in pixels, positive.
        sigma_max: blur scale at ``t = 1``, in pixels, at least ``sigma_min``; default: the width of the images.
        kind: ``"smooth"`` for ``(1 - γ) y + γ/K``, ``"temper"`` for ``(1 - γ) y``.
        seed: key of all draws, int in [0, 2^64).

    Raises:
        ValueError: an argument outside the ranges above.
    """

    def __init__(
        self,
        num_classes: int,
        roles: Sequence[float] = (1, 1, 1),
        beta: tuple[float, float] = (1.0, 2.0),
        k_noise: float = 1.0,
        k_blur: float = 1.0,
        sigma_min: float = 0.3,
        sigma_max: float | None = None,
        kind: str = "smooth",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_classes = check_integer("num_classes", num_classes, 2)
        role_thresholds(roles)
        self.roles = tuple(float(weight) for weight in roles)
        self.beta = check_beta(beta)
        self.k_noise = check_number("k_noise", k_noise, at_least=0.0)
        self.k_blur = check_number("k_blur", k_blur, at_least=0.0)
        self.sigma_min = check_number("sigma_min", sigma_min, above=0.0)
        self.sigma_max = None if sigma_max is None else check_scales(sigma_min, sigma_max)[1]
        check_choice("kind", kind, KINDS)
        self.kind = kind
        self.seed = check_integer("seed", seed, 0, 2**64)
        self._seen = 0
        # Not a buffer: it belongs where the sample ids are, and casting the module must not round it.
        self._quantiles = None if self.beta[0] == 1.0 else beta_quantiles(*self.beta)

    def draw(self, index: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """The role and the temperature of each sample id.

        Args:
            index: sample ids, integer ``(B,)``, in [0, 2^48), on any device.
            epoch: int in [0, 2^24).

        Returns:
            role: int8 ``(B,)``: 0 clean, 1 noise, 2 blur, 3 pure noise.
            t: float32 ``(B,)`` in [0, 1]; 0 for clean. Both on index's device.

        Raises:
            ValueError: an argument outside the ranges above.
        """
        check_key(self.seed, epoch, index)
        quantiles = None if self._quantiles is None else self._quantiles.to(index.device)
        return draw(index, epoch, seed=self.seed, roles=self.roles, beta=self.beta, quantiles=quantiles)

    def forward(
        self, images: Tensor, labels: Tensor, index: Tensor | None = None, epoch: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Mollify a batch.

        Args:
            images: standardised images ``(B, C, H, W)``; float16, bfloat16, float32 or float64; contiguous or
                channels-last. Never written to.
            labels: classes ``(B,)`` int64, or soft labels ``(B, K)`` floating point; on any device.
            index: sample ids, integer ``(B,)``, in [0, 2^48); default: number the images as they come (see the class).
            epoch: int in [0, 2^24).

        Returns:
            images: a new tensor like ``images``, same dtype, device and memory format.
            targets: float32 ``(B, K)`` on images' device.

        Raises:
            ValueError: an argument outside the ranges above, integer images, images that require grad, or no ``index``
                inside a ``DataLoader`` worker.
        """
        check_images("images", images)
        batch = len(images)
        # Where they are, before they move: on the CPU the check can name the bad label.
        check_labels(labels, self.num_classes, batch, None)
        check_integer("epoch", epoch, 0, 2**EPOCH_BITS)
        if index is None:
            index = self._number(batch)
        check_tensor("index", index, (batch,), INTEGER, None)
        images = images.as_subclass(Tensor)

        labels = labels.as_subclass(Tensor).to(images.device, non_blocking=True)

        # The draws are made on the host, which then knows which images have which role without asking the device.
        index = index.cpu()
        role, t = self.draw(index, epoch)
        gamma = label_decay(role, t, k_noise=self.k_noise, k_blur=self.k_blur)
        targets = soft_labels(labels, gamma.to(images.device, non_blocking=True), self.num_classes, kind=self.kind)

        out = images.clone()
        for roles in ((NOISE, PURE_NOISE), (BLUR,)):
            chosen = torch.isin(role, torch.tensor(roles, dtype=torch.int8)).nonzero().squeeze(1)
            if not len(chosen):
                continue
            place = chosen.to(images.device, non_blocking=True)
            level = t[chosen].to(images.device, non_blocking=True)
            if BLUR in roles:
                out[place] = heat_blur(images[place], level, sigma_min=self.sigma_min, sigma_max=self.sigma_max)
            else:
                out[place] = cosine_noise(images[place], level, seed=self.seed, epoch=epoch, index=index[chosen])
        return out, targets

    def _number(self, batch: int) -> Tensor:
        """Fresh sample ids for images that came without: rank << 32 | number of images seen before."""
        if torch.utils.data.get_worker_info() is not None:
            raise ValueError(
                "index must be given inside a DataLoader worker, got None: each worker has a copy of this module, "
                "whose count of images starts anew every epoch, so draws would repeat; pass index= and epoch=, "
                "or mollify the batches that the loader returns"
            )
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = int(torch.distributed.get_rank()) if distributed else 0
        seen = torch.arange(self._seen, self._seen + batch)
        self._seen += batch
        return seen.remainder(2**_COUNTER_BITS).add(rank << _COUNTER_BITS)

    def get_extra_state(self) -> Tensor:
        """How many images were numbered so far, int64 scalar; part of ``state_dict()``."""
        return torch.tensor(self._seen)

    def set_extra_state(self, state: Any) -> None:
        """Go on numbering where :meth:`get_extra_state` left off.

        Raises:
            ValueError: not an int64 scalar, or negative.
        """
        check_tensor("state", state, (), (torch.int64,), None)
        self._seen = check_integer("state", int(state), 0)

    def extra_repr(self) -> str:
        """The arguments, as ``repr`` shows them."""
        names = ("num_classes", "roles", "beta", "k_noise", "k_blur", "sigma_min", "sigma_max", "kind", "seed")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
