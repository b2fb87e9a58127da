"""``fastmoll evaluate``: error, NLL and calibration of a network, clean and over all corruptions."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastmoll.distributed import Process
    from fastmoll.robustness.results import Results


def add(commands: Any) -> None:
    """Add the command to the sub-parsers of ``fastmoll``."""
    evaluate = commands.add_parser(
        "evaluate",
        help="evaluate a network on clean images and on all corruptions",
        description="Error, NLL and calibration of a network on clean images and on 15 corruptions at five severities, "
        "read as published or generated as it goes. Stopped and started again, it goes on with the next corruption and "
        "severity. On several GPUs: torchrun --nproc-per-node 8 -m fastmoll evaluate ...",
        epilog="Error in %, NLL in nats and ECE, how far confidence is from the share of right answers: lower is "
        "better. Exit status: 0 success, 1 an error on the way (unreadable image, full disk), 2 bad input, before any "
        "work, 130 interrupted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    evaluate.add_argument(
        "checkpoint",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="CHECKPOINT",
        help="checkpoint.pt, model.pt or folder of a run of ours, the folder of a sweep, whose finished runs are "
        "evaluated one after the other, a file with a state dict (and --net), "
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
        "CIFAR-10/100-C or TinyImageNet-C, or of a set that fastmoll corrupt wrote. Generated frost is of the "
        "published pictures where they are in the folder $FASTMOLL_FROST or in the package imagecorruptions-imaug, and "
        "of others elsewhere",
    )
    evaluate.add_argument(
        "--out",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="folder of the results (default: beside the checkpoint, or in runs/NAME where that is no file: "
        "robustness-official, or, where that holds another set, with the name of the set's folder behind it; "
        "robustness-generated for images made on the way, with that name for a set that fastmoll corrupt wrote)",
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
        "--threads",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="CPU threads that decode (default: a process's share of the usable cores, 16 at most)",
    )
    evaluate.add_argument(
        "--rescore",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="OUT",
        help="compute all figures in OUT, or in the one evaluation in the folder of a run, again, from its "
        "predictions, without the network and the images",
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
        raise ValueError(
            f"--rescore needs nothing but its folder, got {', '.join(names)}: fastmoll evaluate --rescore "
            f"{shlex.quote(str(args.rescore))}"
        )
    if not rescoring and not hasattr(args, "checkpoint"):
        raise ValueError("CHECKPOINT must be given (see fastmoll evaluate --help)")
    # Loaded here: --help should not wait for torch.
    from fastmoll.cli.evaluation import evaluate, rescore
    from fastmoll.distributed import together

    if rescoring:
        out = _evaluation(args.rescore)
        return together("cpu", lambda process: rescore(process, out))
    if _runs(Path(args.checkpoint)):
        return together(args.device, lambda process: _evaluate_runs(process, args))
    return together(args.device, lambda process: evaluate(process, args))


def _evaluation(folder: Path) -> Path:
    """The folder of an evaluation, or of the one that is in the folder of a run."""
    found = [path.parent for path in sorted(folder.glob("*/settings.json"))]
    if (folder / "settings.json").exists() or not found:
        return folder
    if len(found) > 1:
        raise ValueError(f"--rescore: {folder} has several evaluations: {', '.join(map(str, found))}")
    return found[0]


def _runs(folder: Path) -> list[Path]:
    """The runs in a folder that is none itself, each once, in natural order."""
    if (folder / "model.pt").exists():
        return []
    found = {path.parent for name in ("config.json", "model.pt") for path in folder.glob(f"*/{name}")}
    # Links come first, so that of several names of a run its own is kept.
    runs = {run.resolve(): run for run in sorted(found, key=lambda run: (not run.is_symlink(), run.name))}.values()
    parts = {run: re.split(r"(\d+)", run.name) for run in runs}
    return sorted(runs, key=lambda run: [int(part) if part.isdecimal() else part for part in parts[run]])


def _evaluate_runs(process: Process, args: argparse.Namespace) -> None:
    """Evaluate all finished runs in a folder, then put them in one table; an error of one keeps no other from it.

    Raises:
        Stop: on all processes, for arguments that are of one network, no finished run, or, at the end, such an error.
    """
    from fastmoll.cli.evaluation import check_arguments, evaluate
    from fastmoll.distributed import Stop
    from fastmoll.output import say
    from fastmoll.robustness.summary import summary

    with process.agree():
        folder = Path(args.checkpoint)
        runs = _runs(folder) if process.main else []
        finished = [run for run in runs if (run / "model.pt").is_file()]
        for name in ("net", "out"):
            if hasattr(args, name):
                raise ValueError(f"--{name} is for one network, but {folder} is a folder of runs")
        check_arguments(args)
        if process.main and not finished:
            raise ValueError(f"CHECKPOINT: no run in {folder} is finished: {', '.join(run.name for run in runs)}")
        if len(finished) < len(runs):
            names = ", ".join(run.name for run in runs if run not in finished)
            say(process, f"{len(runs) - len(finished)} of {len(runs)} runs are not finished and left out: {names}")
    codes: list[int] = []
    failed: dict[str, list[str]] = {}
    every = process.gather(finished)[0]
    results: dict[str, Results | None] = dict.fromkeys(run.name for run in every)
    for run in every:
        try:
            results[run.name] = evaluate(process, argparse.Namespace(**{**vars(args), "checkpoint": str(run)}))
        except Stop as stop:
            codes.append(stop.code)
            if stop.message is not None:
                if stop.message not in failed:  # what is wrong with all runs, as data that are not there, is said once
                    sys.stderr.write(f"error: {run}: {stop.message}\n")
                failed.setdefault(stop.message, []).append(run.name)
    for first, *others in failed.values():
        if others:
            sys.stderr.write(f"error: the same as for {first}: {', '.join(others)}\n")
    with process.agree():
        if process.main and len(every) > 1 and any(results.values()):
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None
            say(process, "\n" + summary(results, width))
    if codes:
        raise Stop(None, 2 if codes == [2] * len(every) else 1)


def _given(args: argparse.Namespace) -> set[str]:
    """The arguments that have another value than without the user's words."""
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    without = vars(parser.parse_args(["evaluate"]))
    return {name for name, value in vars(args).items() if name not in without or without[name] != value}
