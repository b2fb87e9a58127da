"""Networks by name: those of the paper for small images, and all of torchvision and timm.

The paper's networks follow its appendix "Neural network architecture comparison" and the AugMix line of work it takes
them from. Where the published code and the published architecture differ, `create_model` says what was chosen.
"""

from __future__ import annotations

import copy
import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.resnet import Bottleneck, ResNet

from fastmoll.kernels.checks import check_integer, installed
from fastmoll.pipelines.errors import did_you_mean, nearest

SMALL: Final = 128
"""Below this height and width, pixels, networks that come in two forms take the one for small images."""


def create_model(
    name: str,
    num_classes: int,
    image_size: int = 32,
    *,
    small_stem: bool | None = None,
    fresh: bool = True,
) -> nn.Module:
    """A classification network with random weights, from images ``(B, 3, H, W)`` to logits ``(B, num_classes)``.

    For images of any size, meant for 32 or 64 pixels (no downsampling in the stem, global average pooling at the end):

    - ``presnet18``, ``presnet34``, ``presnet50``, ``presnet101``, ``presnet152``: pre-activation ResNets as in the
      paper. Unlike the textbook's they have no batch norm and ReLU before the pooling, and the projection of a shortcut
      sees the block's input as it is, not its activation.
    - ``allconv10``: All-CNN-C with batch norm, GELU, and max pooling with dropout in place of its strided convolutions.
      Its 1x1 convolutions have no padding, and the pooling is over all that is left; the paper's code pads them by 1
      and pools the upper left 8x8 pixels.
    - ``resnext29``: ResNeXt-29 of 4 groups of base width 32 (4x32d, as in AugMix, which writes 32x4).
    - ``densenet40``: DenseNet-40 of growth rate 12, no bottlenecks, no compression; 24 channels in its stem, as in
      AugMix (16 in the DenseNet paper).
    - ``wrn40``: Wide ResNet 40-2, no dropout.
    - ``googlenet`` below 128 pixels: three 3x3 convolutions as stem, two more in place of each 5x5, batch norm
      throughout (in the paper's code one batch norm of each block has its number of channels as epsilon; not here).
    - ``resnet18``, ``resnet50`` and all other ResNets of torchvision (``resnext50_32x4d``, ``wide_resnet50_2``) below
      128 pixels: torchvision's, but the stem is one 3x3 convolution of stride 1.

    Biases right before a batch norm, which change nothing, are left out. Any other name is that of a model of
    ``torchvision.models``, or, where that has none and timm is installed, of timm.

    Args:
        name: name of the network.
        num_classes: number of outputs, at least 1.
        image_size: height and width of the images it will see, pixels.
        small_stem: which form networks that come in two forms take; default: the one for small images below 128 pixels.
        fresh: whether the random weights will be trained from (some networks take seconds to draw good ones).

    Raises:
        ValueError: unknown name (names close ones), or a network that can't take images of that size.
    """
    check_integer("num_classes", num_classes, 1)
    check_integer("image_size", image_size, 1)
    check_model_name(name)
    small = image_size < SMALL if small_stem is None else small_stem
    try:
        if name in _NETWORKS and (small or name not in _torchvision_names()):
            model = _NETWORKS[name](num_classes)
        elif name in _torchvision_names():
            model = _from_torchvision(name, num_classes, image_size, fresh)
            if small and isinstance(model, ResNet):
                _shrink_stem(model)
        else:
            model = from_timm(name, num_classes, image_size)
        # On the meta device shapes are computed and nothing else: a network that can't take the images says so now.
        with torch.no_grad():
            trial = copy.deepcopy(model).eval().to("meta")
            trial(torch.empty(2, 3, image_size, image_size, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ValueError(f"name: {name} can't take images of {image_size}×{image_size} pixels: {error}") from error
    return model


def check_model_name(name: str, option: str = "name") -> None:
    """Raise ``ValueError``, with close names, unless `create_model` knows ``name``, which was given by ``option``."""
    if not isinstance(name, str):
        raise ValueError(f"{option} must be a string, got {name!r}")
    known = [*_NETWORKS, *_torchvision_names()]
    if name in known:
        return
    if is_timm(name):
        tagged = importlib.import_module("timm.models").get_arch_pretrained_cfgs(name.partition(".")[0])
        if "." not in name or name in tagged:
            return
        raise ValueError(f"{option}: timm has no {name!r}, only {', '.join(tagged) or 'the name without a tag'}")
    names, lacking = known, "; timm, which has more, is not installed (pip install timm)"
    lists = "the classifiers in torchvision.models.list_models()"
    if installed("timm"):
        names, lacking = known + importlib.import_module("timm").list_models(), ""
        lists += " and timm.list_models()"
    hint = did_you_mean(nearest(name, names, 3), f"; there are {', '.join(_NETWORKS)}, and {lists}")
    raise ValueError(f"{option}: there is no classification model {name!r}{hint}{lacking}")


def is_timm(name: str) -> bool:
    """Whether `create_model` takes a network of that name from timm; of one with a tag, what is in front of that."""
    if name in _NETWORKS or name in _torchvision_names() or not installed("timm"):
        return False
    return bool(importlib.import_module("timm").is_model(name))


def _torchvision_names() -> list[str]:
    names: list[str] = models.list_models(module=models)
    return names


def _from_torchvision(name: str, num_classes: int, image_size: int, fresh: bool) -> nn.Module:
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        # Without the auxiliary classifiers every network is a plain function from images to logits. The weights that
        # torchvision has for these two are for images in [-1, 1]; told to, they make them of standardised ones.
        options = {"aux_logits": False, "init_weights": fresh, "transform_input": True}
    elif name.startswith("vit_"):
        options = {"image_size": image_size}
    elif name == "maxvit_t":
        options = {"input_size": (image_size, image_size)}
    model: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **options)
    return model


def from_timm(name: str, num_classes: int, image_size: int, *, pretrained: bool = False) -> nn.Module:
    """A network of timm, with random weights or with those that its name says; arguments as for `create_model`."""
    timm = importlib.import_module("timm")
    # Only networks that are built for one size take it as an argument. (Of old names of theirs timm says nothing.)
    fixed = getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
    options = {"img_size": image_size} if fixed else {}
    model: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **options)
    return model


