"""``fastmoll evaluate``: error, NLL and calibration of a network, clean and over all corruptions."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fastmoll.distributed import Process
    from fastmoll.pipelines.corrupted import CorruptedSet
    from fastmoll.robustness.checkpoints import Checkpoint
    from fastmoll.robustness.results import Cell, Results
    from fastmoll.robustness.stored_images import StoredImages


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
        help="folder of the results (default: robustness-generated or robustness-official, beside the checkpoint)",
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
    from fastmoll.distributed import together

    return together(
        "cpu" if rescoring else args.device, lambda process: (_rescore if rescoring else _evaluate)(process, args)
    )


def _given(args: argparse.Namespace) -> set[str]:
    """The arguments that have another value than without the user's words."""
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    without = vars(parser.parse_args(["evaluate"]))
    return {name for name, value in vars(args).items() if name not in without or without[name] != value}


def _evaluate(process: Process, args: argparse.Namespace) -> None:
    import torch

    from fastmoll.output import lock, say
    from fastmoll.robustness.loader import CorruptedLoader, cell_digests
    from fastmoll.robustness.measure import measure
    from fastmoll.robustness.networks import SomeOutputs, describe_outputs
    from fastmoll.robustness.results import Results, add_to_result, cell_name, environment
    from fastmoll.scoring import image_dtype

    with ExitStack() as stack:
        with process.agree():
            checkpoint, clean, corrupted, cells = _open(args)
            size, num_classes = clean.size, len(clean.classes)
            mean, std = _standardisation(args, checkpoint, clean)
            model, outputs, kept = _network(args, process, checkpoint, clean)
            if process.main:
                header = _header(args, checkpoint, clean, corrupted, outputs)
                fingerprint = _fingerprint(args, process, model, clean, corrupted, (mean, std))
                fingerprint["network"] = checkpoint.net
                if kept is not None:
                    fingerprint["choice of outputs"] = describe_outputs(kept, outputs)
                out = getattr(args, "out", checkpoint.folder / f"robustness-{header['source']}")
                digests = {} if corrupted is None else cell_digests(corrupted)
                images = {cell_name(cell): content for cell, content in digests.items()}
                results = Results(out, header, fingerprint, environment(process), images)
                stack.enter_context(lock(out, "--out"))
                results.begin()
        results = process.gather(results if process.main else None)[0]
        on_gpu = process.device.type == "cuda"
        if kept is not None:
            model = SomeOutputs(model, kept).to(process.device).eval()
        if on_gpu:
            model.to(memory_format=torch.channels_last)
        process.copy_from_main(model)
        options: dict[str, Any] = {
            "batch_size": args.batch_size,
            "device": process.device,
            "rank": process.rank,
            "world_size": process.world_size,
            "dtype": image_dtype(process.device, args.precision),
            "mean": mean,
            "std": std,
            "num_threads": getattr(args, "threads", None),
        }

        def open_loader(cell: Cell) -> CorruptedLoader:
            if cell is None:
                return CorruptedLoader.generated(clean, **options)
            if corrupted is None:
                return CorruptedLoader.generated(clean, *cell, seed=args.seed, **options)
            return CorruptedLoader.official(corrupted, *cell, **options)

        say(
            process,
            f"{checkpoint.name} on {clean.root}: {len(clean)} images of {size} x {size} pixels, {num_classes} classes"
            f"{f' of {outputs}' if kept is not None else ''}, {len(cells)} cells; standardised by {_triple(mean)} and "
            f"{_triple(std)}; results in {results.out}",
        )
        measure(
            process,
            model,
            results,
            cells,
            open_loader,
            num_classes=num_classes,
            precision=args.precision,
            channels_last=on_gpu,
            predictions=args.predictions,
        )
        with process.agree():
            if process.main:
                content = results.finish()
                _show(process, results, content is not None)
                if content is not None and checkpoint.validated_on(args.data, args.split, clean):
                    add_to_result(checkpoint.folder, content)


def _rescore(process: Process, args: argparse.Namespace) -> None:
    from fastmoll.output import lock
    from fastmoll.robustness.measure import rescore
    from fastmoll.robustness.results import Results

    with process.agree():
        if process.main:
            results = Results.open(args.rescore)
            with lock(args.rescore, "--rescore"):
                rescore(process, results)
                _show(process, results, results.finish() is not None)


def _show(process: Process, results: Results, finished: bool) -> None:
    from fastmoll.output import say
    from fastmoll.robustness.results import table

    say(process, "\n" + table(results))
    if finished:
        say(process, str(results.out / "robustness.json"))
    else:
        say(
            process,
            f"{results.out / 'cells'}: the figures, a file for each; a report needs all 75 cells and the clean images: "
            "evaluate again to add the others",
        )


