"""``fastmoll corrupt``: write a corrupted set of one's own images, in the layout of the published ones."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fastmoll.cli.options import add_cells


def add(commands: Any) -> None:
    """Add the command to the sub-parsers of ``fastmoll``."""
    corrupt = commands.add_parser(
        "corrupt",
        help="write a corrupted set, in the layout of ImageNet-C or CIFAR-C",
        description="Write the corrupted images of a data set, in the layout of the published sets: files "
        "OUT/<corruption>/<severity>/<class>/<image>.JPEG, as ImageNet-C and TinyImageNet-C have, or arrays "
        "OUT/<corruption>.npy and OUT/labels.npy, as CIFAR-C has. Started again, it goes on where it was. "
        "To evaluate on corrupted images nothing needs to be written: fastmoll evaluate makes them as it goes.",
        epilog="Exit status: 0 success, 2 bad input or a full disk, 130 interrupted, 143 ended by SIGTERM.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    corrupt.add_argument(
        "data",
        metavar="DATA",
        help="clean images, as for training: cifar10, cifar100, tinyimagenet or digits, an archive or a folder of "
        "theirs, a folder of .npy files, or DATA/[split/]class/image.JPEG; images above 96 pixels are resized and "
        "cropped as for ImageNet-C",
    )
    corrupt.add_argument("out", type=Path, metavar="OUT", help="folder to write, new or of an earlier call")
    corrupt.add_argument("--split", default="val", metavar="NAME", help="part of DATA")
    corrupt.add_argument(
        "--size",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="height and width, in pixels (default: that of small images, else 224)",
    )
    add_cells(corrupt, ", of files: arrays (up to 32 pixels, without --format imagenet-c) have all five")
    corrupt.add_argument(
        "--format",
        dest="layout",
        choices=["auto", "imagenet-c", "cifar-c"],
        default="auto",
        help="files or arrays; auto: as published for the size, arrays up to 32 pixels",
    )
    corrupt.add_argument("--seed", type=int, default=0, metavar="N", help="seed of what is drawn")
    corrupt.add_argument("--quality", type=int, default=85, metavar="Q", help="of JPEG files, 1 to 95")
    corrupt.add_argument(
        "--threads", type=int, default=argparse.SUPPRESS, metavar="N", help="CPU threads (default: one per usable core)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the set, and say what there is now.

    Returns:
        Exit status: 0.

    Raises:
        ValueError: Bad input, before anything is written; a clean file that can't be decoded, when it is its turn.
        OSError: A file can't be read or written.
        ImportError: A package that DATA needs is missing.
    """
    # Loaded here: --help should not wait for torch.
    from fastmoll.pipelines.errors import BadImageError
    from fastmoll.robustness.writer import write_corrupted

    options = {name: value for name, value in vars(args).items() if name in _OPTIONS}
    try:
        written = write_corrupted(args.data, args.out, progress=True, **options)
    except BadImageError as error:
        raise ValueError(str(error)) from error
    sys.stdout.write(
        f"{written.root}: {len(written.corruptions)} x {len(written.severities)} cells of {written.count} images of "
        f"{written.size} x {written.size} pixels in {len(written.classes)} classes\n"
    )
    return 0


_OPTIONS = ("split", "size", "corruptions", "severities", "layout", "seed", "quality", "threads")