# --- parts ------------------------------------------------------------------------------------------------------------


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _activation(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def _head(channels: int, num_classes: int) -> dict[str, nn.Module]:
    return {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classifier": nn.Linear(channels, num_classes)}


def _he(model: nn.Module) -> nn.Module:
    """Draw the weights of convolutions from N(0, 2 / (kernel area x outputs)), and zero the classifier's bias."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


class _PreActivation(nn.Module):
    """A residual block with batch norm and ReLU in front of each convolution.

    Args:
        inputs: channels of its input.
        convolutions: channels and kernel size of each convolution.
        stride: of the first convolution that is not 1x1.
        activated: whether a projection on the shortcut sees the activated input.
    """

    def __init__(self, inputs: int, convolutions: Sequence[tuple[int, int]], stride: int, *, activated: bool) -> None:
        super().__init__()
        outputs = convolutions[-1][0]
        projected = stride != 1 or inputs != outputs
        self.activated = activated and projected
        self.activation = nn.Sequential(*_activation(inputs))
        self.shortcut = _convolution(inputs, outputs, 1, stride) if projected else nn.Identity()
        layers: list[nn.Module] = []
        for channels, kernel in convolutions:
            layers += _activation(inputs) if layers else []
            layers.append(_convolution(inputs, channels, kernel, stride if kernel > 1 else 1))
            stride = 1 if kernel > 1 else stride
            inputs = channels
        self.residual = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        active = self.activation(x)
        out: Tensor = self.shortcut(active if self.activated else x) + self.residual(active)
        return out


class _DenseLayer(nn.Module):
    """A convolution, behind batch norm and ReLU, whose output is appended to its input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_activation(inputs), _convolution(inputs, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.layers(x)), 1)


class _Inception(nn.Module):
    """Branches of convolutions side by side, their outputs one after the other.

    Args:
        inputs: channels of the input.
        one: channels of the 1x1 branch.
        three: channels of the 3x3 branch, after its 1x1 and at its end.
        five: likewise of the 5x5 branch, which is two 3x3 convolutions.
        pool: channels of the branch of a max pooling.
    """

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.one = _plain(inputs, (one, 1))
        self.three = _plain(inputs, (three[0], 1), (three[1], 3))
        self.five = _plain(inputs, (five[0], 1), (five[1], 3), (five[1], 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _plain(inputs, (pool, 1)))
        self.outputs = one + three[1] + five[1] + pool

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def _plain(inputs: int, *convolutions: tuple[int, int]) -> nn.Sequential:
    """Convolutions (channels, kernel size), each with batch norm and ReLU behind it."""
    layers: list[nn.Module] = []
    for channels, kernel in convolutions:
        layers += [_convolution(inputs, channels, kernel), *_activation(channels)]
        inputs = channels
    return nn.Sequential(*layers)


# --- networks ---------------------------------------------------------------------------------------------------------


def _presnet(num_classes: int, *, blocks: Sequence[int], bottleneck: bool) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_convolution(3, 64, 3))
    inputs = 64
    for stage, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True)):
        shape = ((width, 1), (width, 3), (4 * width, 1)) if bottleneck else ((width, 3), (width, 3))
        residuals = []
        for i in range(count):
            residuals.append(_PreActivation(inputs, shape, 2 if stage and not i else 1, activated=False))
            inputs = shape[-1][0]
        layers[f"stage{stage + 1}"] = nn.Sequential(*residuals)
    # PyTorch's own initial weights, as in the paper's code.
    return nn.Sequential(layers | _head(inputs, num_classes))


