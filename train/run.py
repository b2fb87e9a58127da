"""What the entry scripts share: from the command line to the results, whatever the images are."""

from __future__ import annotations

import copy
import json
import math
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

import fastmoll
from fastmoll.distributed import Process, Stop, together
from fastmoll.output import bar, lock, say, write_json
from fastmoll.pipelines.small import NAMES
from fastmoll.robustness.checkpoints import find_training
from fastmoll.train import checkpoint
from fastmoll.train.config import check, with_output
from fastmoll.train.engine import Learner, evaluate, peak_rate
from fastmoll.train.folder import look_for_run
from fastmoll.train.logs import Log, Meter, counted, table
from fastmoll.train.resident import ResidentLoader
from fastmoll.train.settings import Config, Kind, SmallConfig
from fastmoll.train.signals import stop_asked
from fastmoll.weights import FORMAT, build_model, load_weights

Loader = fastmoll.ImageNetLoader | fastmoll.SmallImageLoader


def start(config: Kind, run: Callable[[Kind, Process], None]) -> int:
    """Join the processes of this run and do ``run(config, process)``; returns the exit code that `together` says."""
    return together(config.run.device, lambda process: run(config, process))


def set_up(config: Kind, process: Process) -> tuple[Kind, bool]:
    """Check the settings, fill in the output folder, and look whether there is a run to go on with."""
    now = process.gather(time.strftime("%Y%m%d-%H%M%S"))[0]
    resuming = False
    with process.agree():
        check(config)
        backend = config.mollify.backend
        if config.mollify.enabled and backend in ("triton", "cupy") and process.device.type != "cuda":
            raise ValueError(f"--mollify.backend must be auto or torch on a {process.device.type}, got {backend}")
        if config.run.output is None:
            config = with_output(config, Path("runs") / f"{config.title}-{now}")
        if not config.run.evaluate:
            resuming = look_for_run(output_folder(config), config.run.resume)
    resuming = process.gather(resuming)[0]  # a network file system may show it to the others later
    if config.run.resume and not resuming:
        known = " with the settings in its config.json" if (output_folder(config) / "config.json").exists() else ""
        say(process, f"nothing to resume in {config.run.output}: starting{known}")
    torch.backends.cudnn.benchmark = True  # all training batches have the same shape
    return config, resuming


def fit(
    config: Config,
    process: Process,
    training: Loader,
    validation: Loader,
    *,
    source: str,
    size: int,
    resuming: bool,
) -> None:
    """Train and validate a network on images of ``size`` pixels from ``source``, in an output folder of its own."""
    say(
        process,
        f"{source}: {training.num_samples} training and {validation.num_samples} validation images, "
        f"{len(training.classes)} classes",
    )
    if training.root == validation.root:
        say(process, f"warning: {source} has no val folder, so validation is on the training images")
    model = make_model(config, process, len(training.classes), size, load=not resuming)
    learner = Learner(model, config, process, len(training))
    images = learner.images_per_step
    say(
        process,
        f"{counted(config.optim.epochs, 'epoch')} of {counted(learner.steps_per_epoch, 'step')} of "
        f"{counted(images, 'image')}, learning rate {peak_rate(config.optim, images):g}; logs, checkpoints and "
        f"results in {config.run.output}",
    )
    with ExitStack() as stack:
        with process.agree():
            if process.main:
                # Only now, so that bad input leaves no folder behind; and what was found in it may have changed.
                stack.enter_context(lock(output_folder(config), "--run.output"))
                if look_for_run(output_folder(config), config.run.resume) != resuming:
                    raise ValueError(f"--run.output: another run was in {config.run.output} just now; start again")
        if resuming:
            resume(config, process, learner, training)
        train(config, process, learner, training, validation)


def check_classes(training: list[str], validation: list[str], where: str) -> None:
    """Refuse training images of other classes than those of the validation."""
    odd = sorted({*training} ^ {*validation})
    if odd:
        raise ValueError(f"{where} have other classes, for example {', '.join(odd[:5])}")


