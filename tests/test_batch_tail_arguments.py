"""The batch tail refuses bad arguments by name, before anything is computed."""

import math

import numpy as np
import pytest
import torch

from fastmoll.kernels.batch_tail import batch_tail

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIXELS, FLOATS = torch.zeros(2, 4, 6, 3, dtype=torch.uint8), torch.zeros(2, 3, 4, 6)
ROLE, T, PARTNER = torch.zeros(2, dtype=torch.int8), torch.zeros(2), torch.tensor([1, 0])
STANDARD = {"mean": MEAN, "std": STD}


@pytest.mark.parametrize(
    ("images", "arguments", "message"),
    [
        ([1.0], {}, "images must be a torch.Tensor, got list"),
        (PIXELS[0], STANDARD, r"images must have shape \(B, H, W, 3\), got \(4, 6, 3\)"),
        (PIXELS[..., :1], STANDARD, r"images must have shape .* got \(2, 4, 6, 1\)"),
        (PIXELS[:, :0], STANDARD, r"images must have at least one row .* got shape \(2, 0, 6, 3\)"),
        (PIXELS.int(), STANDARD, "images must be floating point, got torch.int32"),
        (FLOATS.double(), {}, "images must be .* got torch.float64"),
        (FLOATS[0], {}, r"images must have shape .* got \(3, 4, 6\)"),
        (FLOATS.clone().requires_grad_(), {}, "images must not require grad"),
        (PIXELS, {}, "mean must be given for uint8 images .* got None"),
        (PIXELS, {"mean": MEAN}, "std must be given .* got None"),
        (FLOATS, {"std": STD}, "mean must be given .* got None"),
        (FLOATS, {"mean": 0.5, "std": 0.5}, "mean must have one number for each of 3 channels, got 0.5"),
        (FLOATS, {"mean": np.array(0.5), "std": STD}, r"mean must have one number .* got array\(0.5\)"),
        (FLOATS[:, :2], STANDARD, r"mean must have one number for each of 2 channels, got \(0.485"),
        (FLOATS, {"mean": MEAN, "std": (1, 0, 1)}, r"std\[1\] must be a finite number above 0.0, got 0"),
        (FLOATS, {"mean": (math.nan, 0, 0), "std": STD}, r"mean\[0\] must be a finite number, got nan"),
        (FLOATS, {"flip": T}, "flip must be torch.bool, got torch.float32"),
        (FLOATS, {"flip": torch.zeros(3, dtype=torch.bool)}, r"flip must have shape \(2\), got \(3,\)"),
        (FLOATS, {"partner": PARTNER}, "partner must be given with exactly one of lam and box, got partner"),
        (FLOATS, {"lam": T}, "partner must be given with exactly one of lam and box, got lam"),
        (FLOATS, {"partner": PARTNER + 1, "lam": T}, r"partner must lie in \[0, 2\), got 2 at position 0"),
        (FLOATS, {"partner": PARTNER - 1, "lam": T}, r"partner must lie in \[0, 2\), got -1 at position 1"),
        (FLOATS, {"partner": PARTNER.int(), "lam": T}, "partner must be torch.int64, got torch.int32"),
        (FLOATS, {"partner": PARTNER, "lam": T + 1.5}, r"lam must lie in \[0, 1\], got 1.5 at position 0"),
        (FLOATS, {"partner": PARTNER, "lam": T * math.nan}, r"lam must lie in \[0, 1\], got nan"),
        (FLOATS, {"partner": PARTNER, "lam": T.double()}, "lam must be torch.float32, got torch.float64"),
        (
            FLOATS,
            {"partner": PARTNER, "box": torch.tensor([[0, 4, 0, 6], [0, 5, 0, 6]], dtype=torch.int32)},
            r"box must be .* inside 4 x 6 pixels, got 5 at position \(1, 1\)",
        ),
        (
            FLOATS,
            {"partner": PARTNER, "box": torch.tensor([[0, 4, 0, 6], [0, 4, 3, 2]], dtype=torch.int32)},
            r"box must be y0 <= y1, x0 <= x1 .* got 2 at position \(1, 3\)",
        ),
        (FLOATS, {"partner": PARTNER, "box": torch.zeros(2, 3, dtype=torch.int32)}, r"box must have shape \(2, 4\)"),
        (FLOATS, {"role": ROLE}, "role and t must be given together, got role alone"),
        (FLOATS, {"t": T}, "role and t must be given together, got t alone"),
        (FLOATS, {"role": ROLE + 4, "t": T}, r"role must lie in \[0, 3\], got 4 at position 0"),
        (FLOATS, {"role": ROLE, "t": T + 1.5}, r"t must lie in \[0, 1\], got 1.5"),
        (FLOATS, {"role": ROLE.long(), "t": T}, "role must be torch.int8, got torch.int64"),
        (FLOATS, {"role": ROLE, "t": T, "index": PARTNER - 1}, "index must lie in .* got -1 at position 1"),
        (FLOATS, {"role": ROLE, "t": T.clone().requires_grad_()}, "t must not require grad"),
        (FLOATS, {"partner": PARTNER, "lam": T.clone().requires_grad_()}, "lam must not require grad"),
        (FLOATS, {"seed": -1}, "seed must be an integer .* got -1"),
        (FLOATS, {"epoch": 2**24}, "epoch must be an integer .* got 16777216"),
        (FLOATS, {"sigma_min": 0.0}, "sigma_min .* got 0.0"),
        (FLOATS, {"sigma_max": 0.1}, "sigma_max .* got 0.1"),
        (FLOATS, {"dtype": torch.float64}, "dtype must be .* got torch.float64"),
        (FLOATS, {"memory_format": torch.preserve_format}, "memory_format must be .* got torch.preserve_format"),
        (FLOATS, {"backend": "numpy"}, "backend must be .* got 'numpy'"),
        (torch.zeros(1, 1, 1, 513), {"backend": "triton"}, "images must be at most 512 .* 'triton', got 1 x 513"),
        (torch.zeros(1, 1, 513, 1), {"backend": "cupy"}, "images must be at most 512 .* 'cupy', got 513 x 1"),
    ],
)
def test_bad_arguments_are_named(images, arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_tail(images, **arguments)


def test_means_and_deviations_may_be_arrays():
    pixels = torch.arange(72, dtype=torch.uint8).view(1, 4, 6, 3)
    wanted = batch_tail(pixels, **STANDARD)
    assert torch.equal(batch_tail(pixels, mean=np.array(MEAN), std=np.array(STD)), wanted)


def test_without_data_only_arguments_are_checked_and_shapes_come_back():
    given = {"role": ROLE.to("meta"), "t": T.to("meta")}
    out = batch_tail(PIXELS.to("meta"), **STANDARD, **given)
    assert out.is_meta and out.shape == (2, 3, 4, 6) and out.dtype == torch.bfloat16
    assert out.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"images must be .* got torch\.float64"):
        batch_tail(FLOATS.double().to("meta"), **given)


@pytest.mark.parametrize("name", ["flip", "partner", "lam", "box", "role", "t", "index"])
def test_a_tensor_on_another_device_is_named(name):
    rest = {"role": ROLE, "t": T, "index": PARTNER, "flip": ROLE.bool(), "partner": PARTNER}
    mixing = {"box": torch.zeros(2, 4, dtype=torch.int32)} if name == "box" else {"lam": T}
    arguments = rest | mixing
    with pytest.raises(ValueError, match=f"{name} must be on cpu like the other arguments, got meta"):
        batch_tail(FLOATS, **arguments | {name: arguments[name].to("meta")})