def _wrn40(num_classes: int) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_convolution(3, 16, 3))
    inputs = 16
    for stage, width in enumerate((32, 64, 128)):
        residuals = []
        for i in range(6):
            shape = ((width, 3), (width, 3))
            residuals.append(_PreActivation(inputs, shape, 2 if stage and not i else 1, activated=True))
            inputs = width
        layers[f"stage{stage + 1}"] = nn.Sequential(*residuals)
    layers["activation"] = nn.Sequential(*_activation(inputs))
    return _he(nn.Sequential(layers | _head(inputs, num_classes)))


def _densenet40(num_classes: int) -> nn.Module:
    growth = 12
    channels = 2 * growth
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_convolution(3, channels, 3))
    for block in range(3):
        if block:
            layers[f"transition{block}"] = nn.Sequential(
                *_activation(channels), _convolution(channels, channels, 1), nn.AvgPool2d(2)
            )
        dense = []
        for _ in range(12):
            dense.append(_DenseLayer(channels, growth))
            channels += growth
        layers[f"block{block + 1}"] = nn.Sequential(*dense)
    layers["activation"] = nn.Sequential(*_activation(channels))
    return _he(nn.Sequential(layers | _head(channels, num_classes)))


def _allconv10(num_classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for channels in (96, 96, 96, None, 192, 192, 192, None):
        if channels is None:
            layers += [nn.MaxPool2d(2), nn.Dropout(0.5)]
        else:
            layers += [_convolution(inputs, channels, 3), nn.BatchNorm2d(channels), nn.GELU()]
            inputs = channels
    for kernel in (3, 1, 1):  # none of them padded
        layers += [nn.Conv2d(inputs, inputs, kernel, bias=False), nn.BatchNorm2d(inputs), nn.GELU()]
    return _he(nn.Sequential(OrderedDict(features=nn.Sequential(*layers)) | _head(inputs, num_classes)))


def _resnext29(num_classes: int) -> nn.Module:
    model = ResNet(Bottleneck, [3, 3, 3, 1], groups=4, width_per_group=32)
    model.layer4 = nn.Identity()
    model.fc = nn.Linear(256 * Bottleneck.expansion, num_classes)
    _shrink_stem(model)
    whole: nn.Module = model
    return whole


def _googlenet(num_classes: int) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_plain(3, (64, 3), (64, 3), (192, 3)))
    inputs = 192
    # Going Deeper with Convolutions, table 1: its stages 3, 4 and 5.
    stages: list[list[tuple[int, tuple[int, int], tuple[int, int], int]]] = [
        [(64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64)],
        [
            (192, (96, 208), (16, 48), 64),
            (160, (112, 224), (24, 64), 64),
            (128, (128, 256), (24, 64), 64),
            (112, (144, 288), (32, 64), 64),
            (256, (160, 320), (32, 128), 128),
        ],
        [(256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128)],
    ]
    for number, stage in enumerate(stages, 3):
        layers[f"pool{number}"] = nn.MaxPool2d(3, stride=2, padding=1)
        blocks = []
        for one, three, five, pool in stage:
            blocks.append(_Inception(inputs, one, three, five, pool))
            inputs = blocks[-1].outputs
        layers[f"stage{number}"] = nn.Sequential(*blocks)
    head = _head(inputs, num_classes)
    classifier = head.pop("classifier")
    return nn.Sequential(layers | head | {"dropout": nn.Dropout(0.4), "classifier": classifier})


def _shrink_stem(model: ResNet) -> None:
    """Let a ResNet of torchvision see small images at their own resolution."""
    model.conv1 = _convolution(3, 64, 3)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()


_NETWORKS: Final[dict[str, Callable[[int], nn.Module]]] = {
    "presnet18": partial(_presnet, blocks=(2, 2, 2, 2), bottleneck=False),
    "presnet34": partial(_presnet, blocks=(3, 4, 6, 3), bottleneck=False),
    "presnet50": partial(_presnet, blocks=(3, 4, 6, 3), bottleneck=True),
    "presnet101": partial(_presnet, blocks=(3, 4, 23, 3), bottleneck=True),
    "presnet152": partial(_presnet, blocks=(3, 8, 36, 3), bottleneck=True),
    "allconv10": _allconv10,
    "resnext29": _resnext29,
    "densenet40": _densenet40,
    "wrn40": _wrn40,
    "googlenet": _googlenet,
}