def make_mollify(config: Config, classes: list[str]) -> fastmoll.Mollify | None:
    """The mollification of the training batches, or None.

    Raises:
        ValueError: there are no two classes, or a setting is wrong.
    """
    if len(classes) < 2:
        raise ValueError(f"all images are of one class, {classes[0]!r}: there is nothing to tell apart")
    if not config.mollify.enabled:
        return None
    return fastmoll.Mollify(
        len(classes),
        roles=config.mollify.roles,
        beta=config.mollify.beta,
        k_noise=config.mollify.k_noise,
        k_blur=config.mollify.k_blur,
        sigma_min=config.mollify.sigma_min,
        sigma_max=config.mollify.sigma_max,
        kind=config.mollify.kind,
        backend=config.mollify.backend,
        draws=config.mollify.draws,
        seed=config.run.seed,
        targets="short",
    )


def make_model(config: Config, process: Process, num_classes: int, size: int, *, load: bool) -> nn.Module:
    """The network on the device, the same on all processes, with ``model.weights`` where ``load`` says so."""
    name, weights = config.model.name, config.model.weights
    note = "random weights"
    with process.agree():
        torch.manual_seed(config.run.seed)
        stem = None if isinstance(config, SmallConfig) else False
        model = build_model(name, num_classes, size, small_stem=stem, fresh=weights is None)
        if not config.run.evaluate:
            check_batch(model, config.data.batch_size * config.draws, size)
        if load and weights is not None and process.main:
            note = load_weights(model, name, weights, size=size, exact=config.run.evaluate)
    order = torch.channels_last if config.model.channels_last else torch.contiguous_format
    model.to(process.device).to(memory_format=order)
    process.copy_from_main(model)
    torch.manual_seed(config.run.seed + 1 + process.rank)  # dropout: another stream on each process
    if load:
        say(process, f"{name}: {note}")
    return model


def check_batch(model: nn.Module, batch_size: int, size: int) -> None:
    """Refuse a batch of one image, with all its draws, where batch norm would have one value a channel to normalise."""
    if batch_size > 1:
        return
    trial = copy.deepcopy(model).train().to("meta")
    try:
        trial(torch.empty(1, 3, size, size, device="meta"))
    except ValueError as error:
        raise ValueError(f"--data.batch-size must be more than 1 for this network: {error}") from error


def resume(config: Config, process: Process, learner: Learner, training: Loader) -> None:
    """Put learner, loader and random generators back to where the checkpoint was taken."""
    output = output_folder(config)
    path = output / "checkpoint.pt"
    with process.agree():
        try:
            state = checkpoint.load(
                path, config=config.plain(), classes=training.classes, world_size=process.world_size
            )
            training.load_state_dict([rank["loader"] for rank in state["ranks"]])
            learner.load_state_dict(state["learner"])
            if process.rank < len(state["ranks"]):  # a process more than before draws as it would have from the start
                checkpoint.set_rng_state(state["ranks"][process.rank]["rng"], process.device)
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ValueError(f"{path} is damaged, or of another version ({reason})") from error
        if learner.step > learner.last or (learner.step == learner.last and (output / "result.json").exists()):
            if learner.step >= learner.total:
                raise ValueError(f"--run.output: {output} holds a finished run; choose another folder")
            raise ValueError(
                f"--run.output: {output} holds a run that has done {learner.step} of {counted(learner.total, 'step')}, "
                f"and this one ends at {learner.last}; choose a larger --run.max-steps, or none, or another folder"
            )
    before, now = state["world_size"], process.world_size
    others = "" if before == now else f", on {counted(now, 'process', 'processes')} instead of {before}"
    if others:
        others += f", with batches of {counted(config.data.batch_size, 'image')}"
    say(process, f"resuming {path} after step {learner.step}{others}")
    backend = state["config"]["mollify"]["backend"]
    if config.mollify.enabled and backend != config.mollify.backend:
        also = f"mollify.backend was {backend} and is now {config.mollify.backend}"
        say(process, f"{also}: the same draws, but the last bits may differ")


