"""The settings of a training run, nested, with what each of them means."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro


@dataclass(frozen=True)
class DataConfig:
    """Images."""

    batch_size: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 256
    """Images per process and per forward pass."""
    augment: Annotated[str, tyro.conf.arg(aliases=["--augment"])] = "fc"
    """Augmentation of the training images, joined by +: none, fc (flip, crop) or fcr (and rotation); then, if at all,
    rand, auto, trivial or augmix; then, if at all, mixup or cutmix."""


@dataclass(frozen=True)
class FolderConfig(DataConfig):
    """Images in folders, decoded as they are needed."""

    path: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA", prefix_name=False)] = None
    """Folder of class folders of images, or of such folders called train and val. Left out: the bundled photographs."""
    size: int = 224
    """Height and width of the images the network sees, pixels."""
    mean: tuple[float, float, float] | None = None
    """Mean per channel, for pixels in [0, 1]; None: what timm says of model.weights where they are its own, else
    ImageNet's."""
    std: tuple[float, float, float] | None = None
    """Standard deviation per channel, likewise; both or none."""
    threads: int | None = None
    """CPU threads of each process's data pipeline; None: the loader's choice."""
    hw_decoder_load: float = 0.65
    """Share of a batch that the GPU's JPEG engine decodes, 0 to 1; without such an engine it changes nothing."""
    on_error: Literal["raise", "substitute"] = "raise"
    """What to do about a training image that can't be decoded: end the run, or take the next one of its class, with a
    warning."""
    decoder: Literal["mixed", "cpu"] = "mixed"
    """Who decodes for a GPU: itself, or the CPU in 1 to 1.3 ms an image, which leaves more of the GPU to training."""


@dataclass(frozen=True)
class SmallDataConfig(DataConfig):
    """Small images, kept on the device."""

    batch_size: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 128
    """Images per process and step; those that fill no step at an epoch's end are left out of it."""
    augment: Annotated[str, tyro.conf.arg(aliases=["--augment"])] = "fcr+trivial"
    """Augmentation of the training images, joined by +: none, fc (flip, crop) or fcr (and rotation); then, if at all,
    rand, auto, trivial or augmix; then, if at all, mixup or cutmix."""
    name: Annotated[str, tyro.conf.arg(aliases=["--data"])] = "digits"
    """cifar10, cifar100, tinyimagenet, digits (scikit-learn's 1,797, with a recipe of a minute or two on a CPU), or the
    path of an archive, of a folder of .npy files, or of a folder of class folders in train and val (or test)."""
    path: Path | None = None
    """Where the data set of that name is; None: in ./data or ~/.cache/fastmoll/data."""
    mean: tuple[float, float, float] | None = None
    """Mean per channel, for pixels in [0, 1]; None: the published one, or that of the training images."""
    std: tuple[float, float, float] | None = None
    """Standard deviation per channel, likewise; both or none."""
    auto_augment: Literal["imagenet", "cifar10"] = "imagenet"
    """Data set on which the sub-policies of auto were found; the paper has imagenet for small images, too."""


@dataclass(frozen=True)
class MollifyConfig:
    """Mollification of the training images and labels."""

    enabled: Annotated[bool, tyro.conf.arg(aliases=["--mollify"])] = True
    """Mollify; off, the targets are the class numbers."""
    roles: tuple[float, float, float] | tuple[float, float, float, float] = (1.0, 1.0, 1.0)
    """Weights of the roles clean, noise, blur (and, optionally, pure noise)."""
    beta: tuple[float, float] = (1.0, 2.0)
    """Parameters (a, b) of the Beta distribution of temperatures."""
    k_noise: float = 1.0
    """Exponent of the label decay of noised images."""
    k_blur: float = 1.0
    """Exponent of the label decay of blurred images."""
    sigma_min: float = 0.3
    """Blur scale at temperature 0, pixels."""
    sigma_max: float | None = None
    """Blur scale at temperature 1, pixels; None: the image width."""
    kind: Literal["smooth", "temper", "none"] = "smooth"
    """Move label mass to the uniform distribution (smooth), take it away (temper), or leave labels alone (none)."""
    draws: int = 1
    """How often each image of a batch is mollified, each time anew: the network sees draws times batch_size images."""
    backend: Literal["auto", "torch", "triton", "cupy"] = "auto"
    """Code that does it; auto: the fastest on this machine. All draw the same."""


@dataclass(frozen=True)
class ModelConfig:
    """The network."""

    name: Annotated[str, tyro.conf.arg(aliases=["--net"])] = "resnet50"
    """A network that fastmoll.create_model knows: those of the paper for small images (presnet18/34/50, allconv10,
    resnext29, densenet40, wrn40, googlenet), all classifiers of torchvision.models, and of timm where that is
    installed."""
    weights: str | None = None
    """Weights to start from: a torchvision name (IMAGENET1K_V1); for a network of timm, one of timm's tags
    (augreg_in21k_ft_in1k), or timm: those of the tag in model.name, or its default; a file (a state dict or a
    checkpoint of this trainer); or None. The head is fresh where the number of classes differs."""
    compile: Annotated[bool, tyro.conf.arg(aliases=["--compile"])] = False
    """Compile the training forward pass, loss and backward pass with torch.compile."""
    channels_last: bool = True
    """Keep activations and weights in channels-last memory order."""
    ema: float | None = None
    """Decay per step of an exponential moving average of the weights, which is then what is evaluated; None: none.
    Step n uses min(ema, (1 + n) / (10 + n)), so that a short run is not held at its first weights."""


