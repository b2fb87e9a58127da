"""Tests of the trainer's schedule, optimisers, step, average, meter and evaluation."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import math
from typing import Any

import pytest
import torch
from learners import CPU, batches, run_steps, settings, tiny_model
from torch import nn
from torchvision import models

import fastmoll
from fastmoll import losses
from fastmoll.distributed import Process, Stop
from fastmoll.train.engine import Learner, evaluate, learning_rate, loss_of, make_optimizer
from fastmoll.train.logs import Meter
from fastmoll.train.network import make_model
from fastmoll.train.settings import OptimConfig


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


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_adamw_with_clipping_and_decay_of_weights_alone_is_its_formula(clip: float) -> None:
    beta1, beta2, lr, decay = 0.8, 0.95, 0.01, 0.1
    config = settings(
        **{"optim__name": "adamw", "optim__betas": (beta1, beta2), "optim__lr": lr, "optim__weight_decay": decay},
        **{"optim__decay": "weights", "optim__clip_norm": clip, "optim__accumulate": 2, "optim__warmup_epochs": 0.0},
    )
    # Inputs of different sizes, so that the norms of gradients are, too.
    data = [(images * scale, labels) for (images, labels), scale in zip(batches(8), 4 * [4.0] + 4 * [1.0], strict=True)]
    # Without batch norm, which a bias before it has no gradient through: Adam's steps would be of its rounding errors.
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 8), nn.Tanh(), nn.Linear(8, 3))
    learner, model = Learner(copy.deepcopy(model), config, CPU, 8), model.double()
    expected = dict(model.named_parameters())
    first, second = ({name: torch.zeros_like(value) for name, value in expected.items()} for _ in range(2))
    norms = []
    for step in range(1, 5):
        pair = data[2 * step - 2 : 2 * step]
        loss = sum(nn.functional.cross_entropy(model(images.double()), labels) for images, labels in pair) / 2
        grads = dict(zip(expected, torch.autograd.grad(loss, [*expected.values()]), strict=True))
        norms.append(math.sqrt(sum(float(grad.square().sum()) for grad in grads.values())))
        rate = lr * 0.5 * (1 + math.cos(math.pi * (step - 1) / (12 * 4)))
        with torch.no_grad():
            for name, value in expected.items():
                grad = grads[name] * min(1, clip / norms[-1])
                first[name] = beta1 * first[name] + (1 - beta1) * grad
                second[name] = beta2 * second[name] + (1 - beta2) * grad**2
                if name in ("1.weight", "3.weight"):  # not biases
                    value *= 1 - rate * decay
                root = (second[name] / (1 - beta2**step)).sqrt() + 1e-8
                value -= rate * first[name] / (1 - beta1**step) / root
    run_steps(learner, data, 4)
    assert (max(norms) > 2 * min(norms) > 2 * clip) == (clip < 1)
    for name, ours in learner.model.named_parameters():
        torch.testing.assert_close(ours.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_a_clipped_gradient_has_the_norm_asked_for_and_a_smaller_one_stays_to_the_bit() -> None:
    def moved(clip: float | None) -> torch.Tensor:
        changes = {"optim__momentum": 0.0, "optim__nesterov": False, "optim__weight_decay": 0.0, "optim__lr": 1.0}
        learner = Learner(tiny_model(), settings(**changes, optim__warmup_epochs=0.0, optim__clip_norm=clip), CPU, 5)
        before = nn.utils.parameters_to_vector(learner.model.parameters()).detach().clone()
        run_steps(learner, batches(1), 1)
        return nn.utils.parameters_to_vector(learner.model.parameters()).detach() - before

    whole = moved(None)
    assert float(whole.norm()) > 0.25
    assert float(moved(0.125).norm()) == pytest.approx(0.125, rel=1e-4)
    torch.testing.assert_close(moved(0.125) * (whole.norm() / 0.125), whole, rtol=1e-3, atol=1e-5)
    assert torch.equal(moved(1e3), whole)


def decayed(model: nn.Module, decay: str = "weights") -> set[str]:
    """Names of the parameters with weight decay; the others must have none."""
    optimizer = make_optimizer(model, OptimConfig(name="adamw", weight_decay=0.1, decay=decay), fused=False)  # type: ignore[arg-type]
    rate = {id(each): group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    names = {name: rate.pop(id(each)) for name, each in model.named_parameters()}
    assert not rate and {*names.values()} <= {0.0, 0.1}
    return {name for name, value in names.items() if value}


@pytest.mark.parametrize("name", ["resnet18", "shufflenet_v2_x0_5", "presnet18"])
def test_of_networks_of_convolutions_only_those_and_the_head_decay(name: str) -> None:
    with torch.device("meta"):
        model = fastmoll.create_model(name, 10, 32)
    layers = [key for key, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert decayed(model) == {f"{key}.weight" for key in layers} < decayed(model, "all")
    assert decayed(model, "all") == {key for key, _ in model.named_parameters()}


def test_of_torchvisions_transformers_neither_tokens_nor_positions_nor_scales_decay() -> None:
    vit = models.VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=3)
    layer = "encoder.layers.encoder_layer_0"
    inside = ("self_attention.in_proj_weight", "self_attention.out_proj.weight", "mlp.0.weight", "mlp.3.weight")
    assert decayed(vit) == {"conv_proj.weight", *(f"{layer}.{name}" for name in inside), "heads.head.weight"}
    with torch.device("meta"):
        for name in ("swin_t", "swin_v2_t", "convnext_tiny"):
            # What these have besides are tables of positions, temperatures of attention, scales of layers.
            model = models.get_model(name)
            assert decayed(model) == {
                f"{key}.weight" for key, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)
            }


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "xcit_nano_12_p16_224", "convnext_atto"]
)
def test_of_networks_of_timm_those_decay_that_timm_lets(name: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=3)
    exempt = getattr(model, "no_weight_decay", set)()
    groups = importlib.import_module("timm.optim").param_groups_weight_decay(model, 0.1, no_weight_decay_list=exempt)
    theirs = {id(each) for group in groups if group["weight_decay"] for each in group["params"]}
    assert decayed(model) == {key for key, each in model.named_parameters() if id(each) in theirs}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_step_reads_nothing_back_from_the_gpu(name: str) -> None:
    process = Process(0, 1, torch.device("cuda"))
    config = settings(optim__name=name, optim__clip_norm=0.1, optim__decay="weights", model__ema=0.9)
    learner = Learner(tiny_model().cuda(), config, process, 6)
    meter = Meter(process)
    meter.begin([tuple(part.cuda() for part in batch) for batch in batches(6)])
    for _ in range(3):  # in which state is made
        learner.train_step(meter)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            learner.train_step(meter)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    learner.require_finite()


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


@pytest.mark.parametrize("name", ["soft", "normalised", "binary", "log_mean", "corrected"])
def test_each_loss_trains_compiles_whole_and_is_the_one_of_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mollify = fastmoll.Mollify(3, seed=4, targets="short", draws=2)
    data = [mollify(images, labels, torch.arange(4), epoch) for epoch, (images, labels) in enumerate(batches(6))]
    targets = data[0][1]
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    expected = {
        "soft": lambda: fastmoll.soft_cross_entropy(logits, targets),
        "normalised": lambda: losses.normalised_cross_entropy(logits, targets),
        "binary": lambda: losses.binary_cross_entropy(logits, targets),
    }.get(name, lambda: losses.augmented_likelihood(torch.stack([logits[:4], logits[4:]]), targets, kind=name))()
    torch.testing.assert_close(loss_of(name, 2)(logits, targets), expected)

    torch.compiler.reset()
    changes = {"optim__loss": name, "mollify__draws": 2, "optim__lr": 0.1}
    plain = Learner(tiny_model(), settings(**changes), CPU, 6)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True, backend="aot_eager"))
    compiled = Learner(tiny_model(), settings(**changes, model__compile=True), CPU, 6)
    for learner in (plain, compiled):
        meter = Meter(CPU)
        meter.begin(data)
        for _ in range(6):
            learner.train_step(meter)
        assert meter._images == 6 * 4  # of the data set, however often each is drawn
    assert not torch.equal(plain.model[1].weight, tiny_model()[1].weight)  # type: ignore[index]
    for ours, theirs in zip(compiled.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_two_draws_of_one_image_are_enough_for_batch_norm() -> None:
    make_model(settings(data__batch_size=1, mollify__draws=2), CPU, 3, 32, load=False)
    with pytest.raises(Stop, match=r"--data\.batch-size must be more than 1 for this network"):
        make_model(settings(data__batch_size=1), CPU, 3, 32, load=False)


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
    assert "gradient_norm" not in values
    for norm in (1.0, 4.0):
        meter.add(torch.tensor(0.0), 4)
        meter.end_step(torch.tensor(norm))
    assert meter.read()["gradient_norm"] == 2.5


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
