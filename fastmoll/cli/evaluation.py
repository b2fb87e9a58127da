"""What ``fastmoll evaluate`` does once its arguments are read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

import fastmoll
from fastmoll.corruptions import CORRUPTIONS, SEVERITIES
from fastmoll.distributed import Process
from fastmoll.kernels.checks import check_integer
from fastmoll.kernels.frost_textures import frost_source
from fastmoll.output import lock, say
from fastmoll.pipelines import check_dali
from fastmoll.pipelines.corrupted import ARCHIVES, CorruptedSet, check_cells, open_corrupted
from fastmoll.pipelines.errors import did_you_mean
from fastmoll.pipelines.files import ImageFolder
from fastmoll.robustness import measure
from fastmoll.robustness.checkpoints import Checkpoint, find_checkpoint
from fastmoll.robustness.folders import first_folder, folder_of_set
from fastmoll.robustness.loader import CorruptedLoader, cell_digests
from fastmoll.robustness.networks import WEIGHTS, SomeOutputs, count_outputs, describe_outputs, digest
from fastmoll.robustness.predictions import check_parquet
from fastmoll.robustness.results import (
    Cell,
    Results,
    add_to_result,
    cell_name,
    environment,
    has_baseline,
    is_imagenet,
    table,
)
from fastmoll.robustness.stored_images import StoredImages, is_unsplit, open_clean
from fastmoll.scoring import image_dtype, is_mixed
from fastmoll.weights import HeadError

_MANY_FILES: Final = 100_000  # it takes seconds to look at them, on a network file system minutes


@dataclass(frozen=True)
class _Images:
    """Images as the arguments name them."""

    data: str
    clean: StoredImages
    corrupted: CorruptedSet | None  # None: to be generated
    cells: list[Cell]

    @property
    def of_files(self) -> bool:
        """Whether the corrupted ones are files."""
        return self.corrupted is not None and self.corrupted.kind != "cifar-c"


@dataclass(frozen=True)
class _Network:
    """A network on this process's device, and what the images are standardised by for it."""

    model: nn.Module
    outputs: int
    kept: list[int] | None  # the outputs that are compared; None: all, in order
    mean: Sequence[float]
    std: Sequence[float]


def evaluate(process: Process, args: argparse.Namespace, names: Sequence[str] | None) -> Results:
    """Evaluate a network on one of several processes.

    Args:
        process: This process.
        args: The command's arguments, as parsed; those that the user left out may be missing.
        names: Class names of the network's outputs, where the user gives them.

    Returns:
        Where the results are.

    Raises:
        Stop: on all processes, for an error on one of them: above all arguments that are wrong or don't go together.
    """
    with ExitStack() as stack:
        with process.agree():
            check_arguments(args)
            checkpoint = find_checkpoint(args.checkpoint, getattr(args, "net", None))
            images = _images(args, checkpoint)
            network = _network(args, process, checkpoint, images.clean, names)
            if process.main:
                begun = _results(args, process, checkpoint, images, network)
                stack.enter_context(lock(begun.out, "--out"))
                begun.begin()
        results: Results = process.gather(begun if process.main else None)[0]
        clean, num_classes = images.clean, len(images.clean.classes)
        say(
            process,
            f"{checkpoint.name} on {clean.root}: {len(clean)} images of {clean.size} x {clean.size} pixels, "
            f"{num_classes} classes{'' if network.kept is None else f' of {network.outputs}'}, {len(images.cells)} "
            f"cells; standardised by {_triple(network.mean)} and {_triple(network.std)}; results in {results.out}",
        )
        # A name of data is not a folder that happens to be called so.
        own = not hasattr(args, "data") and clean.root.resolve() == Path(images.data).resolve()
        if own and is_unsplit(clean.root):
            say(process, f"warning: {images.data} has no val folder, so these are the images of the training")
        measure.measure(
            process,
            _same_model(process, network),
            results,
            images.cells,
            partial(_open_loader, args, process, images, network),
            num_classes=num_classes,
            precision=args.precision,
            channels_last=process.device.type == "cuda",
            predictions=args.predictions,
        )
        with process.agree():
            if process.main:
                content = results.finish()
                _show(process, results, content is not None)
                if content is not None and checkpoint.validated_on(images.data, args.split, clean):
                    reason = add_to_result(checkpoint.folder, content)
                    if reason is not None:
                        say(process, reason)
    return results


def rescore(process: Process, out: Path) -> Results | None:
    """Compute all figures again from the predictions in the folder of an evaluation.

    Args:
        process: This process; rank 0 does it.
        out: The folder.

    Returns:
        Where the results are, on rank 0.

    Raises:
        Stop: on all processes, for an error on one of them: it holds none, or they are of something else.
    """
    results = None
    with process.agree():
        if process.main:
            results = Results.open(out)
            check_parquet()
            with lock(out, "--rescore"):
                measure.rescore(process, results)
                _show(process, results, results.finish() is not None)
    return results


