"""What :class:`fastmoll.Mollify` does to a batch: draws, targets, images, in plain torch or by fused kernels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from fastmoll.kernels.batch_tail import batch_tail, check_device, choose_backend
from fastmoll.kernels.checks import check_integer, check_labels, check_tensor, installed, overlaps
from fastmoll.kernels.cosine_noise import cosine_noise
from fastmoll.kernels.draw import BLUR, NOISE, PURE_NOISE
from fastmoll.kernels.heat_blur import heat_blur
from fastmoll.kernels.mix import Mix, mix_images
from fastmoll.kernels.philox import EPOCH_BITS, check_key
from fastmoll.kernels.soft_labels import label_decay, soft_labels
from fastmoll.schedules import Table, blur_temperature, decay_of

_COUNTER_BITS: Final = 32
_COUNTING: Final = threading.Lock()
# Else a process that is forked while a thread counts would wait for that thread, which it does not have.
os.register_at_fork(before=_COUNTING.acquire, after_in_parent=_COUNTING.release, after_in_child=_COUNTING.release)


class Settings(Protocol):
    """What the work on a batch depends on: arguments of :class:`fastmoll.Mollify`, and its draws."""

    num_classes: int
    roles: tuple[float, ...]
    beta: tuple[float, float]
    quantiles: Table
    k_noise: float
    k_blur: float
    sigma_min: float
    sigma_max: float | None
    kind: str
    seed: int
    backend: str
    targets: str
    draws: int
    label_decay: Callable[[Tensor, Tensor], Tensor] | None
    blur_scale: Callable[[Tensor], Tensor] | None

    def draw(self, index: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        """See ``Mollify.draw``."""

    def draw_mix(self, index: Tensor, epoch: int = 0, *, height: int, width: int) -> Mix | None:
        """See ``Mollify.draw_mix``."""


def mollify_batch(
    settings: Settings,
    images: Tensor,
    labels: Tensor,
    index: Tensor | None,
    epoch: int | Tensor | None,
    seen: Tensor | None,
    *,
    inplace: bool = False,
    pixels: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The work of ``Mollify.forward`` and ``Mollify.from_pixels``, for them and for the operator of compiled code.

    Args:
        settings: the module.
        images: as in ``forward``, or with ``pixels`` as in ``from_pixels``; that much is checked.
        labels: as there.
        index: as there.
        epoch: as there.
        seen: how many images were numbered before; counted on in place where ``index`` is None.
        inplace: as in ``forward``.
        pixels: the other arguments of ``from_pixels``.

    Returns:
        Mollified images; dense targets or label decays; and the shares of mixed labels, none where nothing is mixed.
        All draws of the batch, one after the other.

    Raises:
        ValueError: as ``forward`` and ``from_pixels``.
    """
    epoch = check_batch(settings, images, labels, index, epoch)
    if index is None:
        assert seen is not None  # one of them is always given
        index = _number(len(images), seen)
    images, labels = images.as_subclass(Tensor), labels.as_subclass(Tensor)
    dtype, device = images.dtype if pixels is None else pixels["dtype"], images.device
    height, width = images.shape[2:] if pixels is None else images.shape[1:3]
    backend = choose_backend(images, height, width, dtype) if settings.backend == "auto" else settings.backend
    check_device(backend, images)  # before anything is drawn
    fused = pixels is not None or backend != "torch"
    if not fused:
        # From the host, so that the host knows which images have which role without asking the device.
        index = index.cpu()
    mixed = settings.draw_mix(index, epoch, height=height, width=width)
    if mixed is not None:
        mixed = mixed.on(device)
    inplace = inplace and not overlaps(images)
    options = pixels or {"dtype": dtype, "memory_format": layout_of(images)}
    if not fused and mixed is not None:
        images = mix_images(images.to(torch.promote_types(dtype, torch.float32)), **mixed.of_images())
        inplace = True

    draws = settings.draws
    made, end = [], (epoch + 1) * draws
    for each in range(epoch * draws, end):
        if fused:
            made.append(_fused(settings, images, labels, index, each, backend, mixed, width, **options))
            continue
        role, t = settings.draw(index, each)
        targets = _make_targets(settings, labels, role, t, mixed, device)
        unneeded = inplace and each == end - 1
        out = _by_role(settings, images, role, _strength(settings, role, t, width), index, each, unneeded)
        made.append((out.to(dtype), targets))
    lam = torch.empty(0, dtype=torch.float32, device=device) if mixed is None else mixed.lam
    if draws == 1:
        return *made[0], lam
    images, targets = (torch.cat(parts) for parts in zip(*made, strict=True))
    return images, targets, lam.repeat(draws)


def layout_of(images: Tensor) -> torch.memory_format:
    """The memory format of images, contiguous where it is both."""
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def formula_of(kind: str) -> str:
    """The kind of the labels; those that are left alone lose nothing, ``γ = 0``, in either."""
    return "smooth" if kind == "none" else kind