def _open(args: argparse.Namespace) -> tuple[Checkpoint, StoredImages, CorruptedSet | None, list[Cell]]:
    """The network, the clean images and the corrupted ones (None: to be generated), and the cells that are wanted."""
    from fastmoll.corruptions import CORRUPTIONS, SEVERITIES
    from fastmoll.kernels.checks import check_integer
    from fastmoll.pipelines.corrupted import check_cells, open_corrupted
    from fastmoll.pipelines.files import ImageFolder
    from fastmoll.robustness.checkpoints import find_checkpoint
    from fastmoll.robustness.predictions import check_parquet
    from fastmoll.robustness.stored_images import open_clean

    wanted = getattr(args, "corrupted", "generated")
    kind, _, place = wanted.partition(":")
    if not (wanted == "generated" or (kind == "official" and place)):
        raise ValueError(f"--corrupted must be generated or official:PATH, got {wanted!r}")
    check_integer("--batch-size", args.batch_size, 1)
    check_integer("--seed", args.seed, 0, 2**63)
    if hasattr(args, "mean") != hasattr(args, "std"):
        raise ValueError("--mean and --std belong together")
    if args.predictions:
        check_parquet()
    names, levels = check_cells(getattr(args, "corruptions", CORRUPTIONS), getattr(args, "severities", SEVERITIES))
    checkpoint = find_checkpoint(args.checkpoint, getattr(args, "net", None))
    corrupted = open_corrupted(place, corruptions=names, severities=levels) if kind == "official" else None
    given = hasattr(args, "size")
    size = getattr(args, "size", checkpoint.size)
    if corrupted is not None:
        if given and size != corrupted.size:
            raise ValueError(f"--size must be {corrupted.size}, that of the images in {place}, got {size}")
        size = corrupted.size
    where = None
    if not hasattr(args, "data"):
        args.data, where = checkpoint.data
    clean = open_clean(args.data, args.split, size, where)
    if isinstance(clean.pixels, ImageFolder) and checkpoint.size is None and corrupted is None and not given:
        raise ValueError(
            f"--size must be given: neither {checkpoint.name} nor {clean.root} says how many pixels the network "
            "expects (224 is usual)"
        )
    if corrupted is not None:
        if corrupted.classes != clean.classes:
            # Of arrays, which have no names, the number is compared; of folders, this says what differs.
            corrupted = open_corrupted(place, classes=clean.classes, corruptions=names, severities=levels)
        if corrupted.count != len(clean):
            raise ValueError(
                f"--corrupted: {place} has {corrupted.count} images of each kind, but {clean.root} has {len(clean)}"
            )
        if corrupted.kind == "cifar-c":
            _check_labels(corrupted, clean)
    return checkpoint, clean, corrupted, [None, *((name, level) for name in names for level in levels)]


def _check_labels(corrupted: CorruptedSet, clean: StoredImages) -> None:
    """Refuse arrays with other labels than the clean images have."""
    import numpy as np

    ours = corrupted.arrays(corrupted.corruptions[0], corrupted.severities[0])[1]
    if (np.diff(clean.labels) >= 0).all():
        ours = np.sort(ours)  # class folders have the images class by class, the published arrays as they came
    apart = np.flatnonzero(ours != clean.labels)
    if len(apart):
        at = int(apart[0])
        raise ValueError(
            f"--corrupted: {corrupted.root / 'labels.npy'} has other labels than {clean.root}: the first at position "
            f"{at}, {ours[at]} there and {clean.labels[at]} here"
        )


def _network(
    args: argparse.Namespace, process: Process, checkpoint: Checkpoint, clean: StoredImages
) -> tuple[nn.Module, int, list[int] | None]:
    """The network on its device, the number of its outputs, and which of them are compared (None: all, in order)."""
    from fastmoll.robustness.networks import count_outputs, read_names

    file = getattr(args, "classes", None)
    names = None if file is None else read_names(file)
    expected, kept = checkpoint.choose_outputs(clean.classes, clean.root, names, file)
    model = checkpoint.build(expected, clean.size, process.main).to(process.device).eval()
    found = count_outputs(model, clean.size, checkpoint.name)
    checkpoint.check_outputs(found, expected, clean.root if file is None else file)
    return model, found, kept


def _triple(values: Any) -> str:
    return f"({', '.join(f'{value:.4g}' for value in values)})"


def _standardisation(args: argparse.Namespace, checkpoint: Checkpoint, clean: StoredImages) -> tuple[Any, Any]:
    if hasattr(args, "mean"):
        return args.mean, args.std
    known = checkpoint.standardisation or clean.standardisation
    if known is None:
        raise ValueError(
            f"--mean and --std must be given: neither {checkpoint.name} nor {clean.root} says which the network expects"
        )
    return known


def _header(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    clean: StoredImages,
    corrupted: CorruptedSet | None,
    outputs: int,
) -> dict[str, Any]:
    """The keys of ``robustness.json`` that are no figures."""
    from fastmoll.kernels.frost_textures import frost_source
    from fastmoll.robustness.results import has_baseline, is_imagenet

    source, frost = ("generated", frost_source()) if corrupted is None else (corrupted.source, corrupted.frost)
    return {
        "source": source,
        "frost": frost,
        "data": "imagenet" if is_imagenet(clean.classes) else clean.name,
        "size": clean.size,
        "num_classes": len(clean.classes),
        "outputs": outputs,
        "net": checkpoint.net,
        **checkpoint.training,
        "checkpoint": checkpoint.name,
        "count": len(clean),
        "baseline": has_baseline(clean.classes, clean.size),
    }


def _fingerprint(
    args: argparse.Namespace,
    process: Process,
    model: Any,
    clean: StoredImages,
    corrupted: CorruptedSet | None,
    standardisation: tuple[Any, Any],
) -> dict[str, Any]:
    """What the figures depend on, by the names that a refusal uses."""
    import fastmoll
    from fastmoll.kernels.frost_textures import frost_source
    from fastmoll.robustness.checkpoints import digest
    from fastmoll.scoring import is_mixed

    made = f"generated (seed {args.seed}, frost {frost_source()})"
    return {
        "checkpoint (digest of its weights)": digest(model),
        "data (digest)": clean.fingerprint,
        "image size": clean.size,
        "standardisation": [list(map(float, part)) for part in standardisation],
        "corrupted set": made if corrupted is None else f"{corrupted.kind} ({corrupted.source})",
        "precision": "bf16" if is_mixed(process.device, args.precision) else "off",
        "version of fastmoll": fastmoll.__version__,
    }