def _show(process: Process, results: Results, finished: bool) -> None:
    say(process, "\n" + table(results))
    if finished:
        say(process, str(results.out / "robustness.json"))
    else:
        say(
            process,
            f"{results.out / 'cells'}: the figures, a file for each; a report needs all 75 cells and the clean images: "
            "evaluate again to add the others",
        )


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse what can be seen to be wrong in arguments for `evaluate` without opening anything.

    Raises:
        ValueError: names the argument and its value.
        ImportError: predictions are wanted, but PyArrow is missing.
    """
    _place(args)
    _cells(args)
    check_integer("--batch-size", args.batch_size, 1)
    check_integer("--seed", args.seed, 0, 2**63)
    for name in ("size", "threads"):
        if hasattr(args, name):
            check_integer(f"--{name}", getattr(args, name), 1)
    if args.predictions:
        check_parquet()


def _place(args: argparse.Namespace) -> str | None:
    """Where the corrupted images are; None: they are generated."""
    wanted = getattr(args, "corrupted", "generated")
    kind, _, place = wanted.partition(":")
    if not (wanted == "generated" or (kind == "official" and place)):
        meant = [f"official:{folder}" for folder in (place or wanted,) if Path(folder).is_dir()]
        raise ValueError(f"--corrupted must be generated or official:PATH, got {wanted!r}{did_you_mean(meant)}")
    return place or None


def _cells(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The corruptions and severities that are wanted."""
    return check_cells(getattr(args, "corruptions", CORRUPTIONS), getattr(args, "severities", SEVERITIES))


def _images(args: argparse.Namespace, checkpoint: Checkpoint) -> _Images:
    """Open the images, and refuse corrupted ones that are not of the clean ones."""
    place, (names, levels) = _place(args), _cells(args)
    corrupted = None if place is None else _open_corrupted(place, names, levels)
    given = hasattr(args, "size")
    size = getattr(args, "size", checkpoint.size)
    if corrupted is not None:
        if given and size != corrupted.size:
            raise ValueError(f"--size must be {corrupted.size}, that of the images in {place}, got {size}")
        size = corrupted.size
    source = (args.data, None) if hasattr(args, "data") else checkpoint.data
    if source is None:
        known = {"size": size, "mean": checkpoint.standardisation, "std": checkpoint.standardisation}
        unsaid = [f"--{name}" for name, value in known.items() if value is None and not hasattr(args, name)]
        also = f" (and {', '.join(unsaid)}, as far as these data don't say)" if unsaid else ""
        raise ValueError(f"--data must be given: {checkpoint.name} does not say what it was trained on{also}")
    data, where = source
    clean = open_clean(data, args.split, size, where)
    if isinstance(clean.pixels, ImageFolder) and checkpoint.size is None and corrupted is None and not given:
        raise ValueError(
            f"--size must be given: neither {checkpoint.name} nor {clean.root} says how many pixels the network "
            "expects (224 is usual)"
        )
    if place is not None and corrupted is not None:
        if corrupted.classes != clean.classes:
            # Of arrays, which have no names, the number is compared; of folders, this says what differs.
            corrupted = open_corrupted(place, classes=clean.classes, corruptions=names, severities=levels)
        if corrupted.count != len(clean):
            raise ValueError(
                f"--corrupted: {place} has {corrupted.count} images of each kind, but {clean.root} has {len(clean)}"
            )
        if corrupted.kind == "cifar-c":
            _check_labels(corrupted, clean)
    images = _Images(data, clean, corrupted, [None, *((name, level) for name in names for level in levels)])
    if images.of_files or isinstance(clean.pixels, ImageFolder):
        check_dali()  # which decodes them: the loaders would say so too, once the results are begun
    return images


def _open_corrupted(place: str, names: Sequence[str], levels: Sequence[int]) -> CorruptedSet:
    """Open a corrupted set; where it lacks some corruptions or severities, say how to do with those that it has."""
    try:
        return open_corrupted(place, corruptions=names, severities=levels)
    except ValueError as error:
        folders = {name: [Path(place, part, name) for part in ("", *ARCHIVES)] for name in names}
        arrays = [name for name in names if Path(place, f"{name}.npy").is_file()]  # of all severities
        there = [name for name in names if name in arrays or any(folder.is_dir() for folder in folders[name])]
        cells = [folders[name] for name in there if name not in arrays]
        have = [x for x in levels if all(any((part / str(x)).is_dir() for part in parts) for parts in cells)]
        hint = f" --corruptions {' '.join(there)}" if len(there) < len(names) else ""
        hint += f" --severities {' '.join(map(str, have))}" if len(have) < len(levels) else ""
        if not there or not have or not hint:
            raise
        raise ValueError(f"{error}; for those that are there:{hint}") from error


