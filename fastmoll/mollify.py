"""``Mollify``: noise or blur a batch of images and soften its labels to match, after any data loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastmoll.epochs import describe
from fastmoll.kernels.batch_tail import BACKENDS
from fastmoll.kernels.checks import check_choice, check_images, check_integer, check_number, check_tensor
from fastmoll.kernels.draw import check_beta, draw, role_thresholds
from fastmoll.kernels.heat_blur import check_scales
from fastmoll.kernels.mix import MIXES, Mix, draw_mix, partners
from fastmoll.kernels.philox import EPOCH_BITS, check_key
from fastmoll.kernels.soft_labels import KINDS, SoftLabels
from fastmoll.mollify_batch import check_batch, formula_of, layout_of, mollify_batch
from fastmoll.mollify_operator import mollify_operator, register
from fastmoll.schedules import Table, beta_quantiles, quantiles_of

TARGETS: Final = ("dense", "short")


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

    ``mix`` mixes the images of a batch before all that, and their labels with them, as ``torchvision.transforms.v2``
    does in the paper's experiments (:mod:`fastmoll.kernels.mix`): in every batch, by one ``λ`` and one box, drawn for
    its first sample id. ``Mollify(1000, roles=(1, 0, 0), mix="cutmix")`` mixes and does nothing else.

    ``train()`` and ``eval()`` make no difference: whoever calls it wants mollified images.

    ``torch.compile`` takes it as one operator, whatever the backend, so that a compiled step has no graph break at it.
    A second value of an int ``epoch`` compiles such a step once more, for all values; a tensor ``epoch`` does not.

    On a GPU nothing waits for the device: one small Triton launch draws roles, temperatures and labels, a fused kernel
    does the rest. The torch backend draws on the host there, and waits for an ``index`` that is on the GPU.

    Args:
        num_classes: ``K``, at least 2.
        roles: weights of clean, noise and blur, in this order, and optionally of pure noise (``t = 1``, label gone).
        beta: ``(a, b)`` of the temperature's distribution, both positive.
        k_noise: slope of the label decay for noise, at least 0.
        k_blur: slope of the label decay for blur, at least 0.
        sigma_min: blur scale at ``t = 0``, in pixels, positive.
        sigma_max: blur scale at ``t = 1``, in pixels, at least ``sigma_min``; default: the width of the images.
        kind: ``"smooth"`` for ``(1 - γ) y + γ/K``, ``"temper"`` for ``(1 - γ) y``, ``"none"`` for ``y``.
        seed: key of all draws, int in [0, 2^64).
        backend: ``"triton"`` or ``"cupy"``: fused kernels, for float16, bfloat16 and float32 images on a GPU, at most
            512 pixels high and wide; ``"torch"``: plain torch, and on a CPU code compiled by Numba if that is
            installed; ``"auto"``: the fastest that can be used
            (:func:`fastmoll.kernels.batch_tail.choose_backend`). All draw the same.
        targets: ``"dense"`` for ``(B, K)``, ``"short"`` for :class:`fastmoll.SoftLabels`, a few numbers an image, which
            :func:`fastmoll.soft_cross_entropy` takes just as well.
        mix: ``"mixup"``, ``"cutmix"`` or None.
        mix_alpha: ``α`` of ``λ ~ Beta(α, α)``, positive.
        draws: ``M``, at least 1: how often each image is in the result, each time with a role, a temperature and noise
            of its own (paper, equation 3): ``(M·B, ...)``, draw by draw, as
            :func:`fastmoll.losses.augmented_likelihood` takes them. Draw ``m`` of ``epoch`` is that of epoch
            ``M·epoch + m`` of a module with one. What an image is mixed with is the same in all its draws.
        temperature: in place of ``beta``, the quantile function of another distribution: of ``u``, float64 ``(n,)`` in
            (0, 1), to temperatures of that shape in [0, 1]. It is called once, here, at 4097 values of ``u``, and
            interpolated between: where it jumps, 0.3 % of the draws or fewer lie in between.
        label_decay: in place of ``k_noise`` and ``k_blur``, a function of ``(role, t)``, int8 and float32 ``(B,)``, to
            ``γ`` in [0, 1], floating point ``(B,)`` on their device. It is called for every batch, outside of the code
            that a compiler sees.
        blur_scale: in place of the paper's geometric schedule (equation 6), a function of ``t``, float32 ``(B,)``, to
            blur scales in pixels from ``sigma_min`` to ``sigma_max``, likewise.

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
        backend: str = "auto",
        targets: str = "dense",
        *,
        mix: str | None = None,
        mix_alpha: float = 1.0,
        draws: int = 1,
        temperature: Callable[[Tensor], Tensor] | None = None,
        label_decay: Callable[[Tensor, Tensor], Tensor] | None = None,
        blur_scale: Callable[[Tensor], Tensor] | None = None,
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
        check_choice("kind", kind, (*KINDS, "none"))
        self.kind = kind
        self.seed = check_integer("seed", seed, 0, 2**64)
        check_choice("backend", backend, BACKENDS)
        self.backend = backend
        check_choice("targets", targets, TARGETS)
        self.targets = targets
        if mix is not None:
            check_choice("mix", mix, MIXES)
        self.mix = mix
        self.mix_alpha = check_number("mix_alpha", mix_alpha, above=0.0)
        self.draws = check_integer("draws", draws, 1, 2**EPOCH_BITS + 1)
        for name, function in (("temperature", temperature), ("label_decay", label_decay), ("blur_scale", blur_scale)):
            if not (function is None or callable(function)):
                raise ValueError(f"{name} must be callable or None, got {function!r}")
        for name, function, left_out in (
            ("beta", temperature, self.beta == (1.0, 2.0)),
            ("k_noise", label_decay, self.k_noise == 1.0),
            ("k_blur", label_decay, self.k_blur == 1.0),
            ("kind", label_decay, kind != "none"),
        ):
            if function is not None and not left_out:
                raise ValueError(f"{name} has no effect beside a function that replaces it, got {getattr(self, name)}")
        self.temperature, self.label_decay, self.blur_scale = temperature, label_decay, blur_scale
        # A tensor, so that code compiled around this module is not compiled anew for each count.
        self._seen = _counter(0)
        # Not buffers: they belong where the sample ids are, and casting the module must not round them.
        beta_table = None if self.beta[0] == 1.0 else beta_quantiles(*self.beta)
        self.quantiles = Table(beta_table if temperature is None else quantiles_of(temperature))
        self._mix_quantiles = Table(None if self.mix_alpha == 1.0 else beta_quantiles(self.mix_alpha, self.mix_alpha))
        self._handle = register(self)

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
        quantiles = self.quantiles.on(index.device)
        return draw(index, epoch, seed=self.seed, roles=self.roles, beta=self.beta, quantiles=quantiles)

    def draw_mix(self, index: Tensor, epoch: int = 0, *, height: int, width: int) -> Mix | None:
        """What the images of a batch are mixed with; None without ``mix``.

        Args:
            index: sample ids, integer ``(B,)``, in [0, 2^48), in the order of the batch, on any device.
            epoch: int in [0, 2^24).
            height: of the images, pixels.
            width: of the images, pixels.

        Returns:
            See :class:`fastmoll.kernels.mix.Mix`; on index's device.

        Raises:
            ValueError: an argument outside the ranges above.
        """
        if self.mix is None:
            return None
        return draw_mix(
            index,
            epoch,
            kind=self.mix,
            height=height,
            width=width,
            seed=self.seed,
            alpha=self.mix_alpha,
            quantiles=self._mix_quantiles.on(index.device),
        )

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        index: Tensor | None = None,
        epoch: int | Tensor | None = None,
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | SoftLabels]:
        """Mollify a batch.

        Args:
            images: standardised images ``(B, C, H, W)``; float16, bfloat16, float32 or float64; contiguous or
                channels-last. Never written to, unless ``inplace``. On the meta device only shapes come back.
            labels: classes ``(B,)`` int64, or for dense targets soft labels ``(B, K)`` floating point; on any device.
            index: sample ids, integer ``(B,)``, in [0, 2^48); default: number the images as they come (see the class).
            epoch: int in [0, ⌊2^24 / M⌋), ``M`` being ``draws``, or an int64 scalar tensor on the CPU; default: 0, in
                which an ``index`` of the data set gets the same draws each time that it comes.
            inplace: ``images`` may be overwritten with the result, which on a CPU saves the cost of fresh memory; not
                done in code that is compiled, nor to images whose elements share memory.

        Returns:
            images: ``(M·B, C, H, W)``, dtype, device and memory format of ``images``; a new tensor unless ``inplace``.
            targets: float32 ``(M·B, K)``, or :class:`fastmoll.SoftLabels`; on images' device.

        Raises:
            ValueError: an argument outside the ranges above, integer images, images that require grad, or no ``index``
                or no ``epoch`` inside a ``DataLoader`` worker.
        """
        check_images("images", images)
        if images.is_meta or torch.compiler.is_compiling():
            return self._traced(images, labels, index, epoch, channels_last=layout_of(images) == torch.channels_last)
        return self._give(labels, *mollify_batch(self, images, labels, index, epoch, self._seen, inplace=inplace))

    def from_pixels(
        self,
        pixels: Tensor,
        labels: Tensor,
        index: Tensor | None = None,
        epoch: int | Tensor | None = None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        flip: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor | SoftLabels]:
        """Flip, standardise and mollify a batch as it was decoded, in one pass over memory on a GPU.

        Args:
            pixels: uint8 ``(B, H, W, 3)``.
            labels: as in :meth:`forward`.
            index: as in :meth:`forward`.
            epoch: as in :meth:`forward`.
            mean: mean per channel, for pixels in [0, 1].
            std: standard deviation per channel, likewise.
            flip: bool ``(B,)``: which images to mirror left and right.
            dtype: of the images: float32, bfloat16 or float16.

        Returns:
            images: ``(M·B, 3, H, W)`` of ``dtype`` in channels-last memory, on pixels' device.
            targets: as in :meth:`forward`, there too.

        Raises:
            ValueError: an argument outside the ranges above.
        """
        check_tensor("pixels", pixels, (None, None, None, 3), (torch.uint8,), None)
        if min(pixels.shape[1:3]) < 1:
            raise ValueError(f"pixels must have at least one row and column, got shape {tuple(pixels.shape)}")
        options: dict[str, Any] = {"mean": mean, "std": std, "flip": flip, "dtype": dtype}
        if pixels.is_meta or torch.compiler.is_compiling():
            return self._traced(pixels, labels, index, epoch, channels_last=True, **options)
        return self._give(labels, *mollify_batch(self, pixels, labels, index, epoch, self._seen, pixels=options))

    def _give(self, labels: Tensor, images: Tensor, made: Tensor, lam: Tensor) -> tuple[Tensor, Tensor | SoftLabels]:
        """The result, from dense targets or from the label decays of short ones, and the shares of mixed labels."""
        if self.targets == "dense":
            return images, made
        labels = labels.to(images.device, non_blocking=True)
        kind, other = formula_of(self.kind), None if self.mix is None else partners(labels)
        if self.draws > 1:
            labels, other = labels.repeat(self.draws), None if other is None else other.repeat(self.draws)
        return images, SoftLabels(labels, made, other, None if other is None else lam, kind)

    def _traced(
        self,
        images: Tensor,
        labels: Tensor,
        index: Tensor | None,
        epoch: int | Tensor | None,
        *,
        channels_last: bool,
        flip: Tensor | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | SoftLabels]:
        """What a compiler sees: one operator, which calls :func:`mollify_batch` with this module."""
        if images.is_meta and not torch.compiler.is_compiling():  # for which the operator calls nothing
            check_batch(self, images, labels, index, epoch)
        result = mollify_operator(
            images,
            labels,
            index,
            None if index is not None else self._seen,
            flip,
            epoch if isinstance(epoch, Tensor) else None,
            module=self._handle,
            epoch=0 if epoch is None or isinstance(epoch, Tensor) else epoch,
            mean=mean,
            std=std,
            dtype=images.dtype if dtype is None else dtype,
            channels_last=channels_last,
            classes=0 if self.targets == "short" else self.num_classes,
            mixed=self.mix is not None,
            draws=self.draws,
        )
        return self._give(labels, *result)

    def get_extra_state(self) -> Tensor:
        """How many images were numbered so far, int64 scalar; part of ``state_dict()``."""
        return self._seen.clone()

    def set_extra_state(self, state: Any) -> None:
        """Go on numbering where :meth:`get_extra_state` left off.

        Raises:
            ValueError: not an int64 scalar, or negative.
        """
        check_tensor("state", state, (), (torch.int64,), None)
        self._seen.fill_(check_integer("state", int(state), 0))

    def __getstate__(self) -> dict[str, Any]:
        # A number: a tensor that is sent to another process is shared with it, and both would count.
        return {**self.__dict__, "_seen": int(self._seen)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _seen=_counter(state["_seen"]))
        self._handle = register(self)

    def extra_repr(self) -> str:
        """The arguments, as ``repr`` shows them."""
        shown = ((name, getattr(self, name)) for name in _SETTINGS)
        return ", ".join(f"{name}={describe(value) if callable(value) else repr(value)}" for name, value in shown)


def _counter(seen: int) -> Tensor:
    with torch.inference_mode(False):  # outside of which a tensor that was made inside can't be changed
        return torch.tensor(seen, device="cpu")


# The arguments of the constructor.
_SETTINGS: Final = (
    "num_classes",
    "roles",
    "beta",
    "k_noise",
    "k_blur",
    "sigma_min",
    "sigma_max",
    "kind",
    "seed",
    "backend",
    "targets",
    "mix",
    "mix_alpha",
    "draws",
    "temperature",
    "label_decay",
    "blur_scale",
)


def with_mix(
    mollify: Callable[..., Any] | None, mix: str | None, num_classes: int, seed: int, root: Path
) -> tuple[Mollify | None, Callable[..., Any] | None]:
    """What a loader does to its batches: what :class:`Mollify` does, mixing included, and what is called after it.

    Args:
        mollify: a :class:`Mollify`, any other function, or None.
        mix: ``"mixup"``, ``"cutmix"`` or None, as the name of the augmentation says.
        num_classes: ``K``.
        seed: of the draws where ``mollify`` has none.
        root: what the images are read from, for messages.

    Raises:
        ValueError: ``mollify`` is for another number of classes, or mixes the images already, in another way.
    """
    classes = getattr(mollify, "num_classes", num_classes)
    if classes != num_classes:
        raise ValueError(f"mollify has num_classes={classes}, but {root} has {num_classes} classes")
    own = mollify if isinstance(mollify, Mollify) else None
    after = None if own is not None else mollify
    if mix is None:
        return own, after
    if own is None:
        return Mollify(num_classes, (1, 0, 0), mix=mix, seed=seed), after
    if own.mix not in (None, mix):
        raise ValueError(f"augment says {mix}, but mollify has mix={own.mix!r}")
    own = copy.copy(own)
    own.mix = mix
    return own, after
