"""``fastmoll evaluate``: error, NLL and calibration of a network, clean and over all corruptions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the sub-parsers of ``fastmoll``."""
    evaluate = commands.add_parser(
        "evaluate",
        help="evaluate a network on clean images and on all corruptions",
        description="Error, NLL and calibration of a network on clean images and on 15 corruptions at five severities, "
        "read as published or generated as it goes. Stopped and started again, it goes on with the next corruption and "
        "severity. On several GPUs: torchrun --nproc-per-node 8 -m fastmoll evaluate ...",
        epilog="Exit status: 0 success, 1 an error on the way (unreadable image, full disk), 2 bad input, before any "
        "work, 130 interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    evaluate.add_argument(
        "checkpoint",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="CHECKPOINT",
        help="checkpoint.pt, model.pt or folder of a run of ours, a file with a state dict (and --net), "
        "torchvision:NAME[:WEIGHTS], for example torchvision:resnet50:IMAGENET1K_V2, timm:NAME, or python:FUNCTION of "
        "your own, which returns a network with its weights: python:package.module:name or python:path/file.py:name",
    )
    evaluate.add_argument(
        "--data",
        default=argparse.SUPPRESS,
        metavar="DATA",
        help="clean images, as for training: cifar10, cifar100, tinyimagenet or digits, an archive or a folder of "
        "theirs, a folder of .npy files, or DATA/[split/]class/image.JPEG (default: what a run of ours was trained on)",
    )
    evaluate.add_argument(
        "--corrupted",
        default=argparse.SUPPRESS,
        metavar="SET",
        help="generated (the default): made from DATA as it goes; official:PATH: the folder of ImageNet-C, "
        "CIFAR-10/100-C or TinyImageNet-C, or of a set that fastmoll corrupt wrote. Generated frost needs the "
        "published pictures, from the folder $FASTMOLL_FROST or the package imagecorruptions-imaug; without them it is "
        "made from others",
    )
    evaluate.add_argument(
        "--out",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="folder of the results (default: beside the checkpoint: robustness-official, or, where that holds another "
        "set, with the name of the set's folder behind it; robustness-generated for images made on the way, with that "
        "name for a set that fastmoll corrupt wrote)",
    )
    evaluate.add_argument(
        "--net",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="network of a state dict that is not of a run of ours: its name, or a function or class of your own, "
        "package.module:name or path/file.py:name, called with num_classes if it has such a parameter",
    )
    evaluate.add_argument(
        "--classes",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="class names of the network's outputs, in their order, one a line (of ImageNet's: ls of its val folder): "
        "for data with some of these classes, whose outputs alone are compared",
    )
    evaluate.add_argument(
        "--split", default="val", metavar="NAME", help="part of DATA; val may be DATA itself, if it has class folders"
    )
    evaluate.add_argument(
        "--size",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="height and width of images made from DATA's larger ones, pixels (default: the network's, where known)",
    )
    evaluate.add_argument(
        "--corruptions", nargs="+", default=argparse.SUPPRESS, metavar="NAME", help="some only (default: all 15)"
    )
    evaluate.add_argument(
        "--severities", nargs="+", type=int, default=argparse.SUPPRESS, metavar="N", help="some only (default: 1 to 5)"
    )
    for name, words in (("mean", "mean"), ("std", "standard deviation")):
        evaluate.add_argument(
            f"--{name}",
            nargs=3,
            type=float,
            default=argparse.SUPPRESS,
            metavar=("R", "G", "B"),
            help=f"{words} per channel that the network expects, for pixels in [0, 1] (default: that of its training, "
            "or what is usual for DATA)",
        )
    evaluate.add_argument("--batch-size", type=int, default=256, metavar="N", help="images a batch, per process")
    evaluate.add_argument("--seed", type=int, default=0, metavar="N", help="seed of generated corruptions")
    evaluate.add_argument(
        "--predictions",
        action="store_true",
        help="save the logits of each cell as OUT/predictions/*.parquet; uncompressed 4 bytes a class and image",
    )
    evaluate.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if any")
    evaluate.add_argument(
        "--precision",
        choices=["auto", "bf16", "off"],
        default="auto",
        help="mixed precision; auto: bfloat16 on a GPU, off on the CPU",
    )
    evaluate.add_argument(
        "--threads", type=int, default=argparse.SUPPRESS, metavar="N", help="CPU threads of a process that decode"
    )
    evaluate.add_argument(
        "--rescore",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="OUT",
        help="compute all figures in OUT again, from its predictions, without the network and the images",
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, or score again.

    Returns:
        Exit status: 0 success, 1 an error on the way, 2 bad input, 130 interrupted.

    Raises:
        ValueError: arguments that don't go together.
    """
    rescoring = hasattr(args, "rescore")
    if rescoring and (given := _given(args) - {"rescore"}):
        names = sorted("CHECKPOINT" if name == "checkpoint" else f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--rescore needs nothing but its folder, got {', '.join(names)}")
    if not rescoring and not hasattr(args, "checkpoint"):
        raise ValueError("CHECKPOINT must be given (see fastmoll evaluate --help)")
    # Loaded here: --help should not wait for torch.
    from fastmoll.cli.evaluation import evaluate, rescore
    from fastmoll.distributed import together

    if rescoring:
        return together("cpu", lambda process: rescore(process, args.rescore))
    return together(args.device, lambda process: evaluate(process, args))


def _given(args: argparse.Namespace) -> set[str]:
    """The arguments that have another value than without the user's words."""
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    without = vars(parser.parse_args(["evaluate"]))
    return {name for name, value in vars(args).items() if name not in without or without[name] != value}
