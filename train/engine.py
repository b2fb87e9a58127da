"""One training step and one evaluation."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

import fastmoll
from fastmoll import losses
from fastmoll.distributed import Process
from fastmoll.kernels.soft_labels import SoftLabels
from fastmoll.scoring import autocast, check_count, score
from fastmoll.train.logs import Meter
from fastmoll.train.settings import Config, OptimConfig
from fastmoll.train.signals import Signals


def learning_rate(step: int, steps_per_epoch: int, optim: OptimConfig, images_per_step: int) -> float:
    """Learning rate of a step: linear warm-up, then a cosine to 0.

    Args:
        step: Number of the step, from 0.
        steps_per_epoch: Steps of an epoch.
        optim: Settings.
        images_per_step: Images of a step over all processes, for ``optim.lr_batch``.
    """
    peak = peak_rate(optim, images_per_step)
    warmup, total = round(optim.warmup_epochs * steps_per_epoch), optim.epochs * steps_per_epoch
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def peak_rate(optim: OptimConfig, images_per_step: int) -> float:
    """The largest learning rate of a run: ``optim.lr``, for ``optim.lr_batch`` images where that is given."""
    return optim.lr * (images_per_step / optim.lr_batch if optim.lr_batch else 1)


def loss_of(name: str, draws: int) -> Callable[[Tensor, Tensor | SoftLabels], Tensor]:
    """The loss ``optim.loss`` of logits ``(M·B, K)``, draw by draw, and as many targets: a scalar."""
    if name in ("log_mean", "corrected"):
        return lambda logits, targets: losses.augmented_likelihood(
            logits.view(draws, -1, logits.shape[1]), targets, kind=name
        )
    return {
        "soft": losses.soft_cross_entropy,
        "normalised": losses.normalised_cross_entropy,
        "binary": losses.binary_cross_entropy,
    }[name]


def make_optimizer(model: nn.Module, optim: OptimConfig, *, fused: bool) -> torch.optim.Optimizer:
    """The optimiser of ``optim.name`` for the parameters of a network.

    Args:
        model: The network.
        optim: Settings.
        fused: Whether a step is one kernel for many parameters, as it can be on a GPU.

    Returns:
        SGD or AdamW with one group of parameters or, for ``optim.decay`` weights, two: those with weight decay first.
    """
    decayed, others = split_parameters(model, optim.decay)
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": optim.weight_decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=fused)
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=fused)


# Scales of layers, class tokens and positional embeddings of torchvision's networks, which have more than one dimension
# only to be broadcast, or are tables of vectors that are added. Those of timm name theirs themselves.
_UNDECAYED: Final = ("class_token", "layer_scale", "logit_scale", "pos_embedding", "relative_position_bias_table")


def split_parameters(model: nn.Module, decay: str) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that weight decay is on, and the others.

    Args:
        model: A network; names or patterns of names that its ``no_weight_decay()``, if it has that, gives are not
            decayed.
        decay: ``"all"``: on all of them. ``"weights"``: on those of two dimensions or more, but for what the network
            names, and for scales of layers, class tokens and positional embeddings.
    """
    if decay == "all":
        return list(model.parameters()), []
    named: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        exempt = name.rpartition(".")[2] in _UNDECAYED or any(fnmatchcase(name, pattern) for pattern in named)
        (others if exempt or parameter.ndim < 2 else decayed).append(parameter)
    return decayed, others


