"""The ``fastmoll`` command.

``check`` a data set, ``preview`` mollification of an image, ``sweep`` through runs, ``evaluate`` them on corrupted
images, ``corrupt`` a data set, ``report`` what came out.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, NoReturn

import fastmoll
from fastmoll.cli import corrupt, evaluate, report
from fastmoll.cli.options import name_option
from fastmoll.interrupt import importing, open_streams, reader_gone, tidying
from fastmoll.pipelines import check_standardisation
from fastmoll.pipelines.errors import did_you_mean, in_words, nearest

_OF_THEIR_OWN: Final[dict[str, Any]] = {"corrupt": corrupt, "evaluate": evaluate, "report": report}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other bad input, instead of the usage in front of it."""
        command = re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)", message)
        if command is not None:
            message += did_you_mean(nearest(command[1], re.findall(r"\w+", command[2])))
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def check_options(self, words: Iterable[str]) -> None:
        """Refuse empty words and unknown options, before argparse complains of what is missing without these."""
        known = self._option_string_actions
        for word in words:
            name, equals, value = word.partition("=")
            if name == "--":
                return
            if not word or (name in known and equals and not value):
                # An empty path would be the current folder.
                self.error(f"{name or 'an argument'} is empty: is a variable of the shell not set?")
            if name.startswith("--") and name not in known:
                self.error(f"there is no option {name}{did_you_mean(nearest(name, known))}")


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser of the command line, and those of the commands."""
    parser = _Parser(
        prog="fastmoll",
        description="Robust classifiers from mollified images. Training: torchrun -m fastmoll.train.imagenet --help, "
        "and fastmoll.train.small_images.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fastmoll {fastmoll.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser(
        "check",
        help="decode every file of a data set, list the bad and the odd ones",
        description="Decode every file of a data set in parallel with DALI's CPU decoder, and list those that are bad "
        "(training stops on them, unless it is told to take others) or odd (handled, but worth knowing: a PNG named "
        ".JPEG, CMYK, an EXIF orientation, corrupt data), each with its reason, and classes that training refuses. "
        "Files with other extensions than an image's are counted.",
        epilog="Exit status: 0 all good, 1 files or classes were listed, 2 bad usage or no data set there.",
        allow_abbrev=False,
    )
    check.add_argument("data", type=Path, metavar="DATA", help="data folder: DATA/[split/]class/image.JPEG")
    check.add_argument(
        "--split", metavar="NAME", help="check DATA/NAME only (default: train, val, ... where they exist)"
    )
    check.add_argument("--allow-odd", action="store_true", help="exit with 0 if no file is worse than odd")
    check.add_argument(
        "--threads", type=int, metavar="N", help="files decoded at a time (default: one per usable core)"
    )

    preview = commands.add_parser(
        "preview",
        help="draw an image across roles and temperatures",
        description="Draw an image clean, noised and blurred at several temperatures, with the temperature t, the "
        "standard deviation σ_t of the noise (the image's own is 1) or σ_B of the blur (in pixels), and the label "
        "decay γ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    preview.add_argument("image", type=Path, metavar="IMAGE", help="image file of any format Pillow reads")
    preview.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="picture to write, .png or .jpg",
    )
    preview.add_argument("--size", type=int, default=224, metavar="N", help="side of the centre crop, in pixels")
    preview.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="T",
        help="columns, each in [0, 1] (default: 0 0.25 0.5 0.75 1)",
    )
    preview.add_argument("--sigma-min", type=float, default=0.3, metavar="S", help="blur scale at t = 0, in pixels")
    preview.add_argument(
        "--sigma-max",
        type=float,
        default=argparse.SUPPRESS,
        metavar="S",
        help="blur scale at t = 1, in pixels (default: the width)",
    )
    preview.add_argument("--k-noise", type=float, default=1.0, metavar="K", help="exponent of the noise's label decay")
    preview.add_argument("--k-blur", type=float, default=1.0, metavar="K", help="exponent of the blur's label decay")
    preview.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the noise")

    sweep = commands.add_parser(
        "sweep",
        help="train all runs of a file, and put the results in one table",
        description="Train the runs of a file that are not done yet, one at a time per GPU, each in a folder of its "
        "own, in which it is resumed; then write table.md and table.csv: mean and standard deviation over seeds, next "
        "to the paper's numbers. Sweeps that share a folder share the work.",
        epilog="A job array: --task $SLURM_ARRAY_TASK_ID/8 with --array=1-8. Exit status: 0 no run failed, 1 some did, "
        "or a result is damaged, 2 bad input, before anything is trained, 130 interrupted, 143 ended by SIGTERM.",
        allow_abbrev=False,
    )
    sweep.add_argument(
        "file",
        metavar="FILE",
        help="TOML file; paper.toml, the paper's experiments, is part of fastmoll and an example",
    )
    sweep.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: runs/<name of FILE>)")
    sweep.add_argument(
        "--filter",
        dest="filters",
        action="append",
        default=[],
        metavar="TEXT",
        help="only runs with this name, this value (cifar10), this key=value (mollify=false, optim.epochs=30) or, if "
        "none has, this in their name; may be given several times, then all must match",
    )
    sweep.add_argument("--task", metavar="I/N", help="only part I of N equal parts, counted from 1")
    sweep.add_argument(
        "--device", choices=["auto", "cuda", "cpu"], default="auto", help="what to train on (default: GPUs, if any)"
    )
    sweep.add_argument("--gpus", metavar="LIST", help="GPUs, as in CUDA_VISIBLE_DEVICES: 0,2 (default: all)")
    only = sweep.add_mutually_exclusive_group()
    only.add_argument(
        "--list", dest="action", action="store_const", const="list", help="list the runs and how far they are, no more"
    )
    only.add_argument(
        "--table", dest="action", action="store_const", const="table", help="write and print the table, no more"
    )
    sweep.set_defaults(action="run")

    for module in _OF_THEIR_OWN.values():
        module.add(commands)
    return parser, commands.choices


def _check_words(command: str, args: argparse.Namespace) -> None:
    """Refuse what the words alone show to be wrong, before torch is loaded, which takes seconds.

    Raises:
        ValueError: names the parameter and its value.
    """
    if command == "preview" and not args.image.exists():
        raise ValueError(f"image {args.image} does not exist")
    if command == "sweep":
        from fastmoll.sweep.arguments import find_file, parse_task

        find_file(args.file)
        parse_task(args.task)
    if command in ("corrupt", "evaluate") and not hasattr(args, "rescore"):  # which takes no such words
        from fastmoll.kernels.corruption_constants import CORRUPTIONS, SEVERITIES
        from fastmoll.pipelines.corrupted import check_cells

        check_cells(getattr(args, "corruptions", CORRUPTIONS), getattr(args, "severities", SEVERITIES))
        if hasattr(args, "mean") != hasattr(args, "std"):
            lacking = "--std" if hasattr(args, "mean") else "--mean"
            raise ValueError(f"{lacking} must be given, too: --mean and --std belong together")
        if hasattr(args, "mean"):
            check_standardisation(args.mean, args.std)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Words after the program's name, by default the process's own.

    Returns:
        Exit status: 0 success, 1 ``check`` listed files or a run of ``sweep`` failed, 2 bad input, 130 interrupted, 141
        whoever read the output (``| head``) closed it, 143 a ``sweep``, ``corrupt`` or ``report`` got a SIGTERM.
    """
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a terminal's encoding lacks (σ, ×) must not end a check; a pipe's reader should see lines as they come.
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        status = _run(arguments)
        if status == 128 + signal.SIGINT and arguments is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the interpreter as it ends
        return status
    except BrokenPipeError:
        return reader_gone()


