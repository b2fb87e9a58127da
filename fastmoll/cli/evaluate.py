"""``fastmoll evaluate``: error, NLL and calibration of a network, clean and over all corruptions."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        "torchvision:NAME[:WEIGHTS], for example torchvision:resnet50:IMAGENET1K_V2, or timm:NAME",
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
        "--net", default=argparse.SUPPRESS, metavar="NAME", help="network of a state dict that is not of a run of ours"
    )
    evaluate.add_argument("--split", default="val", metavar="NAME", help="part of DATA")
    evaluate.add_argument(
        "--size",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="height and width of images made from DATA's larger ones, pixels (default: the network's)",
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
    given = [x for x in ("checkpoint", "data", *_OPTIONAL) if hasattr(args, x)]
    if rescoring and given:
        raise ValueError(f"--rescore needs nothing but its folder, got {', '.join(map(_option, given))}")
    if not rescoring and "checkpoint" not in given:
        raise ValueError("CHECKPOINT must be given (see fastmoll evaluate --help)")
    # Loaded here: --help should not wait for torch.
    from fastmoll.distributed import together

    return together(
        "cpu" if rescoring else args.device, lambda process: (_rescore if rescoring else _evaluate)(process, args)
    )


_OPTIONAL = ("corrupted", "out", "net", "size", "corruptions", "severities", "mean", "std", "threads")
"""Options that have no value where they weren't given."""


def _option(name: str) -> str:
    return "CHECKPOINT" if name == "checkpoint" else f"--{name}"


def _evaluate(process: Process, args: argparse.Namespace) -> None:
    import torch

    from fastmoll.output import lock, say
    from fastmoll.robustness.loader import CorruptedLoader, cell_digests
    from fastmoll.robustness.results import Results, add_to_result, cell_name, environment, measure
    from fastmoll.scoring import image_dtype

    with ExitStack() as stack:
        with process.agree():
            checkpoint, clean, corrupted, cells = _open(args)
            size, num_classes = clean.size, len(clean.classes)
            mean, std = _standardisation(args, checkpoint, clean)
            model = checkpoint.build(num_classes, size, process.main)
            if process.main:
                header = _header(args, checkpoint, clean, corrupted)
                fingerprint = _fingerprint(args, process, model, clean, corrupted, (mean, std))
                out = getattr(args, "out", checkpoint.folder / f"robustness-{header['source']}")
                digests = {} if corrupted is None else cell_digests(corrupted)
                images = {cell_name(cell): content for cell, content in digests.items()}
                results = Results(out, header, fingerprint, environment(process), images)
                stack.enter_context(lock(out, "--out"))
                results.begin()
        results = process.gather(results if process.main else None)[0]
        on_gpu = process.device.type == "cuda"
        model.to(process.device).eval()
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
            f"{checkpoint.name} on {clean.root}: {len(clean)} images of {size} x {size} pixels, {num_classes} classes, "
            f"{len(cells)} cells; results in {results.out}",
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
                if content is not None and checkpoint.validated_on(args.data, args.split, clean):
                    add_to_result(checkpoint.folder, content)
                _show(process, results, content is not None)


def _rescore(process: Process, args: argparse.Namespace) -> None:
    from fastmoll.output import lock
    from fastmoll.robustness.results import Results, rescore

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
            f"{results.out}: a report needs all 75 cells and the clean images; evaluate again to add the others",
        )


def _open(args: argparse.Namespace) -> tuple[Checkpoint, StoredImages, CorruptedSet | None, list[Cell]]:
    """The network, the clean images and the corrupted ones (None: to be generated), and the cells that are wanted."""
    from fastmoll.corruptions import CORRUPTIONS, SEVERITIES
    from fastmoll.kernels.checks import check_integer
    from fastmoll.pipelines.corrupted import check_cells, open_corrupted
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
    size = getattr(args, "size", checkpoint.size)
    if corrupted is not None:
        if hasattr(args, "size") and size != corrupted.size:
            raise ValueError(f"--size must be {corrupted.size}, that of the images in {place}, got {size}")
        size = corrupted.size
    where = None
    if not hasattr(args, "data"):
        args.data, where = checkpoint.data
    clean = open_clean(args.data, args.split, size, where)
    checkpoint.check_classes(clean.classes, clean.root)
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
    args: argparse.Namespace, checkpoint: Checkpoint, clean: StoredImages, corrupted: CorruptedSet | None
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