class Learner:
    """The network, its optimiser and its average: all that a step changes.

    Attributes:
        model: The bare network.
        ema: Its moving average, or None.
        step: Steps done.
    """

    def __init__(self, model: nn.Module, config: Config, process: Process, batches_per_epoch: int) -> None:
        """Wrap ``model`` (equal on all processes, on ``process.device``) for training."""
        self.model = model
        self.ema = copy.deepcopy(model).requires_grad_(False) if config.model.ema else None
        pairs = list(zip(self.ema.state_dict().values(), model.state_dict().values(), strict=True)) if self.ema else []
        floating = [pair for pair in pairs if pair[0].is_floating_point()]
        self._averaged = [old for old, _ in floating], [new for _, new in floating]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]
        self.step = 0
        self.steps_per_epoch = math.ceil(batches_per_epoch / config.optim.accumulate)
        self._batches_per_epoch = batches_per_epoch
        self._config = config
        self._process = process
        self._ddp = None
        if process.world_size > 1:
            on_gpu = process.device.type == "cuda"
            self._ddp = DistributedDataParallel(model, device_ids=[process.device] if on_gpu else None)
            if not on_gpu:
                self._ddp.register_comm_hook(process.world_size, mean_in_rank_order)
            # Statistics of rank 0 are those that count, and `evaluate` hands them out, so no step has to. (Not an
            # argument above: new versions of torch deprecate that one, and older ones don't know its successor.)
            self._ddp.broadcast_buffers = False
        self._forward: nn.Module = self._ddp or model
        self._of_logits = loss_of(config.optim.loss, config.draws)
        # Around DDP, not inside: so that the gradients' exchange overlaps with the compiled backward pass.
        self._loss = torch.compile(self.loss) if config.model.compile else self.loss
        self._parameters = list(model.parameters())
        self._optimizer = make_optimizer(model, config.optim, fused=process.device.type == "cuda")

    @property
    def evaluated(self) -> nn.Module:
        """The network to evaluate: the average where there is one."""
        return self.ema or self.model

    @property
    def images_per_step(self) -> int:
        """Images of a full step, over all processes."""
        return self._config.data.batch_size * self._config.optim.accumulate * self._process.world_size

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.step, self.steps_per_epoch, self._config.optim, self.images_per_step)

    @property
    def total(self) -> int:
        """Number of steps of the schedule."""
        return self._config.optim.epochs * self.steps_per_epoch

    @property
    def last(self) -> int:
        """Number of steps at which this run ends."""
        return min(self.total, self._config.run.max_steps or self.total)

    def batches_left(self) -> int:
        """Batches of the running epoch that are still to come."""
        return self._batches_per_epoch - self.step % self.steps_per_epoch * self._config.optim.accumulate

    def loss(self, images: Tensor, targets: Tensor | SoftLabels) -> Tensor:
        """Mean loss of a batch, the part of a step that ``model.compile`` compiles."""
        if self._config.model.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        with autocast(self._process.device, self._config.run.amp):
            logits = self._forward(images)
        return self._of_logits(logits, targets)

    def train_step(self, meter: Meter) -> None:
        """Take one step on the next batches of ``meter``; reads nothing back from the device."""
        group = min(self._config.optim.accumulate, self.batches_left())
        for number in range(group):
            images, targets = meter.next_batch()
            with self._exchange(last=number == group - 1):
                loss = self._loss(images, targets)
                torch.autograd.backward(loss / group)
            meter.add(loss.detach(), len(images) // self._config.draws)
        norm = None
        if self._config.optim.clip_norm is not None:
            # Of the mean over all images of the step: every process has it by now, and all of it.
            norm = nn.utils.clip_grad_norm_(self._parameters, self._config.optim.clip_norm)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._average()
        meter.end_step(norm)

    def _exchange(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._ddp is None or last else self._ddp.no_sync()

    @torch.no_grad()
    def _average(self) -> None:
        if self._config.model.ema is None:
            return
        decay = min(self._config.model.ema, (1 + self.step) / (10 + self.step))
        averaged, current = self._averaged
        # AveragedModel itself would ask the device each time how many steps it has seen; only its arithmetic is wanted.
        get_ema_multi_avg_fn(decay)(averaged, current, self.step)  # type: ignore[no-untyped-call]
        for old, new in self._counters:
            old.copy_(new)

    def require_finite(self) -> None:
        """Refuse weights that are no longer numbers; reads them back from the device.

        Raises:
            FloatingPointError: the norm of the network's parameters and statistics is not finite.
        """
        numbers = [value for value in self.model.state_dict().values() if value.is_floating_point()]
        norm = float(nn.utils.get_total_norm(numbers))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the norm of the weights is {norm} after step {self.step}")

    def state_dict(self) -> dict[str, Any]:
        """Network, average, optimiser and step, the same on all processes but for rank 0's statistics."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave.

        Raises:
            LookupError, TypeError, AttributeError, RuntimeError: the state does not fit.
        """
        self.step = operator.index(state["step"])
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self._optimizer.load_state_dict(state["optimizer"])


def mean_in_rank_order(world_size, bucket):  # type: ignore[no-untyped-def]  # DDP refuses postponed annotations
    """Average the gradients of a DDP bucket over the processes, adding them up in the order of the ranks.

    gloo's own order depends on where in the sent memory a number lies, and DDP regroups its buckets after the first
    step: a resumed run of three or more processes, which begins with the first grouping again, would differ in the
    last bits. The price is memory for the gradients of every process, of which a run on CPUs has few.

    Args:
        world_size: Number of processes.
        bucket: The ``torch.distributed.GradBucket``.

    Returns:
        A future of the mean, in the form of ``bucket.buffer()``.
    """
    parts = [torch.empty_like(bucket.buffer()) for _ in range(world_size)]
    gathered = dist.all_gather(parts, bucket.buffer(), async_op=True).get_future()
    return gathered.then(lambda _: functools.reduce(Tensor.add_, parts).div_(world_size))


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Any, ...]],
    process: Process,
    config: Config,
    expected: int,
    signals: Signals | None = None,
) -> dict[str, float]:
    """Error, NLL and ECE of ``model`` over a whole set and all processes.

    The bare network runs with the BatchNorm statistics of rank 0, so that the figures are those of its checkpoint, for
    any number of processes. They exchange nothing until the sums at the end, so their batches may differ in number.

    Args:
        model: The network; left in training mode or not, as it came.
        batches: This process's share of the set: images and int64 classes.
        process: This process.
        config: Settings: memory format and mixed precision.
        expected: Images of the whole set.
        signals: Where to look for a signal before each batch. A process that gets one leaves the rest of its share; one
            that gets none, as on another machine, does its own first.

    Returns:
        ``error``, ``nll``, ``ece`` and ``count``; nothing, on all processes, where a signal came.

    Raises:
        Stop: on all processes, for an error on one of them: an unreadable image, or an NLL that is no longer finite.
        RuntimeError: another number of images came than ``expected``.
    """
    process.copy_from_main(model, parameters=False)
    metrics = fastmoll.ClassificationMetrics().to(process.device)
    with process.agree():
        wanted = itertools.takewhile(lambda _: signals is None or not signals.own, batches)
        score(model, wanted, metrics, precision=config.run.amp, channels_last=config.model.channels_last)
    if signals is not None and signals.agreed():
        return {}
    figures = metrics.compute()
    results = {name: float(figures[name]) for name in ("error", "nll", "ece", "count")}
    with process.agree():
        check_count(int(results["count"]), expected)
        if not math.isfinite(results["nll"]):
            raise FloatingPointError(f"the NLL on the validation images is {results['nll']}")
    return results