def check_batch(
    settings: Settings, images: Tensor, labels: Tensor, index: Tensor | None, epoch: int | Tensor | None
) -> int:
    """Check what comes with the images; returns the epoch.

    Raises:
        ValueError: as ``Mollify.forward``.
    """
    batch = len(images)
    for name, value in (("labels", labels), ("index", index)):
        if isinstance(value, Tensor) and value.is_meta and not images.is_meta:
            raise ValueError(f"{name} must hold values beside images on {images.device}, got a tensor on meta")
    if settings.targets == "short":
        check_tensor("labels", labels, (batch,), (torch.int64,), None)
    # Before they move: on the CPU the check can name the bad value. Those on a GPU are looked at there, later.
    if not (isinstance(labels, Tensor) and labels.is_cuda):
        check_labels(labels, settings.num_classes, batch, None)
    if index is not None and epoch is None and torch.utils.data.get_worker_info() is not None:
        raise ValueError(
            "epoch must be given beside index inside a DataLoader worker, got None: draws would be the same in every "
            "epoch; pass epoch=, or mollify the batches that the loader returns"
        )
    epoch = check_integer("epoch", 0 if epoch is None else epoch, 0, 2**EPOCH_BITS // settings.draws)
    if index is not None and not (isinstance(index, Tensor) and index.is_cuda):
        check_key(settings.seed, epoch, index, batch)
    return epoch


def _number(batch: int, seen: Tensor) -> Tensor:
    """Fresh sample ids for images that came without: rank << 32 | number of images seen before, which is counted on."""
    if torch.utils.data.get_worker_info() is not None:
        raise ValueError(
            "index must be given inside a DataLoader worker, got None: each worker has a copy of this module, "
            "whose count of images starts anew every epoch, so draws would repeat; pass index= and epoch=, "
            "or mollify the batches that the loader returns"
        )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = int(torch.distributed.get_rank()) if distributed else 0
    with _COUNTING:
        ids = torch.arange(batch, device="cpu") + seen
        seen += batch
    return ids.remainder(2**_COUNTER_BITS).add(rank << _COUNTER_BITS)


def _strength(settings: Settings, role: Tensor, t: Tensor, width: int) -> Tensor:
    """The temperatures of the images, as the operations take them; labels decay by those that were drawn."""
    if settings.blur_scale is None:
        return t
    return blur_temperature(settings.blur_scale, role, t, settings.sigma_min, settings.sigma_max, width)


def _make_targets(
    settings: Settings, labels: Tensor, role: Tensor, t: Tensor, mixed: Mix | None, device: torch.device
) -> Tensor:
    """On ``device``, dense targets, or label decays for short ones."""
    if settings.label_decay is not None:
        gamma = decay_of(settings.label_decay, role, t)
    elif settings.kind == "none":
        gamma = torch.zeros_like(t)
    else:
        gamma = label_decay(role, t, k_noise=settings.k_noise, k_blur=settings.k_blur)
    gamma = gamma.to(device, non_blocking=True)
    if settings.targets == "short":
        return gamma
    labels, kind = labels.to(device, non_blocking=True), formula_of(settings.kind)
    return soft_labels(labels, gamma, settings.num_classes, kind=kind, **(mixed.of_labels() if mixed else {}))


def _by_role(
    settings: Settings, images: Tensor, role: Tensor, t: Tensor, index: Tensor, epoch: int, inplace: bool
) -> Tensor:
    """Noised and blurred images, in plain torch or compiled code for a CPU; draws on the host."""
    scales: dict[str, Any] = {"sigma_min": settings.sigma_min, "sigma_max": settings.sigma_max}
    key: dict[str, Any] = {"seed": settings.seed, "epoch": epoch}
    if images.device.type == "cpu" and images.dtype != torch.float64 and installed("numba"):
        from fastmoll.kernels.mollify_cpu import mollify_cpu

        return mollify_cpu(images, role, t, index=index, out=images if inplace else None, **key, **scales)
    out = images.clone()
    for roles in ((NOISE, PURE_NOISE), (BLUR,)):
        chosen = torch.isin(role, torch.tensor(roles, dtype=torch.int8, device="cpu")).nonzero().squeeze(1)
        if not len(chosen):
            continue
        place = chosen.to(images.device, non_blocking=True)
        level = t[chosen].to(images.device, non_blocking=True)
        if BLUR in roles:
            out[place] = heat_blur(images[place], level, **scales)
        else:
            out[place] = cosine_noise(images[place], level, index=index[chosen], **key)
    return out


def _fused(
    settings: Settings,
    images: Tensor,
    labels: Tensor,
    index: Tensor,
    epoch: int,
    backend: str,
    mixed: Mix | None,
    width: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Images by the batch tail, with draws and labels by one launch where there is Triton."""
    device = images.device
    on_host = not (index.is_cuda or labels.is_cuda)  # so their values were checked
    index = index.to(device, non_blocking=True)
    made = None
    if backend == "triton" or (backend == "cupy" and installed("triton")):
        from fastmoll.kernels.draw_triton import draw_batch

        # The usual labels, that is those of the formulas in the kernel.
        usual = settings.label_decay is None and settings.kind != "none"
        dense: dict[str, Any] = {}
        if usual and settings.targets == "dense":
            dense = {"labels": labels.to(device, non_blocking=True), **(mixed.of_labels() if mixed else {})}
        drawn = draw_batch(
            index,
            epoch,
            seed=settings.seed,
            roles=settings.roles,
            beta=settings.beta,
            quantiles=settings.quantiles.on(device),
            k_noise=settings.k_noise,
            k_blur=settings.k_blur,
            num_classes=settings.num_classes,
            kind=formula_of(settings.kind),
            validate=not on_host,
            **dense,
        )
        role, t = drawn.role, drawn.t
        if usual:
            made = drawn.target if dense else drawn.gamma
    else:
        role, t = settings.draw(index, epoch)
    if made is None:
        made = _make_targets(settings, labels, role, t, mixed, device)
    if mixed is not None:
        options |= mixed.of_images()
    images = batch_tail(
        images,
        role=role,
        t=_strength(settings, role, t, width),
        index=index,
        seed=settings.seed,
        epoch=epoch,
        sigma_min=settings.sigma_min,
        sigma_max=settings.sigma_max,
        backend=backend,
        **options,
    )
    return images, made
