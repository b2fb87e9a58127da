"""Readers of data sets, policies and DALI graphs; installed as ``fastmoll.pipelines``."""

from __future__ import annotations

import importlib.metadata
import importlib.util

MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's red, green and blue, for pixels in [0, 1]."""
STD = (0.229, 0.224, 0.225)
"""Their standard deviation."""

_BUILDS = {"nvidia-dali-cuda120": "cu12", "nvidia-dali-cuda130": "cu13"}


def check_dali() -> None:
    """Say what is wrong where DALI is missing, or there twice.

    Raises:
        ImportError: No DALI, or both of its builds, which overwrite each other's files.
    """
    installed = []
    for name in _BUILDS:
        try:
            importlib.metadata.version(name)
            installed.append(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if len(installed) > 1:
        raise ImportError(
            f"{' and '.join(installed)} are both installed and overwrite each other's files: uninstall both, then "
            f"pip install one of {', '.join(f'fastmoll[{extra}]' for extra in _BUILDS.values())}"
        )
    try:
        found = importlib.util.find_spec("nvidia.dali")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ImportError("decoding needs NVIDIA DALI: pip install 'fastmoll[cu12]', or fastmoll[cu13] for CUDA 13")
