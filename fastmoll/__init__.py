"""fastmoll: data mollification coupled with label smoothing, at ImageNet training speed.

The public names are loaded on first use: importing ``fastmoll`` loads neither DALI nor Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastmoll import losses
    from fastmoll.augment import Augment
    from fastmoll.corruptions import CORRUPTIONS, corrupt
    from fastmoll.kernels.cosine_noise import cosine_noise
    from fastmoll.kernels.heat_blur import blur_scale, heat_blur
    from fastmoll.kernels.soft_cross_entropy import soft_cross_entropy, soft_cross_entropy_short
    from fastmoll.kernels.soft_labels import SoftLabels, label_decay, soft_labels
    from fastmoll.loader import ImageNetLoader
    from fastmoll.metrics import ClassificationMetrics, calibration_error
    from fastmoll.models import create_model
    from fastmoll.mollify import Mollify
    from fastmoll.pipelines.errors import BadImageError, BadImageWarning
    from fastmoll.pipelines.small import SmallData
    from fastmoll.scoring import evaluate
    from fastmoll.small_loader import SmallImageLoader

__version__ = "0.2.0"

_HOME = {
    "CORRUPTIONS": "fastmoll.corruptions",
    "Augment": "fastmoll.augment",
    "BadImageError": "fastmoll.pipelines.errors",
    "BadImageWarning": "fastmoll.pipelines.errors",
    "ClassificationMetrics": "fastmoll.metrics",
    "ImageNetLoader": "fastmoll.loader",
    "Mollify": "fastmoll.mollify",
    "SmallData": "fastmoll.pipelines.small",
    "SmallImageLoader": "fastmoll.small_loader",
    "SoftLabels": "fastmoll.kernels.soft_labels",
    "blur_scale": "fastmoll.kernels.heat_blur",
    "calibration_error": "fastmoll.metrics",
    "corrupt": "fastmoll.corruptions",
    "cosine_noise": "fastmoll.kernels.cosine_noise",
    "create_model": "fastmoll.models",
    "evaluate": "fastmoll.scoring",
    "heat_blur": "fastmoll.kernels.heat_blur",
    "label_decay": "fastmoll.kernels.soft_labels",
    "soft_cross_entropy": "fastmoll.kernels.soft_cross_entropy",
    "soft_cross_entropy_short": "fastmoll.kernels.soft_cross_entropy",
    "soft_labels": "fastmoll.kernels.soft_labels",
}

__all__ = [  # noqa: RUF022
    "Mollify",
    "heat_blur",
    "blur_scale",
    "cosine_noise",
    "label_decay",
    "soft_labels",
    "soft_cross_entropy",
    "soft_cross_entropy_short",
    "SoftLabels",
    "losses",
    "create_model",
    "ImageNetLoader",
    "SmallImageLoader",
    "SmallData",
    "Augment",
    "corrupt",
    "CORRUPTIONS",
    "evaluate",
    "calibration_error",
    "ClassificationMetrics",
    "BadImageError",
    "BadImageWarning",
]


def __getattr__(name: str) -> Any:
    if name == "losses":
        return importlib.import_module("fastmoll.losses")
    if name not in _HOME:
        raise AttributeError(f"module 'fastmoll' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    # Kept under its own name, so that a submodule of the same name (fastmoll.kernels.heat_blur
    # is one level down, fastmoll.mollify is not a public name) never shadows it.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
