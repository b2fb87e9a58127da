"""Augmentation by name, and the augmentation of batches of decoded images.

One grammar for ImageNet and small images: parts joined by ``+``. First ``none``, ``fc`` (flip and crop) or ``fcr``
(flip, crop, rotation by up to 15 degrees), then at most one policy, ``rand``, ``auto``, ``trivial`` or ``augmix``, then
at most one way to mix images, ``mixup`` or ``cutmix``: ``none``, ``fcr+trivial``, ``fc+rand+cutmix``.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fastmoll.kernels import philox
from fastmoll.kernels.checks import check_choice, check_integer, check_tensor
from fastmoll.kernels.draw import uniform_double
from fastmoll.kernels.image_ops import OPERATIONS, apply, check_pixels, crop_flip_rotate, mix, upload, warp
from fastmoll.pipelines.errors import did_you_mean, nearest
from fastmoll.pipelines.policies import (
    AUGMIX_DEPTH,
    AUGMIX_SEVERITY,
    AUGMIX_WIDTH,
    AUTO_AUGMENT,
    POLICIES,
    RAND_BIN,
    RAND_OPERATIONS,
    ROTATION,
    ranges,
)

BASES: Final = ("none", "fc", "fcr")
MIXES: Final = ("mixup", "cutmix")


@dataclass(frozen=True)
class AugmentSpec:
    """An augmentation's name, taken apart.

    Attributes:
        base: ``"none"``, ``"fc"`` or ``"fcr"``.
        policy: ``"rand"``, ``"auto"``, ``"trivial"``, ``"augmix"`` or None.
        mix: ``"mixup"``, ``"cutmix"`` or None.
    """

    base: str
    policy: str | None = None
    mix: str | None = None

    def __str__(self) -> str:
        return "+".join(part for part in (self.base, self.policy, self.mix) if part)


_PARTS = itertools.product(BASES, (None, *POLICIES), (None, *MIXES))
_SPECS = {str(spec): spec for spec in itertools.starmap(AugmentSpec, _PARTS)}
NAMES: Final = tuple(_SPECS)
"""All names of augmentations there are."""


def parse_augment(name: str) -> AugmentSpec:
    """The parts of an augmentation's name.

    Raises:
        ValueError: no such name; the message has the nearest one, if there is one.
    """
    spec = _SPECS.get(name) if isinstance(name, str) else None
    if spec is None:
        parts = {part.strip() for part in str(name).lower().split("+")}
        same = [known for known in NAMES if {*known.split("+")} in (parts, parts | {"none"})]
        raise ValueError(
            f"augment must be {', '.join(BASES)}, then perhaps + and {', '.join(POLICIES)}, then perhaps + and "
            f"{' or '.join(MIXES)}; got {name!r}{did_you_mean(same or nearest(name, NAMES))}"
        )
    return spec


@dataclass(frozen=True)
class Draws:
    """What is done to each image of a batch.

    Attributes:
        flip: Mirror left and right, bool ``(B,)``; with the next three, None where the base is ``none``.
        top: First row of the crop in the image, int64 ``(B,)``, from ``-padding`` to ``padding``.
        left: First column, likewise.
        angle: Degrees, counter-clockwise, float32 ``(B,)``.
        op: Operations, int64 ``(chains, steps, B)``, positions in `fastmoll.kernels.image_ops.OPERATIONS`; the
            steps of a chain are done one after the other. No chain without a policy, one for all but AugMix.
        magnitude: Their magnitudes, float32, of that shape.
        weights: AugMix's weights of the image itself and of each chain, float32 ``(1 + chains, B)``; None otherwise.
    """

    flip: Tensor | None
    top: Tensor | None
    left: Tensor | None
    angle: Tensor | None
    op: Tensor
    magnitude: Tensor
    weights: Tensor | None


class Augment:
    """Augmentation of batches of uint8 images on any device, each image by its own draws.

    ``fc`` and ``fcr`` are the small-image recipe: a flip with probability 1/2, a crop after padding with black, and in
    ``fcr`` a rotation by an angle uniform in ±15 degrees; together they are one resampling, which takes the nearest
    pixel and leaves corners black. That is what torchvision's ``RandomHorizontalFlip``, ``RandomCrop`` and
    ``RandomRotation`` do one after the other at their defaults, as in the paper's experiments; nearest pixels rather
    than interpolated ones, because interpolation would blur each training image, and no test image.

    The policies are torchvision's at their defaults: RandAugment of 2 operations at magnitude 9 of 31, TrivialAugment
    Wide, AutoAugment, all three with nearest pixels; AugMix of 3 chains of 1 to 3 operations at severity 3, bilinear,
    without a Jensen-Shannon loss. MixUp and CutMix belong to the batch, not to an image: they are not done here, but by
    the loader that is given this.

    Every draw is a function of seed, epoch and sample id, so neither batches nor ranks nor a resumed run change it; nor
    does the policy change flips, crops and rotations.

    A subclass may do more before or after ``super().__call__``; loaders call it as they call any function.
    """

    def __init__(
        self,
        augment: str | AugmentSpec,
        size: int = 32,
        padding: int = 4,
        seed: int = 0,
        *,
        auto_augment: str = "imagenet",
    ) -> None:
        """Prepare the tables of a policy.

        Args:
            augment: A name, see `parse_augment`, or its parts; mixing images is left to a loader.
            size: Height and width of the images, pixels.
            padding: Pixels of black around an image before it is cropped.
            seed: Seed of the draws.
            auto_augment: Whose sub-policies ``auto`` draws from, ``"cifar10"`` or ``"imagenet"``; the paper has the
                latter, torchvision's default, for small images too.

        Raises:
            ValueError: an unknown name, a size, padding or seed out of range.
        """
        self.spec = parse_augment(str(augment) if isinstance(augment, AugmentSpec) else augment)
        self.size = check_integer("size", size, 1)
        self.padding = check_integer("padding", padding, 0)
        self.seed = check_integer("seed", seed, 0, 2**64)
        check_choice("auto_augment", auto_augment, tuple(AUTO_AUGMENT))
        self.auto_augment = auto_augment
        # By operation and bin, and by the number of an operation in the policy.
        self._tables: dict[torch.device, tuple[Tensor, ...]] = {}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.spec)!r}, size={self.size}, padding={self.padding}, seed={self.seed}, "
            f"auto_augment={self.auto_augment!r})"
        )

    def __call__(self, images: Tensor, index: Tensor, epoch: int = 0) -> Tensor:
        """Augment a batch.

        Args:
            images: uint8 ``(B, size, size, 3)``.
            index: sample ids, integer ``(B,)``, in [0, 2^48); on images' device or on the CPU. On the CPU is faster for
                a policy on a GPU: each operation then sees only its own images. Neither makes the host wait.
            epoch: int in [0, 2^24).

        Returns:
            uint8 ``(B, size, size, 3)`` on images' device: a new tensor, or ``images`` where there is nothing to do.

        Raises:
            ValueError: a wrong shape or dtype, an id or epoch out of range.
        """
        check_pixels("images", images)
        if tuple(images.shape[1:3]) != (self.size, self.size):
            raise ValueError(f"images must be {self.size} pixels high and wide, got {tuple(images.shape[1:3])}")
        draws = self.draw(index, epoch)
        if len(index) != len(images):
            raise ValueError(f"index must have one entry an image, got {len(index)} for {len(images)} images")
        if draws.flip is not None and draws.top is not None and draws.left is not None and draws.angle is not None:
            matrix, window = crop_flip_rotate(draws.flip, draws.top, draws.left, draws.angle, self.size, self.size)
            images = warp(images, upload(matrix, images.device), upload(window, images.device))
        return augment(images, draws)

    def draw(self, index: Tensor, epoch: int = 0) -> Draws:
        """Draw what `__call__` does to these images; arguments as there. All results are on index's device."""
        philox.check_key(self.seed, epoch, index)
        words = _Words(index, epoch, self.seed, _BLOCKS[self.spec.policy])
        flip = top = left = angle = None
        if self.spec.base != "none":
            flip = words.integer(2) == 1
            top, left = (words.integer(2 * self.padding + 1) - self.padding for _ in range(2))
            angle = (words.uniform() * 2.0 - 1.0).float() * ROTATION
            if self.spec.base == "fc":
                angle = torch.zeros_like(angle)
        words.next_block()
        op, magnitude, weights = self._policy(words)
        return Draws(flip, top, left, angle, op, magnitude, weights)

    def _policy(self, words: _Words) -> tuple[Tensor, Tensor, Tensor | None]:
        policy, batch = self.spec.policy, len(words.words)
        if policy is None:
            none = words.words.new_empty(0, 0, batch)
            return none, none.float(), None
        numbers, magnitudes, signed, *pairs = self._on(words.words.device)

        def step(op: Tensor, place: Tensor | int) -> tuple[Tensor, Tensor]:
            size, negative = magnitudes[op, place], words.integer(2) == 1
            return op, torch.where(negative & signed[op], -size, size)

        def any_step(bins: int) -> tuple[Tensor, Tensor]:
            return step(numbers[words.integer(len(numbers))], words.integer(bins))

        weights = None
        if policy == "rand":
            chains = [[step(numbers[words.integer(len(numbers))], RAND_BIN) for _ in range(RAND_OPERATIONS)]]
        elif policy == "trivial":
            chains = [[any_step(magnitudes.shape[1])]]
        elif policy == "auto":
            ops, bins, probability = pairs
            pair = words.integer(len(ops))
            chains = [[]]
            for k in range(ops.shape[1]):
                happens = words.uniform() < probability[pair, k]
                op, magnitude = step(ops[pair, k], bins[pair, k])
                chains[0].append((torch.where(happens, op, 0), magnitude))
        else:
            chains = []
            for _ in range(AUGMIX_WIDTH):
                depth = words.integer(AUGMIX_DEPTH) + 1
                steps = [any_step(AUGMIX_SEVERITY) for _ in range(AUGMIX_DEPTH)]
                chains.append([(torch.where(k < depth, op, 0), size) for k, (op, size) in enumerate(steps)])
            # Dirichlet distributions of weights 1: uniform on [0, 1], and exponential numbers divided by their sum.
            itself = words.uniform()
            parts = torch.stack([-words.uniform().log() for _ in range(AUGMIX_WIDTH)])
            weights = torch.cat([itself.unsqueeze(0), (1.0 - itself) * parts / parts.sum(0)]).float()
        op, magnitude = (torch.stack([torch.stack([s[k] for s in chain]) for chain in chains]) for k in range(2))
        return op, magnitude, weights

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """The policy's tables on a device, copied there once."""
        if device not in self._tables:
            assert self.spec.policy is not None
            known = ranges(self.spec.policy, self.size, self.size)
            bins = max(len(r.magnitudes) for r in known.values() if r.magnitudes is not None)
            magnitudes = torch.zeros(len(OPERATIONS), bins, dtype=torch.float32, device="cpu")
            for name, entry in known.items():
                if entry.magnitudes is not None:
                    magnitudes[OPERATIONS.index(name)] = entry.magnitudes
            signed = torch.tensor([name in known and known[name].signed for name in OPERATIONS], device="cpu")
            numbers = torch.tensor([OPERATIONS.index(name) for name in known], device="cpu")
            pairs = AUTO_AUGMENT[self.auto_augment]
            tables = (
                torch.tensor([[OPERATIONS.index(name) for name, _, _ in pair] for pair in pairs], device="cpu"),
                torch.tensor([[place or 0 for _, _, place in pair] for pair in pairs], device="cpu"),
                torch.tensor(
                    [[probability for _, probability, _ in pair] for pair in pairs], dtype=torch.float64, device="cpu"
                ),
            )
            self._tables[device] = tuple(table.to(device) for table in (numbers, magnitudes, signed, *tables))
        return self._tables[device]


