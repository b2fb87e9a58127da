"""Readers of data sets, policies and DALI graphs; installed as ``fastmoll.pipelines``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's red, green and blue, for pixels in [0, 1]."""
STD = (0.229, 0.224, 0.225)
"""Their standard deviation."""

_BUILDS = {"nvidia-dali-cuda120": "cu12", "nvidia-dali-cuda130": "cu13"}


def check_standardisation(
    mean: Sequence[float], std: Sequence[float], options: tuple[str, str] = ("--mean", "--std")
) -> None:
    """Refuse what can't be mean and standard deviation of pixels in [0, 1], as those on the scale of 0 to 255.

    Args:
        mean: A number per colour channel.
        std: Likewise.
        options: What the user gave them by, for the message.

    Raises:
        ValueError: a mean outside [0, 1] or a deviation outside (0, 1].
    """
    for option, values, lowest in ((options[0], mean, "["), (options[1], std, "(")):
        if not all(0 <= value <= 1 and (value > 0 or lowest == "[") for value in values):
            raise ValueError(
                f"{option} must be in {lowest}0, 1], for pixels in [0, 1], got {' '.join(f'{x:g}' for x in values)}"
            )


def check_dali() -> None:
    """Say what is wrong where DALI is missing, or there twice.

    Raises:
        ImportError: No DALI, or both of its builds, which overwrite each other's files.
    """
    from importlib import metadata  # which the command line's --help should not wait for

    installed = []
    for name in _BUILDS:
        try:
            metadata.version(name)
            installed.append(name)
        except metadata.PackageNotFoundError:
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
