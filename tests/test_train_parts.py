"""Tests of the trainer's parts: settings, networks, checkpoints, schedule, step, logs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastmoll
from fastmoll.distributed import Process, Stop, launch
from fastmoll.output import lock, write_json
from fastmoll.train import checkpoint
from fastmoll.train.config import RECIPES, check, difference, parse, parse_small
from fastmoll.train.engine import Learner, evaluate, learning_rate
from fastmoll.train.logs import Log, Meter, table
from fastmoll.train.settings import Config, OptimConfig
from fastmoll.weights import build_model, head_name, load_weights

CPU = Process(0, 1, torch.device("cpu"))
Batch = tuple[torch.Tensor, ...]


# --- settings ---------------------------------------------------------------------------------------------------------


def test_without_data_the_recipe_is_the_sample() -> None:
    assert parse([]) == RECIPES["sample"]


def test_with_data_the_recipe_is_the_papers(tmp_path: Path) -> None:
    config = parse([str(tmp_path)])
    assert config.data.path == tmp_path
    assert (config.model.name, config.model.weights) == ("resnet50", "IMAGENET1K_V1")
    assert config.optim == OptimConfig(10, 0.01, None, 0.9, False, 5e-4, 0.0, 1)


def test_every_setting_overrides_its_recipe() -> None:
    config = parse(["--recipe", "scratch", "--optim.lr", "0.3", "--mollify.roles", "1", "0", "2", "--compile"])
    assert config.optim == dataclasses.replace(RECIPES["scratch"].optim, lr=0.3)
    assert config.mollify.roles == (1.0, 0.0, 2.0)
    assert config.model.compile


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_valid_and_survives_json(recipe: str) -> None:
    check(RECIPES[recipe])
    plain = RECIPES[recipe].plain()
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optim.lr", "0"], "--optim.lr must be positive, got 0"),
        (["--optim.lr", "nan"], "--optim.lr must be positive, got nan"),
        (["--optim.momentum", "1"], "--optim.momentum must be .*got 1"),
        (["--optim.weight-decay", "-1"], "--optim.weight-decay must be .*got -1"),
        (["--optim.warmup-epochs", "99"], r"--optim.warmup-epochs must be in \[0, 12\], got 99"),
        (["--optim.epochs", "0"], "--optim.epochs must be at least 1, got 0"),
        (["--optim.accumulate", "0"], "--optim.accumulate must be at least 1, got 0"),
        (["--data.batch-size", "0"], "--data.batch-size must be at least 1, got 0"),
        (["--run.log-every", "0"], "--run.log-every must be at least 1, got 0"),
        (["--run.seed", "-1"], "--run.seed must be .*got -1"),
        (["--model.ema", "1"], r"--model.ema must be in \(0, 1\), got 1"),
        (["--run.evaluate"], "--model.weights must be given with --run.evaluate"),
        (["--run.resume"], "--run.output must be"),
        (["--run.output", ""], "--run.output must be a folder of its own"),
        (["--run.resume", "--run.output", "x", "--resident"], "--run.resident must be off with --run.resume"),
    ],
)
def test_unusable_values_name_option_and_value(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(parse(arguments))


def test_a_run_is_continued_only_with_settings_that_change_nothing() -> None:
    config = parse([])
    other_code = dataclasses.replace(config.mollify, backend="torch")
    run = dataclasses.replace(config.run, resume=True, log_every=3)
    free = dataclasses.replace(config, run=run, mollify=other_code)
    assert difference(config.plain(), free.plain()) is None
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=0.5))
    assert difference(config.plain(), other.plain()) == "optim.lr was 0.05 and is now 0.5"
    older = config.plain()
    del older["data"]["decoder"]  # of a run that was begun before there was that setting
    assert difference(older, config.plain()) is None
    moved = dataclasses.replace(config, data=dataclasses.replace(config.data, decoder="cpu"))
    assert difference(older, moved.plain()) == "data.decoder was mixed and is now cpu"


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        ("squeezenet1_1", "classifier.1"),
        ("mobilenet_v3_small", "classifier.3"),
        ("googlenet", "fc"),
        ("vit_b_16", "heads.head"),
        ("swin_t", "head"),
        ("maxvit_t", "classifier.5"),
    ],
)
def test_networks_take_the_images_and_have_a_head_of_the_classes(name: str, head: str) -> None:
    size = 224 if name in ("swin_t", "maxvit_t") else 64
    with torch.device("meta"):
        model = build_model(name, 7, size, fresh=False)
    assert head_name(model) == head
    assert model.state_dict()[f"{head}.weight"].shape[0] == 7
    out = model.train()(torch.empty(2, 3, size, size, device="meta"))
    assert isinstance(out, torch.Tensor) and out.shape == (2, 7)


def test_an_unknown_network_names_close_ones() -> None:
    with pytest.raises(ValueError, match=r"'ResNet-51'; did you mean .*resnet50"):
        build_model("ResNet-51", 3, 64)


def test_a_network_for_larger_images_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="alexnet can't take images of 16×16 pixels"):
        build_model("alexnet", 3, 16)


def test_a_file_of_weights_is_loaded_as_it_is(tmp_path: Path) -> None:
    theirs, ours = build_model("squeezenet1_1", 3, 64), build_model("squeezenet1_1", 3, 64)
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    load_weights(ours, "squeezenet1_1", str(tmp_path / "w.pt"), exact=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


TRUNCATED = object()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_weights_are_found_where_other_scripts_put_them(tmp_path: Path, key: str, prefix: str) -> None:
    theirs, ours = build_model("squeezenet1_1", 3, 64), build_model("squeezenet1_1", 3, 64)
    state = {prefix + name: value for name, value in theirs.state_dict().items()}
    torch.save({"epoch": 3, key: state}, tmp_path / "w.pt")
    load_weights(ours, "squeezenet1_1", str(tmp_path / "w.pt"), exact=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_head_for_other_classes_is_left_fresh_and_said_so(tmp_path: Path) -> None:
    theirs, ours = build_model("squeezenet1_1", 5, 64), build_model("squeezenet1_1", 3, 64)
    fresh = ours.state_dict()["classifier.1.weight"].clone()
    torch.save({"model": theirs.state_dict()}, tmp_path / "w.pt")
    note = load_weights(ours, "squeezenet1_1", str(tmp_path / "w.pt"))
    assert note.endswith("a fresh head classifier.1: that one is for 5 classes")
    assert torch.equal(ours.state_dict()["classifier.1.weight"], fresh)
    assert torch.equal(ours.state_dict()["features.0.weight"], theirs.state_dict()["features.0.weight"])
    with pytest.raises(ValueError, match=r"classifier.1.weight is \(5, 512, 1, 1\) there and \(3, 512, 1, 1\) here"):
        load_weights(ours, "squeezenet1_1", str(tmp_path / "w.pt"), exact=True)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    model = build_model("squeezenet1_1", 3, 64)
    path = tmp_path / "w.pt"
    state = model.state_dict()
    state["stray"] = state.pop("features.0.bias")
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"w\.pt does not fit .*without features\.0\.bias; with unknown stray"):
        load_weights(model, "squeezenet1_1", str(path))
    state["features.0.bias"] = state.pop("stray")
    state["classifier.1.bias"] = torch.tensor(0.0)
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"classifier\.1\.bias is \(\) there and \(3,\) here"):
        load_weights(model, "squeezenet1_1", str(path))
    with pytest.raises(ValueError, match=r"'IMAGENET9K' is no file; weights .* for squeezenet1_1: IMAGENET1K_V1"):
        load_weights(model, "squeezenet1_1", "IMAGENET9K")


@pytest.mark.parametrize("average", [False, True])
def test_the_weights_in_a_checkpoint_are_those_that_were_evaluated(tmp_path: Path, average: bool) -> None:
    network = build_model("squeezenet1_1", 3, 64)
    learner = Learner(network, settings(model__ema=0.9 if average else None), CPU, 5)
    with torch.no_grad():
        learner.evaluated.get_parameter("classifier.1.bias").fill_(7)
    saved_run(tmp_path / "c.pt", config={"model": {"name": "squeezenet1_1"}}, learner=learner.state_dict())
    ours = build_model("squeezenet1_1", 3, 64)
    load_weights(ours, "squeezenet1_1", str(tmp_path / "c.pt"), exact=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), learner.evaluated.parameters(), strict=True))
    with pytest.raises(ValueError, match="is a checkpoint of squeezenet1_1, not of resnet18"):
        load_weights(ours, "resnet18", str(tmp_path / "c.pt"))


@pytest.mark.filterwarnings("ignore:.*[Ss]parse")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"not weights", "is damaged, or no PyTorch file"),
        (TRUNCATED, "is damaged, or no PyTorch file"),
        ([1, 2], "holds no state dict"),
        ({1: torch.zeros(1)}, "holds no state dict"),
        ({"a": torch.eye(2).to_sparse()}, "holds no state dict"),
        ({"config": {}}, "holds no state dict"),
        ({"format": 1, "config": {"model": 5}}, "is a damaged checkpoint"),
        ({"format": 1, "config": {"model": {"name": "squeezenet1_1"}}, "learner": []}, "is a damaged checkpoint"),
    ],
)
def test_a_file_without_weights_is_named_with_the_reason(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "w.pt"
    if content is TRUNCATED:
        torch.save({"a": torch.zeros(10_000)}, path)
        content = path.read_bytes()[:5000]
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=rf"^--model\.weights: .*w\.pt {message}"):
        load_weights(build_model("squeezenet1_1", 3, 64), "squeezenet1_1", str(path))


# --- schedule and step ------------------------------------------------------------------------------------------------


def test_the_schedule_is_torchs_cosine_after_a_linear_warm_up() -> None:
    optim = OptimConfig(epochs=10, lr=0.4, warmup_epochs=2.0)
    ours = [learning_rate(step, 7, optim, 64) for step in range(70)]
    assert ours[:14] == pytest.approx([0.4 * (step + 1) / 14 for step in range(14)])
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=56)
    theirs = []
    for _ in range(56):
        theirs.append(sgd.param_groups[0]["lr"])
        sgd.step()
        cosine.step()
    assert ours[14:] == pytest.approx(theirs, abs=1e-12)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def test_the_learning_rate_scales_with_the_images_of_a_step() -> None:
    optim = OptimConfig(lr=0.1, lr_batch=256)
    assert learning_rate(0, 5, optim, 1024) == pytest.approx(0.4)
    assert learning_rate(0, 5, dataclasses.replace(optim, lr_batch=None), 1024) == 0.1


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int, size: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 3, 4, 4, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def settings(**changes: Any) -> Config:
    config = parse([])
    for name, value in changes.items():
        group, field = name.split("__")
        changed = dataclasses.replace(getattr(config, group), **{field: value})
        config = dataclasses.replace(config, **{group: changed})
    return config


def run_steps(learner: Learner, data: list[Batch], steps: int) -> None:
    meter = Meter(CPU)
    meter.begin(data)
    for _ in range(steps):
        learner.train_step(meter)


def test_a_step_is_torchs_sgd_step() -> None:
    config = settings(optim__warmup_epochs=0.0, optim__weight_decay=0.01, optim__lr=0.1)
    learner, expected = Learner(tiny_model(), config, CPU, 5), tiny_model()
    sgd = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    run_steps(learner, batches(2), 2)
    for step, (images, labels) in enumerate(batches(2)):
        sgd.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 60))
        sgd.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(expected(images), labels))
        sgd.step()
    for ours, theirs in zip(learner.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def mollified(targets: str, count: int = 6) -> list[Any]:
    mollify = fastmoll.Mollify(3, roles=(1, 1, 1, 1), seed=4, kind="temper", targets=targets)
    return [mollify(images, labels, torch.arange(4), epoch) for epoch, (images, labels) in enumerate(batches(count))]


def test_labels_in_short_form_train_the_same_network_to_rounding() -> None:
    learners = {}
    for targets in ("dense", "short"):
        learners[targets] = Learner(tiny_model(), settings(optim__lr=0.1), CPU, 6)
        run_steps(learners[targets], mollified(targets), 6)
    assert not torch.equal(learners["short"].model[1].weight, tiny_model()[1].weight)  # type: ignore[index]
    for ours, theirs in zip(learners["short"].model.parameters(), learners["dense"].model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("targets", ["dense", "short"])
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_the_loss_of_a_step_compiles_whole_and_once(monkeypatch: pytest.MonkeyPatch, targets: str, amp: str) -> None:
    graphs = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch.compiler.reset()
    plain = Learner(tiny_model(), settings(run__amp=amp), CPU, 6)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True, backend=count))
    compiled = Learner(tiny_model(), settings(run__amp=amp, model__compile=True), CPU, 6)
    for learner in (plain, compiled):
        run_steps(learner, mollified(targets), 6)
    assert len(graphs) == 1
    for ours, theirs in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_accumulated_batches_count_alike_and_the_leftover_forms_a_smaller_step() -> None:
    # No BatchNorm: then the step on two half batches is the step on the whole one.
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), tiny_model()[1])  # type: ignore[index]

    halves = batches(5)  # groups of 2, 2 and 1
    wholes = [tuple(torch.cat(pair) for pair in zip(*halves[at : at + 2], strict=True)) for at in (0, 2, 4)]
    one, two = Learner(model(), settings(), CPU, 3), Learner(model(), settings(optim__accumulate=2), CPU, 5)
    assert two.steps_per_epoch == 3
    run_steps(one, wholes, 3)
    run_steps(two, halves, 3)
    assert two.batches_left() == 5  # the next epoch
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_the_average_follows_its_formula_and_is_what_is_evaluated() -> None:
    learner = Learner(tiny_model(), settings(model__ema=0.5), CPU, 9)
    data = batches(9)
    meter = Meter(CPU)
    meter.begin(data)
    expected = {name: value.clone() for name, value in learner.model.state_dict().items()}
    for step in range(1, 10):
        learner.train_step(meter)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in learner.model.state_dict().items():
            mean = expected[name] * decay + value * (1 - decay)
            expected[name] = mean if value.is_floating_point() else value.clone()
    assert learner.evaluated is learner.ema
    assert learner.ema is not None
    for name, value in learner.ema.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    assert learner.ema.state_dict()["2.running_mean"].abs().sum() > 0  # statistics are averaged too


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_noticed(number: float) -> None:
    learner = Learner(tiny_model(), settings(), CPU, 5)
    learner.require_finite()
    learner.model.state_dict()["2.running_var"][1] = number
    with pytest.raises(FloatingPointError, match=r"the norm of the weights is (nan|inf) after step 0"):
        learner.require_finite()
    with torch.no_grad():
        learner.model.get_parameter("4.bias")[0] = math.nan
    with pytest.raises(Stop) as stopped:
        evaluate(learner.model, batches(1), CPU, settings(), expected=4)
    assert (stopped.value.message, stopped.value.code) == ("the NLL on the validation images is nan", 1)


def test_the_meter_reports_loss_speed_and_wait() -> None:
    meter = Meter(CPU)
    meter.begin(batches(2))
    for loss in (1.0, 3.0):
        images, _ = meter.next_batch()
        meter.add(torch.tensor(loss), len(images))
    values = meter.read()
    assert values["loss"] == 2.0
    assert values["images_per_second"] == pytest.approx(8 / values["seconds"])
    assert 0 < values["data_wait"] < 1


def test_evaluation_counts_every_image_and_leaves_the_mode() -> None:
    model = tiny_model().train()
    data = batches(3)
    results = evaluate(model, data, CPU, settings(), expected=12)
    assert model.training
    model.eval()
    labels = torch.cat([y for _, y in data])
    logits = torch.cat([model(x) for x, _ in data]).detach()
    assert results["error"] == pytest.approx(float((logits.argmax(1) != labels).double().mean()))
    assert results["nll"] == pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-6)
    with pytest.raises(RuntimeError, match="evaluated 12 images of 13"):
        evaluate(model, data, CPU, settings(), expected=13)


# --- processes, checkpoints, logs -------------------------------------------------------------------------------------


def test_an_error_of_input_becomes_one_line_and_any_other_is_raised() -> None:
    with pytest.raises(Stop) as stopped, CPU.agree():
        raise ValueError("x must be 1, got 2")
    assert (stopped.value.message, stopped.value.code) == ("x must be 1, got 2", 2)
    with pytest.raises(Stop) as stopped, CPU.agree():
        raise fastmoll.BadImageError([("a.jpg", "empty")], "bad")
    assert stopped.value.code == 1 and "a.jpg: empty" in str(stopped.value.message)
    with pytest.raises(Stop) as stopped, CPU.agree():
        raise OSError("no space")
    assert (stopped.value.message, stopped.value.code) == ("no space", 1)
    with pytest.raises(KeyError), CPU.agree():
        raise KeyError("a bug")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_asked_for_and_absent_is_an_error() -> None:
    with pytest.raises(Stop, match=r"the device is to be cuda, but torch finds no usable CUDA device"), launch("cuda"):
        pass


def saved_run(path: Path, **changes: Any) -> dict[str, Any]:
    """Save the checkpoint of a run, with changes, and return what loads it."""
    config = settings().plain()
    content = {"format": 1, "config": config, "classes": ["a", "b"], "world_size": 1, "learner": {}, "ranks": []}
    checkpoint.save({**content, **changes}, path)
    return {"config": config, "classes": ["a", "b"], "world_size": 1}


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    this = saved_run(tmp_path / "c.pt")
    assert checkpoint.load(tmp_path / "c.pt", **this)["classes"] == ["a", "b"]
    assert os.listdir(tmp_path) == ["c.pt"]


def test_a_gpu_goes_on_from_the_random_state_of_a_cpu() -> None:
    state = checkpoint.rng_state(CPU.device)
    expected = torch.rand(3)
    checkpoint.set_rng_state(state, torch.device("cuda"))
    assert torch.equal(torch.rand(3), expected)


def test_a_resumed_run_has_its_own_settings_but_for_those_that_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    given = ["--recipe", "scratch", "--data.size", "96", "--mollify.roles", "1", "0", "1", "--model.ema", "0.9"]
    first = parse(["/data", *given, "--run.output", str(output), "--run.max-steps", "7", "--run.seed", "3"])
    (output / "config.json").write_text(json.dumps({**first.plain(), "resolved": {"world_size": 1}}))
    again = ["--run.output", str(output), "--resume"]
    expected = dataclasses.replace(first, run=dataclasses.replace(first.run, resume=True, max_steps=None))
    assert parse(again) == expected
    assert parse([*again, "--data.batch-size", "8"]) == dataclasses.replace(
        expected, data=dataclasses.replace(first.data, batch_size=8)
    )
    for text in (
        "{",
        "[]",
        '{"recipe": "scratch", "data": 3}',
        '{"recipe": "scratch", "data": {"batch_size": "8"}}',
        "{}",
    ):
        (output / "config.json").write_text(text)
        with pytest.raises(SystemExit) as stopped:
            parse(again)
        assert stopped.value.code == 2 and f"{output}/config.json does not fit" in capsys.readouterr().err

    small = parse_small(["--data", "cifar10", "--data.mean", "0.1", "0.2", "0.3", "--data.std", "1", "1", "1"])
    (output / "config.json").write_text(json.dumps(small.plain()))
    assert parse_small(again) == dataclasses.replace(
        small, run=dataclasses.replace(small.run, output=output, resume=True)
    )


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this = saved_run(tmp_path / "c.pt")

    def stop_midway(content: object, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stop_midway)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save({}, tmp_path / "c.pt")
    assert checkpoint.load(tmp_path / "c.pt", **this)["format"] == 1


def test_a_file_that_can_not_be_written_leaves_the_old_one_and_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    path.write_text("old")
    for write in (checkpoint.save, lambda content, path: write_json(path, content)):
        (tmp_path / ".c.pt.part").symlink_to("/dev/full")
        with pytest.raises(OSError, match=r"^/.*c\.pt can't be written: No space left on device$"):
            write({"a": list(range(5000))}, path)
        assert (os.listdir(tmp_path), path.read_text()) == (["c.pt"], "old")


def test_only_one_run_holds_a_folder_and_leaving_frees_it(tmp_path: Path) -> None:
    for _ in range(2):
        with lock(tmp_path / "run", "--out"), pytest.raises(ValueError, match=rf"in use .*process {os.getpid()} on"):
            lock(tmp_path / "run", "--out").__enter__()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": ["a", "c"]}, "another data set: .*'c' against 'b'"),
        ({"classes": ["a", "b", "c"]}, "another data set: 3 classes there and 2 here"),
        (
            {"world_size": 4},
            "of 4 processes with 32 images a batch each: 1 can go on where --data.batch-size is 128, got 32",
        ),
        ({"format": 99}, "not a checkpoint of this trainer"),
        ({"config": settings(model__name="alexnet").plain()}, "of model alexnet, not of resnet18"),
        ({"config": settings(optim__epochs=3).plain()}, "other settings: optim.epochs was 3 and is now 12"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    this = saved_run(tmp_path / "c.pt", **change)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path / "c.pt", **this)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    this = saved_run(tmp_path / "c.pt")
    (tmp_path / "c.pt").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"c\.pt is damaged"):
        checkpoint.load(tmp_path / "c.pt", **this)


def test_a_resumed_log_has_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Log(tmp_path, CPU, 0)
    for step in (2, 4, 6):
        log.write("train", step, 0, {"loss": float(step)})
    log.write("validation", 4, 0, {"error": 0.5})
    log.close()
    with open(tmp_path / "log.jsonl", "ab") as file:
        file.write(b'5\n{}\n\xff\xfe\n{"kind": "tra')  # other people's lines; then the kill came
    time.sleep(1.1)  # TensorBoard reads its files in the order of the seconds in their names
    log = Log(tmp_path, CPU, 4)
    log.write("validation", 4, 0, {"error": 0.25})
    log.write("train", 6, 1, {"loss": 60.0})
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 2),
        ("train", 4),
        ("validation", 4),
        ("train", 6),
    ]
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("train/loss")] == [(2, 2.0), (4, 4.0), (6, 60.0)]
    assert [event.value for event in board.Scalars("validation/error")] == [0.25]


def test_the_table_shows_every_figure() -> None:
    text = table("Validation", {"error": 0.251, "nll": 1.25, "ece": 0.0321, "count": 50000})
    assert [word in text for word in ("25.10%", "1.2500", "0.0321", "50000")] == [True] * 4