def check_augment(augment: Any, height: int, width: int) -> None:
    """Raise ``ValueError`` unless it takes images, index and epoch and, if an `Augment` itself, images of this size."""
    if not callable(augment):
        raise ValueError(f"augment must be a name or callable, got {augment!r}")
    if isinstance(augment, type):
        raise ValueError(f"augment must be an object that can be called, not a class, got {augment!r}")
    try:
        signature = inspect.signature(augment)
    except (TypeError, ValueError):  # some written in C have none
        signature = None
    try:
        _ = signature and signature.bind(None, None, None)
    except TypeError as error:
        raise ValueError(f"augment must take (images, index, epoch), got {augment!r}: {error}") from error
    if type(augment) is Augment and not augment.size == height == width:
        raise ValueError(f"augment must be for images of {height} x {width} pixels, got {augment!r}")


def check_augmented(images: Tensor, batch: int, device: torch.device, size: int | None = None) -> Tensor:
    """Return what a user's function gave for a batch, or raise ``ValueError`` unless it is uint8 ``(B, H, W, 3)``.

    Images of a ``size`` must be that high and wide.
    """
    check_tensor("augment(images, index, epoch)", images, (batch, size, size, 3), (torch.uint8,), device)
    return images


def augment(images: Tensor, draws: Draws) -> Tensor:
    """The policy's part of some draws, done to uint8 images ``(B, H, W, 3)``: chains of operations, their mixture."""
    chains, steps, _ = draws.op.shape
    if chains == 0:
        return images
    bilinear = draws.weights is not None
    out = images if chains == 1 else images.repeat(chains, 1, 1, 1)
    for k in range(steps):
        out = apply(out, draws.op[:, k].flatten(), draws.magnitude[:, k].flatten(), bilinear=bilinear)
    return out if draws.weights is None else mix(images, out.view(chains, *images.shape), draws.weights)


# Blocks of four words that a policy draws, and the one before them for flip, crop and rotation.
_BLOCKS: Final = {None: 1, "rand": 2, "trivial": 2, "auto": 3, "augmix": 10}


class _Words:
    """The random words of each sample, handed out one after the other."""

    def __init__(self, index: Tensor, epoch: int, seed: int, blocks: int) -> None:
        drawn = philox.sample_words(index, epoch, seed=seed, purpose=philox.AUGMENT, blocks=blocks)
        self.words = torch.stack(drawn, 2).flatten(1)
        self.used = 0

    def next_block(self) -> None:
        self.used = -(-self.used // 4) * 4 if self.used else 4

    def _next(self) -> Tensor:
        self.used += 1
        return self.words[:, self.used - 1]

    def integer(self, end: int) -> Tensor:
        """Uniform in ``[0, end)``, int64 ``(B,)``."""
        return self._next() * end >> 32

    def uniform(self) -> Tensor:
        """Uniform in (0, 1), float64 ``(B,)``."""
        return uniform_double(self._next())
