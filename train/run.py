"""What the entry scripts share: from the command line to the results, whatever the images are."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torchvision

import fastmoll
from fastmoll.distributed import Process, Stop, together
from fastmoll.output import bar, check_writable, lock, say, write_json
from fastmoll.pipelines.errors import counted, reason_of
from fastmoll.pipelines.files import check_several
from fastmoll.pipelines.small import NAMES
from fastmoll.robustness.checkpoints import find_training
from fastmoll.train import checkpoint
from fastmoll.train.engine import Learner, evaluate, peak_rate
from fastmoll.train.folder import finished, look_for_run
from fastmoll.train.logs import Log, Meter, results_in_words, table
from fastmoll.train.network import make_model
from fastmoll.train.options import as_typed, idle
from fastmoll.train.resident import ResidentLoader
from fastmoll.train.settings import Config, Kind
from fastmoll.train.signals import Signals, stop_asked
from fastmoll.weights import FORMAT

Loader = fastmoll.ImageNetLoader | fastmoll.SmallImageLoader


def start(config: Kind, run: Callable[[Kind, Process], None], argv: Sequence[str] | None) -> int:
    """Join the processes of this run, do ``run(config, process)``, and name options in errors as ``argv`` does.

    Returns:
        The exit code that `together` says.
    """

    def work(process: Process) -> None:
        if nothing := idle(config, argv):
            say(process, nothing)
        try:
            run(config, process)
        except Stop as stop:
            raise Stop(stop.message and as_typed(stop.message, config, argv), stop.code) from stop

    return together(config.run.device, work)


def set_up(config: Kind, process: Process) -> tuple[Kind, bool | None]:
    """Fill in the output folder, and look whether there is a run to go on with.

    Returns:
        The settings, and whether there is one; None where it is finished, which has been said.
    """
    now = process.gather(time.strftime("%Y%m%d-%H%M%S"))[0]
    resuming, done = False, None
    with process.agree():
        backend = config.mollify.backend
        if config.mollify.enabled and backend in ("triton", "cupy") and process.device.type != "cuda":
            raise ValueError(f"--mollify.backend must be auto or torch on a {process.device.type}, got {backend}")
        if config.run.output is None:
            output = Path("runs") / f"{config.title}-{now}"
            config = replace(config, run=replace(config.run, output=output))
        if config.run.resume:
            done = finished(output_folder(config), config, process.world_size)
        if not config.run.evaluate and done is None:
            if process.main:  # which alone writes
                check_writable("--run.output", output_folder(config))
            resuming = look_for_run(output_folder(config), config.run.resume)
    resuming, done = process.gather((resuming, done))[0]  # a network file system may show it to the others later
    if done is not None:
        say(process, done)
        return config, None
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


def make_mollify(config: Config, classes: list[str]) -> fastmoll.Mollify | None:
    """The mollification of the training batches, or None.

    Raises:
        ValueError: there are no two classes, or a setting is wrong.
    """
    check_several(classes)
    mollify = fastmoll.Mollify(  # also where it is off: its settings are kept with the run
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
    return mollify if config.mollify.enabled else None


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
            raise ValueError(f"{path} is damaged, or of another version ({reason_of(error)})") from error
        if learner.step > learner.last:
            raise ValueError(
                f"--run.output: {output} holds a run that has done {learner.step} of {counted(learner.total, 'step')}, "
                f"and this one ends at {learner.last}; choose a larger --run.max-steps, or none, or another folder"
            )
        at = training.state_dict()
        place, batch = (at["epoch"], at["position"]), len(training) - learner.batches_left()
        if place != (learner.step // learner.steps_per_epoch, batch):
            where = f"its loader at batch {place[1]} of epoch {place[0]}"
            raise ValueError(f"{path} is damaged, or of another version (step {learner.step}, but {where})")
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
            for name in ("result.json", "model.pt"):  # those of a run which --run.max-steps had stopped
                (output / name).unlink(missing_ok=True)
            write_json(output / "config.json", describe(config, process, learner))
        log = Log(output, process, learner.step)
    batches = ResidentLoader(training) if config.run.resident else training
    meter = Meter(process)
    results: dict[str, float] = {}
    every = config.run.validate_every
    with stop_asked(process) as signals:
        for epoch in range(max(learner.step - 1, 0) // per_epoch, config.optim.epochs):
            end = min((epoch + 1) * per_epoch, learner.last)
            validating = end == learner.last or (every > 0 and (epoch + 1) % every == 0)
            # A checkpoint before each validation, with which a run resumed there begins; not after each epoch, since a
            # good part of the time that a GPU needs for one would go into writing it.
            train_epoch(config, process, learner, batches, meter, log, epoch, end, signals, save=validating)
            if not validating:
                continue
            with bar(validation, process, f"epoch {epoch + 1} validation", len(validation)) as progress:
                results = evaluate(learner.evaluated, progress, process, config, validation.num_samples, signals)
            if not results:
                stop(config, process, learner, signals.agreed(), ", before its validation was done")
            with process.agree():
                log.write("validation", learner.step, epoch + 1, results)
            say(process, f"epoch {epoch + 1}/{config.optim.epochs}: {results_in_words(results)}")
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
    signals: Signals,
    *,
    save: bool,
) -> None:
    """Take the steps of an epoch that are still to do, up to ``end`` or a signal, with a checkpoint if ``save``.

    Raises:
        Stop: the loss or the weights are no longer finite, the disk is full, or SIGINT or SIGTERM came; after those
            there is a checkpoint.
    """
    if learner.step >= end:
        return
    done = learner.step - epoch * learner.steps_per_epoch
    batches.set_epoch(epoch)
    meter.begin(batches)
    number, saving = 0, False
    with bar(range(0), process, f"epoch {epoch + 1}", learner.steps_per_epoch, done) as progress:
        while learner.step < end and not number:
            lr = learner.lr
            learner.train_step(meter)
            progress.update()
            number = signals.look()
            saving = learner.step % config.run.checkpoint_every == 0 or (save and learner.step == end)
            if saving or number or learner.step % config.run.log_every == 0 or learner.step == end:
                values = {**meter.read(), "lr": lr}
                progress.set_postfix_str(
                    f"loss {values['loss']:.3f}, lr {lr:.2g}, {values['images_per_second']:.0f} images/s, "
                    f"waiting for data {values['data_wait']:.0%}"
                )
                with process.agree():
                    if not math.isfinite(values["loss"]):
                        raise FloatingPointError(
                            f"the loss is {values['loss']} at step {learner.step}, with a learning rate of {lr:g}: one "
                            f"smaller than --optim.lr={config.optim.lr:g} may help, or --optim.clip-norm"
                        )
                    log.write("train", learner.step, epoch + 1, values)
            if saving and not config.run.resident:
                save_checkpoint(config, process, learner, batches)
    number = signals.agreed()  # also of those that `look` has not brought yet
    if number:
        if not config.run.resident and not saving:
            save_checkpoint(config, process, learner, batches)
        stop(config, process, learner, number)


def stop(config: Config, process: Process, learner: Learner, number: int, where: str = "") -> NoReturn:
    """End the run at signal ``number``: after a step or, in words, ``where`` else."""
    kept = "" if config.run.resident else "; --resume goes on there"
    say(process, f"stopped by {signal.Signals(number).name} after step {learner.step}{where}{kept}")
    raise Stop(None, 128 + number)


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