@dataclass(frozen=True)
class OptimConfig:
    """Optimiser, cosine schedule."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimiser: sgd, or adamw, with which the defaults of lr, lr_batch, weight_decay and decay are others: shown by
    --help beside it."""
    epochs: Annotated[int, tyro.conf.arg(aliases=["--epochs"])] = 10
    """Passes over the training images."""
    lr: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.01
    """Peak learning rate."""
    lr_batch: int | None = None
    """Images per step that lr is meant for: it is scaled linearly to the true number. None: lr is used as it is."""
    momentum: float = 0.9
    """Momentum, of sgd alone."""
    nesterov: bool = False
    """Nesterov's form of momentum, likewise."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay per step of the averages of the gradient and of its square, of adamw alone."""
    weight_decay: float = 5e-4
    """Weight decay: with sgd as L2 penalty, part of the gradient; with adamw apart from it (decoupled)."""
    decay: Literal["all", "weights"] = "all"
    """Parameters that weight_decay is on: all of them, as in the paper, or weights: neither biases and the parameters
    of norms (fewer than two dimensions) nor scales of layers, class tokens and positional embeddings."""
    clip_norm: float | None = None
    """Largest norm of the gradient of a step, which is scaled down where it is larger; the log has the norms before
    that, as gradient_norm. None: any."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up, part of epochs; the cosine to 0 takes the rest."""
    accumulate: int = 1
    """Forward passes per step; what is left over at the end of an epoch makes a smaller last step."""
    loss: Literal["soft", "normalised", "binary", "log_mean", "corrected"] = "soft"
    """Cross-entropy, soft, normalised, or binary (a yes or no for each class; evaluation is still of the softmax), each
    the mean over images and draws; or, with two draws or more, the negative logarithm of their mean likelihood
    (log_mean), or that without its bias (corrected)."""


@dataclass(frozen=True)
class RunConfig:
    """The run: where, how, and how often it reports."""

    output: Annotated[Path | None, tyro.conf.arg(aliases=["--output"])] = None
    """Folder of logs, checkpoints and results; None: runs/<recipe or data and network>-<date>-<time>."""
    resume: Annotated[bool, tyro.conf.arg(aliases=["--resume"])] = False
    """Go on from output/checkpoint.pt, or start a run where there is none; a finished run is left as it is, and its
    result said. Settings that are not given are those of that run; on another number of processes, batch_size is such
    that a step has as many images."""
    evaluate: Annotated[bool, tyro.conf.arg(aliases=["--evaluate"])] = False
    """Only evaluate model.weights on the validation images; those of a run bring its data, network and image size."""
    resident: Annotated[bool, tyro.conf.arg(aliases=["--resident"])] = False
    """Train on one batch kept on the device, to measure the trainer without the loader; no checkpoints."""
    max_steps: int | None = None
    """Stop after this many steps, the schedule unchanged; --resume with a larger number, or none, goes on."""
    checkpoint_every: int = 1000
    """Steps between checkpoints, each with a line of the log; there is one before each validation too."""
    validate_every: int = 1
    """Epochs between validations; 0: only at the end."""
    log_every: int = 50
    """Steps between lines of the log."""
    seed: Annotated[int, tyro.conf.arg(aliases=["--seed"])] = 0
    """Seed of weights, order of images, augmentations and mollification."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto: a GPU where there is one."""
    amp: Literal["auto", "bf16", "off"] = "auto"
    """Mixed precision; auto: bfloat16 on a GPU, off on the CPU."""


@dataclass(frozen=True)
class Config:
    """All settings of a run, whatever its images are."""

    data: DataConfig = field(default_factory=DataConfig)
    mollify: MollifyConfig = field(default_factory=MollifyConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def title(self) -> str:
        """What its folder is called by default, before the date."""
        raise NotImplementedError

    @property
    def draws(self) -> int:
        """How often the network sees each image of a batch."""
        return self.mollify.draws if self.mollify.enabled else 1

    def plain(self) -> dict[str, Any]:
        """The settings as nested dicts of strings, numbers and lists, for JSON and for checkpoints."""
        return {name: _plain(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class ImageNetConfig(Config):
    """All settings of a run on images in folders."""

    data: FolderConfig = field(default_factory=FolderConfig)
    recipe: Literal["finetune", "scratch", "sample"] = "finetune"
    """Set of defaults for everything else. Left out: finetune, or sample where DATA is left out too. The defaults
    shown here are those of the recipe given beside --help."""

    @property
    def title(self) -> str:
        """The recipe."""
        return self.recipe


@dataclass(frozen=True)
class SmallConfig(Config):
    """All settings of a run on small images."""

    data: SmallDataConfig = field(default_factory=SmallDataConfig)

    @property
    def title(self) -> str:
        """Data, network, augmentation, and whether it is mollified."""
        parts = [Path(self.data.name).resolve().name, self.model.name, self.data.augment]
        return "-".join([*parts, "mollify"] if self.mollify.enabled else parts)


Kind = TypeVar("Kind", bound=Config)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
