"""The networks: sizes against published ones, what they compute, and what a trainer asks of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import ResNet, list_models, resnet18

from fastmoll.models import check_model_name, create_model
from fastmoll.pipelines import MEAN, STD

# Parameters for 10 and for 100 classes. Those of the preact-ResNets, DenseNet, ResNeXt and the Wide ResNet are what the
# paper's code has; those of allconv10 and googlenet are, without 1,440 and 7,712 biases in front of batch norms.
PARAMETERS = {
    "presnet18": (11_171_146, 11_217_316),
    "presnet34": (21_279_306, 21_325_476),
    "presnet50": (23_509_066, 23_693_476),
    "presnet101": (42_501_194, 42_685_604),
    "allconv10": (1_409_674 - 1_440, 1_427_044 - 1_440),
    "resnext29": (6_807_882, 6_900_132),
    "densenet40": (1_059_298, 1_100_428),
    "wrn40": (2_243_546, 2_255_156),
    "googlenet": (6_310_314 - 7_712, 6_402_564 - 7_712),
    "resnet18": (11_173_962, 11_220_132),
    "resnet34": (21_282_122, 21_328_292),
    "resnet50": (23_520_842, 23_705_252),
}
NAMES = ("presnet18", "presnet50", "allconv10", "resnext29", "densenet40", "wrn40", "googlenet", "resnet18", "resnet50")


def on_meta(name: str, num_classes: int = 10, image_size: int = 32, **options: bool) -> nn.Module:
    """The network without memory or arithmetic."""
    with torch.device("meta"):
        return create_model(name, num_classes, image_size, **options)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def example(name: str, num_classes: int = 7) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return create_model(name, num_classes), torch.randn(4, 3, 16, 16)


@pytest.mark.parametrize("name", PARAMETERS)
def test_networks_have_the_published_number_of_parameters(name: str) -> None:
    assert (count(on_meta(name, 10)), count(on_meta(name, 100))) == PARAMETERS[name]


def test_the_network_of_the_paper_has_23_7_million_parameters() -> None:
    assert round(count(on_meta("presnet50", 100)) / 1e6, 1) == 23.7


def test_the_deepest_network_has_eight_and_thirty_six_blocks_in_its_middle_stages() -> None:
    stages = on_meta("presnet152").get_submodule("stage2"), on_meta("presnet152").get_submodule("stage3")
    assert [len(list(stage.children())) for stage in stages] == [8, 36]


@pytest.mark.parametrize("size", [28, 32, 64])
@pytest.mark.parametrize("name", [*PARAMETERS, "presnet152"])
def test_networks_of_one_size_give_logits_at_every_size(name: str, size: int) -> None:
    model = on_meta(name, 11, size).eval()
    assert count(model) == count(on_meta(name, 11, 32))
    assert model(torch.empty(3, 3, size, size, device="meta")).shape == (3, 11)
    assert model(torch.empty(1, 3, size, size, device="meta")).shape == (1, 11)


@pytest.mark.parametrize(
    ("name", "resolution"),
    [
        ("presnet18", 4),
        ("allconv10", 6),
        ("resnext29", 8),
        ("densenet40", 8),
        ("wrn40", 8),
        ("googlenet", 4),
        ("resnet18", 4),
    ],
)
def test_what_is_pooled_has_the_published_resolution(name: str, resolution: int) -> None:
    model = on_meta(name).eval()
    seen: list[int] = []
    pool = model.get_submodule("avgpool" if isinstance(model, ResNet) else "pool")
    pool.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-1]))
    model(torch.empty(1, 3, 32, 32, device="meta"))
    assert seen == [resolution]


@pytest.mark.parametrize(("name", "activated"), [("presnet18", False), ("wrn40", True)])
def test_the_projection_of_a_preact_resnet_sees_what_was_not_activated(name: str, activated: bool) -> None:
    model, _ = example(name)
    block = model.eval().get_submodule("stage2.0")
    first, projection = block.get_submodule("activation.0"), block.get_submodule("shortcut")
    one, between, two = (block.get_submodule(f"residual.{i}") for i in (0, 1, 3))
    for norm in (first, between):
        norm.running_mean = torch.randn_like(norm.running_mean)
    x = torch.randn(2, one.in_channels, 8, 8)
    active = F.relu(first(x))
    residual = F.conv2d(F.relu(between(F.conv2d(active, one.weight, stride=2, padding=1))), two.weight, padding=1)
    expected = F.conv2d(active if activated else x, projection.weight, stride=2) + residual
    torch.testing.assert_close(block(x), expected)
    same = model.get_submodule("stage2.1")
    same.get_submodule("residual.3").weight.data.zero_()
    x = torch.randn(2, two.out_channels, 8, 8)
    assert torch.equal(same(x), x)


def test_a_preact_resnet_pools_the_last_block_as_it_is() -> None:
    names = [name for name, _ in on_meta("presnet50").named_children()]
    assert names == ["stem", "stage1", "stage2", "stage3", "stage4", "pool", "flatten", "classifier"]


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_reaches_every_parameter(name: str) -> None:
    model, images = example(name)
    F.cross_entropy(model.train()(images), torch.arange(4)).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), key


@pytest.mark.parametrize("name", NAMES)
def test_channels_last_and_bfloat16_change_no_more_than_rounding(name: str) -> None:
    model, images = example(name)
    model.eval()  # of four images, batch norms of 2x2 pixels would make much of a rounding
    with torch.no_grad():
        expected = model(images)
    model.to(memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(images)
        loss = F.cross_entropy(model.train()(images).float(), torch.arange(4))
    assert rounded.dtype == torch.bfloat16
    assert (rounded - expected).norm() < 0.03 * expected.norm()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), key


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_makes_the_same_network_of_another(name: str) -> None:
    ours, images = example(name)
    ours.train()(images)
    theirs = create_model(name, 7)
    assert not torch.equal(ours.eval()(images), theirs.eval()(images))
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize("name", NAMES)
def test_networks_compile_without_a_graph_break(name: str) -> None:
    model, images = example(name)
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize("name", ["allconv10", "densenet40", "wrn40", "resnext29", "resnet18"])
def test_initial_weights_of_convolutions_have_the_variance_of_he(name: str) -> None:
    model, _ = example(name)
    for key, module in model.named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 1000:
            expected = 2 / (module.out_channels * module.weight[0, 0].numel())
            spread = 5 * (2 / module.weight.numel()) ** 0.5
            assert module.weight.var().item() == pytest.approx(expected, rel=spread), key


def test_resnets_for_large_images_are_those_of_torchvision() -> None:
    theirs = {key: value.shape for key, value in resnet18(num_classes=10).state_dict().items()}

    def shapes(model: nn.Module) -> dict[str, torch.Size]:
        return {key: value.shape for key, value in model.state_dict().items()}

    assert shapes(on_meta("resnet18", image_size=128)) == theirs
    assert shapes(on_meta("resnet18", image_size=64, small_stem=False)) == theirs
    small = shapes(on_meta("resnet18", image_size=127))
    assert small == shapes(on_meta("resnet18", image_size=224, small_stem=True)) != theirs
    assert small.keys() == theirs.keys() and [key for key in small if small[key] != theirs[key]] == ["conv1.weight"]
    assert count(on_meta("googlenet", image_size=224)) != count(on_meta("googlenet"))


@pytest.mark.parametrize("name", ["inception_v3", "googlenet"])
def test_networks_whose_published_weights_are_for_minus_1_to_1_see_such_images(name: str) -> None:
    model = create_model(name, 10, 299, fresh=False).eval()
    seen: list[torch.Tensor] = []
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.rand(1, 3, 299, 299)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        model((images - mean) / std)
    torch.testing.assert_close(seen[0], 2 * images - 1, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "vit_b_16", "swin_t", "maxvit_t", "inception_v3", "googlenet"])
def test_any_network_of_torchvision_can_be_had(name: str) -> None:
    model = on_meta(name, 7, 224, fresh=False)
    logits = model.train()(torch.empty(2, 3, 224, 224, device="meta"))
    assert isinstance(logits, torch.Tensor) and logits.shape == (2, 7)


@pytest.mark.parametrize(("name", "size"), [("efficientnetv2_rw_t", 128), ("deit3_small_patch16_224", 160)])
def test_any_network_of_timm_can_be_had(name: str, size: int) -> None:
    pytest.importorskip("timm")
    assert name not in list_models()
    assert on_meta(name, 7, size)(torch.empty(2, 3, size, size, device="meta")).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("preresnet50", "presnet50"),
        ("PResNet-18", "presnet18"),
        ("allconvnet10", "allconv10"),
        ("wrn-40-2", "wrn40"),
        ("ResNet-51", "resnet50"),
    ],
)
def test_an_unknown_name_is_answered_with_close_ones(name: str, close: str) -> None:
    for look_up in (check_model_name, lambda name: create_model(name, 10)):
        with pytest.raises(ValueError, match=rf"^name: .* no classification model '{name}'.*; did you mean .*{close}"):
            look_up(name)


def test_each_close_name_is_said_once_though_torchvision_and_timm_have_it() -> None:
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=r"did you mean resnet18 or (?!resnet18 )\S+ or (?!resnet18\?)\S+\?$"):
        check_model_name("resnt18")


@pytest.mark.parametrize("name", [None, 18, ["resnet18"]])
def test_a_name_that_is_no_string_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"^name must be a string, got "):
        create_model(name, 10)


@pytest.mark.parametrize("timm", [False, True])
def test_a_name_like_no_other_is_answered_with_where_others_are_listed(
    monkeypatch: pytest.MonkeyPatch, timm: bool
) -> None:
    if timm:
        pytest.importorskip("timm")
    monkeypatch.setattr("fastmoll.models.installed", lambda name: timm)
    with pytest.raises(ValueError, match=r"'zz__zz'; there are presnet18, .*wrn40, .*torchvision") as refused:
        create_model("zz__zz", 10)
    message = str(refused.value)
    assert len(message) < 350 and ("timm.list_models()" in message) == timm
    assert message.endswith("; timm, which has more, is not installed (pip install timm)") == (not timm)


@pytest.mark.parametrize(
    ("name", "num_classes", "size", "message"),
    [
        ("alexnet", 10, 32, "name: alexnet can't take images of 32×32 pixels: "),
        ("allconv10", 10, 8, "name: allconv10 can't take images of 8×8 pixels: "),
        ("densenet40", 10, 3, "name: densenet40 can't take images of 3×3 pixels: "),
        ("presnet18", 0, 32, "num_classes must be an integer at least 1, got 0"),
        ("presnet18", 10, 0, "image_size must be an integer at least 1, got 0"),
        ("presnet18", 10, 32.5, "image_size must be an integer at least 1, got 32.5"),
    ],
)
def test_bad_arguments_are_named(name: str, num_classes: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_model(name, num_classes, size)