def _run(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    parser, commands = _parser()
    place = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
    try:
        parser.check_options(words[:place])
        command = next(iter(words[place:]), "")
        if command not in commands or place:
            parser.parse_args(words)  # --help, --version or an error
        commands[command].check_options(words[place + 1 :])
        chosen = commands[command]
        # RUN --out DIR RUN, too; but that way, argparse takes no words that begin with a dash after --.
        parse = chosen.parse_known_args if "--" in words else chosen.parse_known_intermixed_args
        args, unknown = parse(words[place + 1 :])
    except SystemExit as stop:  # argparse ends the process for --help, --version and bad usage
        return stop.code if isinstance(stop.code, int) else 0
    options = vars(args)
    if unknown:  # argparse would name the help of all commands, which has no options of this one
        sys.stderr.write(f"error: unrecognized arguments: {' '.join(unknown)} (see fastmoll {command} --help)\n")
        return 2
    try:
        with importing():
            importlib.import_module("numpy")
        _check_words(command, args)
        if command != "check":  # whose parent has no use for torch
            with importing():
                importlib.import_module("torch")
        if command in _OF_THEIR_OWN:
            # Processes of an evaluation wait for each other: one that is told to end does so at once.
            with tidying() if command != "evaluate" else nullcontext():
                status: int = _OF_THEIR_OWN[command].run(args)
            return status
        # The modules are loaded here: neither --help nor the parent of check's workers should wait for torch.
        if command == "check":
            from fastmoll.check import run_check

            return run_check(**options)
        if command == "sweep":
            from fastmoll.sweep.run import run_sweep

            return run_sweep(**options)
        from fastmoll.preview import write_preview

        write_preview(**options)
        sys.stdout.write(f"{args.output}\n")
        return 0
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        message = " ".join(in_words(error).split())
        if isinstance(error, ValueError):  # others begin with the name of a file
            message = name_option(message, commands[command])
        # Under torchrun, all processes have the same words.
        if command != "evaluate" or os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {message}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