def _check_labels(corrupted: CorruptedSet, clean: StoredImages) -> None:
    """Refuse arrays with other labels than the clean images have."""
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
    args: argparse.Namespace,
    process: Process,
    checkpoint: Checkpoint,
    clean: StoredImages,
    names: Sequence[str] | None,
) -> _Network:
    """Build the network, whose outputs may have names; its weights come on the main process alone."""
    known = (args.mean, args.std) if hasattr(args, "mean") else checkpoint.standardisation or clean.standardisation
    if known is None:
        raise ValueError(
            f"--mean and --std must be given: neither {checkpoint.name} nor {clean.root} says which the network expects"
        )
    file = getattr(args, "classes", None)
    expected, kept = checkpoint.choose_outputs(clean.classes, clean.root, names, file)
    try:
        model = checkpoint.build(expected, clean.size, process.main).to(process.device).eval()
    except HeadError as error:
        checkpoint.check_outputs(error.outputs, expected, clean.root, file)
        raise
    found = count_outputs(model, clean.size, checkpoint.name)
    checkpoint.check_outputs(found, expected, clean.root, file)
    return _Network(model, found, kept, *known)


def _results(
    args: argparse.Namespace, process: Process, checkpoint: Checkpoint, images: _Images, network: _Network
) -> Results:
    """Describe the evaluation: by what it is of, and by all that its figures depend on."""
    clean, corrupted = images.clean, images.corrupted
    source = "generated" if corrupted is None else corrupted.source
    frost = frost_source(used="frost" in _cells(args)[0]) if corrupted is None else corrupted.frost
    header = {
        "source": source,
        "frost": frost,
        "set": None if corrupted is None else corrupted.root.resolve().name,
        "data": "imagenet" if is_imagenet(clean.classes) else clean.name,
        "size": clean.size,
        "num_classes": len(clean.classes),
        "outputs": network.outputs,
        "net": checkpoint.net,
        **checkpoint.training,
        "checkpoint": checkpoint.name,
        "count": len(clean),
        "baseline": has_baseline(clean.classes, clean.size),
    }
    files = len(clean) * (isinstance(clean.pixels, ImageFolder) + images.of_files * (len(images.cells) - 1))
    if files > _MANY_FILES:
        say(process, f"looking at {files:,} files, by which these images are told from others")
    origin = f"generated (seed {args.seed}" if corrupted is None else f"{corrupted.kind} ({corrupted.source}"
    # By the names that a refusal uses.
    fingerprint = {
        WEIGHTS: digest(network.model.state_dict()),
        "network": checkpoint.identity,
        "data (digest)": clean.fingerprint,
        "image size": clean.size,
        "standardisation": [list(map(float, part)) for part in (network.mean, network.std)],
        "corrupted set": f"{origin})" if frost is None else f"{origin}, frost {frost})",
        "precision": "bf16" if is_mixed(process.device, args.precision) else "off",
        "version of fastmoll": fastmoll.__version__,
    }
    if network.kept is not None:
        fingerprint["choice of outputs"] = describe_outputs(network.kept, network.outputs)
    digests = {} if corrupted is None else cell_digests(corrupted)
    results = Results(
        args.out if hasattr(args, "out") else first_folder(checkpoint, source),
        header,
        fingerprint,
        environment(process),
        {cell_name(cell): content for cell, content in digests.items()},
        of_files=images.of_files,
    )
    if corrupted is not None and not hasattr(args, "out"):
        results.out = folder_of_set(results, corrupted)
    return results


def _same_model(process: Process, network: _Network) -> nn.Module:
    """The network with the outputs that are compared, and with the main process's weights."""
    model = network.model
    if network.kept is not None:
        model = SomeOutputs(model, network.kept).to(process.device).eval()
    if process.device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    process.copy_from_main(model)
    return model


def _open_loader(
    args: argparse.Namespace, process: Process, images: _Images, network: _Network, cell: Cell
) -> CorruptedLoader:
    options: dict[str, Any] = {
        "batch_size": args.batch_size,
        "device": process.device,
        "rank": process.rank,
        "world_size": process.world_size,
        "dtype": image_dtype(process.device, args.precision),
        "mean": network.mean,
        "std": network.std,
        "num_threads": getattr(args, "threads", None),
    }
    if cell is None:
        return CorruptedLoader.generated(images.clean, **options)
    if images.corrupted is None:
        return CorruptedLoader.generated(images.clean, *cell, seed=args.seed, **options)
    return CorruptedLoader.official(images.corrupted, *cell, **options)


def _triple(values: Sequence[float]) -> str:
    return f"({', '.join(f'{value:.4g}' for value in values)})"
