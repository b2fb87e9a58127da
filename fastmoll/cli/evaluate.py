"""``fastmoll evaluate``: error, NLL and calibration of a network, clean and over all corruptions."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastmoll.cli.options import add_cells, name_option

if TYPE_CHECKING:
    from fastmoll.distributed import Process
    from fastmoll.robustness.results import Results

_TABLES: Final = (".md", ".csv")


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
        "checkpoints",
        nargs="*",
        default=argparse.SUPPRESS,
        metavar="CHECKPOINT",
        help="checkpoint.pt, model.pt or folder of a run of ours, the folder of a sweep, for its finished runs, a file "
        "with a state dict (and --net), torchvision:NAME[:WEIGHTS], for example torchvision:resnet50:IMAGENET1K_V2, "
        "timm:NAME, or python:FUNCTION of your own, which returns a network with its weights: "
        "python:package.module:name or python:path/file.py:name. Several are evaluated one after the other, with a "
        "table of all at the end",
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
        "robustness-generated for images made on the way, with that name for a set that fastmoll corrupt wrote; each "
        "with the name of a state dict's file that is not of a run of ours)",
    )
    evaluate.add_argument(
        "--net",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="network of state dicts that are not of runs of ours: its name, or a function or class of your own, "
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
    add_cells(evaluate)
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
        nargs="+",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="OUT",
        help="compute all figures in OUT, or in the evaluations with predictions in the folder of a run or a sweep, "
        "again, from these, without the network and the images",
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
        names = sorted("CHECKPOINT" if name == "checkpoints" else f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(
            f"--rescore needs nothing but its folder, got {', '.join(names)}: fastmoll evaluate --rescore "
            f"{' '.join(shlex.quote(str(folder)) for folder in args.rescore)}"
        )
    if not rescoring and not hasattr(args, "checkpoints"):
        raise ValueError("CHECKPOINT must be given (see fastmoll evaluate --help)")
    # Loaded here: --help should not wait for torch.
    from fastmoll.distributed import Stop, together

    def work(process: Process) -> None:
        try:
            _rescore(process, args.rescore) if rescoring else _evaluate(process, args)
        except Stop as stop:
            raise Stop(stop.message and name_option(stop.message, _parser()), stop.code) from stop

    return together("cpu" if rescoring else args.device, work)


def _rescore(process: Process, folders: Sequence[Path]) -> None:
    """Score the evaluations in these folders again."""
    from fastmoll.cli.evaluation import rescore

    with process.agree():
        found = {out.resolve(): str(out) for folder in folders for out in _evaluations(folder)} if process.main else {}
    outs = [*process.gather(found)[0].values()]
    if len(outs) == 1:
        rescore(process, Path(outs[0]))
    else:
        _one_by_one(process, {out: out for out in outs}, lambda out: rescore(process, Path(out)))


def _evaluations(folder: Path) -> list[Path]:
    """The folder of an evaluation, or those in the folder of a run or of many, without those without predictions."""
    from fastmoll.output import in_runs

    if (folder / "settings.json").exists():
        return [folder]
    settings = sorted(folder.glob("*/settings.json")) or in_runs(folder, "robustness-*/settings.json")
    found = [path.parent for path in settings]
    return [out for out in found if any((out / "predictions").glob("*.parquet"))] or found or [folder]


def _evaluate(process: Process, args: argparse.Namespace) -> None:
    """Evaluate a network, or several ones."""
    from fastmoll.cli.evaluation import check_arguments, evaluate
    from fastmoll.robustness.networks import read_names

    with process.agree():
        # Read once for all networks: it may be a pipe.
        names = read_names(args.classes) if hasattr(args, "classes") else None

    def one(checkpoint: str) -> Results:
        return evaluate(process, argparse.Namespace(**{**vars(args), "checkpoint": checkpoint}), names)

    first, *more = args.checkpoints
    if not more and not _runs(Path(first)):
        one(first)
        return
    with process.agree():
        if hasattr(args, "out"):
            what = f"{1 + len(more)} are given" if more else f"{first} is a folder of runs"
            raise ValueError(f"--out is for one network, but {what}")
        check_arguments(args)
        networks = _networks(process, args.checkpoints, getattr(args, "net", None)) if process.main else {}
    _one_by_one(process, process.gather(networks)[0], one)


def _networks(process: Process, checkpoints: Sequence[str], net: str | None) -> dict[str, str]:
    """What to evaluate, by what to call it: the finished ones of runs. Says what is left out.

    Raises:
        ValueError: there is nothing to evaluate, one names nothing, or one can't be of the network ``net``.
        ImportError: timm's without timm.
    """
    from fastmoll.output import run_weights, say
    from fastmoll.robustness.checkpoints import find_checkpoint

    found: dict[str, str] = {}
    for name in checkpoints:
        runs = {str(run.relative_to(name)) if len(checkpoints) == 1 else str(run): run for run in _runs(Path(name))}
        found |= {label: str(run) for label, run in runs.items()} or {name: name}
        if not (runs or Path(name).is_file() or (Path(name) / "config.json").is_file()):
            find_checkpoint(name)  # refuses one that names nothing before the others are evaluated
    # Of several names of a run, the first.
    once = {Path(x).resolve() if Path(x).exists() else x: label for label, x in reversed(found.items())}.values()
    found = {label: x for label, x in found.items() if label in once}
    kept: dict[str, str] = {}
    left_out: dict[str, list[str]] = {}
    for label, name in found.items():
        path = Path(name)
        if path.suffix in _TABLES and path.is_file():  # a shell's runs/* has those of a sweep in it
            left_out.setdefault("are no networks", []).append(label)
        elif (path / "config.json").is_file() and run_weights(path) is None:
            done = (path / "result.json").exists()
            reason = "are finished, but have no weights any more," if done else "are not finished"
            left_out.setdefault(f"runs {reason}", []).append(label)
        else:
            kept[label] = name
    if not kept:
        what = f"no run in {checkpoints[0]} is finished" if len(checkpoints) == 1 else "none of these is a finished run"
        raise ValueError(f"CHECKPOINT: {what}: {', '.join(found)}")
    if net is not None:
        for name in kept.values():
            find_checkpoint(name, net)
    for reason, names in left_out.items():
        say(process, f"{len(names)} of {len(found)} {reason} and left out: {', '.join(names)}")
    return kept


def _runs(folder: Path) -> list[Path]:
    """The runs in a folder that is none itself, be it of one sweep or of several, each once, in natural order."""
    from fastmoll.output import in_runs

    if (folder / "model.pt").exists():
        return []
    names = {path.parent.relative_to(folder) for path in in_runs(folder, "config.json", "model.pt")}
    # Links come first, so that of several names of a run its own is kept.
    links = {name: (folder / name).resolve() != folder.resolve() / name for name in names}
    runs = {(folder / x).resolve(): folder / x for x in sorted(names, key=lambda x: (not links[x], x))}.values()
    parts = {run: re.split(r"(\d+)", str(run.relative_to(folder))) for run in runs}
    return sorted(runs, key=lambda run: [int(part) if part.isdecimal() else part for part in parts[run]])


def _one_by_one(process: Process, places: Mapping[str, str], work: Callable[[str], Results | None]) -> None:
    """Do ``work`` at each place, then put all in one table; an error of one keeps no other from it.

    Args:
        process: This process.
        places: What there is to do, by what to call it.
        work: What each process does.

    Raises:
        Stop: on all processes, at the end, for such an error.
    """
    from fastmoll.distributed import Stop
    from fastmoll.output import say
    from fastmoll.robustness.summary import summary

    codes: list[int] = []
    failed: dict[str, list[str]] = {}
    results: dict[str, Results | None] = dict.fromkeys(places)
    for number, (name, place) in enumerate(places.items(), 1):
        if len(places) > 1:
            say(process, f"{number} of {len(places)}: {name}")
        try:
            results[name] = work(place)
        except Stop as stop:
            codes.append(stop.code)
            if stop.message is not None:
                message = name_option(stop.message, _parser())
                if message not in failed:  # what is wrong with all runs, as data that are not there, is said once
                    sys.stderr.write(f"error: {place}: {message}\n")
                failed.setdefault(message, []).append(name)
    for first, *others in failed.values():
        if others:
            sys.stderr.write(f"error: the same as for {first}: {', '.join(others)}\n")
    with process.agree():
        if process.main and len(places) > 1 and any(results.values()):
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None
            say(process, "\n" + summary(results, width))
    if codes:
        raise Stop(None, 2 if codes == [2] * len(places) else 1)


def _parser() -> argparse.ArgumentParser:
    """The parser of this command alone."""
    commands = argparse.ArgumentParser().add_subparsers()
    add(commands)
    parser: argparse.ArgumentParser = commands.choices["evaluate"]
    return parser


def _given(args: argparse.Namespace) -> set[str]:
    """The arguments that have another value than without the user's words."""
    without = vars(_parser().parse_args([]))
    return {name for name, value in vars(args).items() if name not in without or without[name] != value}