def train(
    config: Config,
    process: Process,
    learner: Learner,
    training: Loader,
    validation: Loader,
) -> None:
    """The loop: an epoch, its validation, and so on; then the results."""
    output = output_folder(config)
    per_epoch = learner.steps_per_epoch
    with process.agree():
        if process.main:
            (output / "result.json").unlink(missing_ok=True)  # that of a run which --run.max-steps had stopped
            write_json(output / "config.json", describe(config, process, learner))
        log = Log(output, process, learner.step)
    batches = ResidentLoader(training) if config.run.resident else training
    meter = Meter(process)
    results: dict[str, float] = {}
    every = config.run.validate_every
    with stop_asked() as asked:
        for epoch in range(max(learner.step - 1, 0) // per_epoch, config.optim.epochs):
            end = min((epoch + 1) * per_epoch, learner.last)
            validating = end == learner.last or (every > 0 and (epoch + 1) % every == 0)
            # A checkpoint before each validation, with which a run resumed there begins; not after each epoch, since a
            # good part of the time that a GPU needs for one would go into writing it.
            train_epoch(config, process, learner, batches, meter, log, epoch, end, asked, save=validating)
            if not validating:
                continue
            with bar(validation, process, f"epoch {epoch + 1} validation", len(validation)) as progress:
                results = evaluate(learner.evaluated, progress, process, config, validation.num_samples)
            with process.agree():
                log.write("validation", learner.step, epoch + 1, results)
            say(
                process,
                f"epoch {epoch + 1}/{config.optim.epochs}: error {results['error']:.2%}, NLL {results['nll']:.4f}, "
                f"ECE {results['ece']:.4f}",
            )
            if learner.step >= learner.last:
                break
    with process.agree():
        log.close()
        finish(config, process, learner, meter, results)


def train_epoch(
    config: Config,
    process: Process,
    learner: Learner,
    batches: Any,
    meter: Meter,
    log: Log,
    epoch: int,
    end: int,
    asked: Callable[[], int],
    *,
    save: bool,
) -> None:
    """Take the steps of an epoch that are still to do, until ``asked`` or up to ``end``, with a checkpoint if ``save``.

    Raises:
        Stop: the loss or the weights are no longer finite, the disk is full, or SIGINT or SIGTERM came; after those
            there is a checkpoint.
    """
    if learner.step >= end:
        return
    done = learner.step - epoch * learner.steps_per_epoch
    batches.set_epoch(epoch)
    meter.begin(batches)
    stop, saving = 0, False
    with bar(range(0), process, f"epoch {epoch + 1}", learner.steps_per_epoch, done) as progress:
        while learner.step < end and not stop:
            lr = learner.lr
            learner.train_step(meter)
            progress.update()
            # Several processes must agree, which costs: they only do so where they meet for the log.
            stop = asked() if process.world_size == 1 else 0
            saving = learner.step % config.run.checkpoint_every == 0 or (save and learner.step == end)
            if saving or stop or learner.step % config.run.log_every == 0 or learner.step == end:
                values = {**meter.read(), "lr": lr}
                progress.set_postfix_str(
                    f"loss {values['loss']:.3f}, lr {lr:.2g}, {values['images_per_second']:.0f} images/s, "
                    f"waiting for data {values['data_wait']:.0%}"
                )
                with process.agree():
                    if not math.isfinite(values["loss"]):
                        raise FloatingPointError(f"the loss is {values['loss']} at step {learner.step}")
                    log.write("train", learner.step, epoch + 1, values)
                stop = stop or max(process.gather(asked()))
            if saving and not config.run.resident:
                save_checkpoint(config, process, learner, batches)
    stop = stop or max(process.gather(asked()))
    if stop:
        kept = "" if config.run.resident else "; --resume goes on there"
        if kept and not saving:
            save_checkpoint(config, process, learner, batches)
        say(process, f"stopped by {signal.Signals(stop).name} after step {learner.step}{kept}")
        raise Stop(None, 128 + stop)


def save_checkpoint(config: Config, process: Process, learner: Learner, training: Loader) -> None:
    """Write ``checkpoint.pt``: everything that `resume` puts back; weights that are no numbers don't replace it."""
    own = {"loader": training.state_dict(), "rng": checkpoint.rng_state(process.device)}
    ranks = process.gather(own)
    with process.agree():
        if process.main:
            learner.require_finite()
            content = {
                "format": FORMAT,
                "config": recorded(config),
                "classes": training.classes,
                "world_size": process.world_size,
                "learner": learner.state_dict(),
                "ranks": ranks,
            }
            checkpoint.save(content, output_folder(config) / "checkpoint.pt")


def finish(config: Config, process: Process, learner: Learner, meter: Meter, results: dict[str, float]) -> None:
    """Write the final weights and figures, in which errors are fractions, and print them."""
    if not process.main:
        return
    output = output_folder(config)
    checkpoint.save(learner.evaluated.state_dict(), output / "model.pt")
    evaluated = "average" if learner.ema else "model"
    content = {
        "validation": results,
        "weights": evaluated,
        "steps": learner.step,
        **meter.typical(),
    }
    write_json(output / "result.json", content)
    say(process, "\n" + table(f"Validation ({evaluated})", results))
    say(process, f"{output}: {', '.join(sorted(path.name for path in output.glob('[!.]*')))}")
    if learner.step < learner.total:
        more = "" if config.run.resident else f"; --output {output} --resume goes on"
        say(process, f"stopped after step {learner.step} of {learner.total}{more}")


def evaluate_only(config: Config, process: Process, validation: Loader, *, source: str, size: int) -> None:
    """Evaluate ``model.weights`` on images of ``size`` pixels from ``source``; print a table and a line of JSON."""
    images, classes = validation.num_samples, validation.classes
    say(
        process,
        f"{source}: {counted(images, 'validation image')}, {counted(len(classes), 'class', 'classes')}",
    )
    with process.agree():
        path = Path(str(config.model.weights))
        if process.main and path.is_file():
            # Weights of others, and those of a run without its checkpoint, name no classes.
            known = find_training(path, "--model.weights")[1]
            if known is not None:
                checkpoint.check_same(f"--model.weights: {path}", known, classes)
    model = make_model(config, process, len(validation.classes), size, load=True)
    with bar(validation, process, "validation", len(validation)) as progress:
        results = evaluate(model, progress, process, config, validation.num_samples)
    say(process, table(f"Validation ({config.model.weights})", results))
    say(process, json.dumps({"validation": results, "weights": config.model.weights}))


def describe(config: Config, process: Process, learner: Learner) -> dict[str, Any]:
    """The settings, and what followed from them on this machine."""
    return {
        **recorded(config),
        "resolved": {
            "device": process.device.type,
            "world_size": process.world_size,
            "images_per_step": learner.images_per_step,
            "steps_per_epoch": learner.steps_per_epoch,
            "fastmoll": fastmoll.__version__,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
        },
    }


def recorded(config: Config) -> dict[str, Any]:
    """The settings, paths of the data absolute: a run may be resumed and evaluated from another folder."""
    plain = config.plain()
    data = plain["data"]
    for key, names in (("name", NAMES), ("path", ())):
        if data.get(key) is not None and data[key] not in names:
            data[key] = str(Path(data[key]).absolute())
    return plain


def output_folder(config: Config) -> Path:
    """The output folder, which `set_up` has filled in."""
    assert config.run.output is not None
    return config.run.output
