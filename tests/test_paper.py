"""The published cells are those of the paper, and a comparison says what it says by hand."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest

from fastmoll.kernels.corruption_constants import CORRUPTIONS
from fastmoll.models import check_model_name
from fastmoll.paper import SIZES, PublishedCell, compare, departs, paper_mollification, published


def one(**names: str) -> PublishedCell:
    (cell,) = published(**names)
    return cell


def cell(printed: str, deviation: str = "") -> PublishedCell:
    return PublishedCell("1", "cifar10", "presnet50", "fcr", "true", "error", "clean", printed, deviation)


# --- the cells --------------------------------------------------------------------------------------------------------


def test_every_cell_of_the_tables_is_there_once() -> None:
    cells = published()
    assert Counter(x.table for x in cells) == {"1": 288, "A1": 288, "A2": 270, "5": 96, "2": 204, "4": 136}
    keys = {(x.table, x.data, x.net, x.augment, x.mollify, x.metric, x.images) for x in cells}
    assert len(keys) == len(cells) == 1282
    assert {x.table for x in cells if x.deviation is not None} == {"A1"}
    assert all(x.deviation is not None for x in cells if x.table == "A1")
    for table, (metric, images) in product(
        ("1", "A1", "A2", "5"), product(("error", "nll", "ece"), ("clean", "corrupted"))
    ):
        assert published(table=table, metric=metric, images=images)
    for table in ("2", "4"):
        assert {x.images for x in published(table=table)} >= {"clean", *CORRUPTIONS}


def test_names_are_those_that_runs_have() -> None:
    from fastmoll.augment import parse_augment

    for net in {x.net for x in published()}:
        check_model_name(net)
    for augment in {x.augment for x in published()}:
        parse_augment(augment)


# Read off the paper by hand, a few of each table.
READ = [
    ("1", "cifar10", "presnet50", "fcr+trivial", "false", "error", "corrupted", "12.1", ""),
    ("1", "cifar10", "presnet50", "fcr+trivial", "true", "error", "corrupted", "8.0", ""),
    ("1", "cifar100", "presnet50", "fcr+trivial", "false", "error", "clean", "20.5", ""),
    ("1", "cifar100", "presnet50", "fcr+trivial", "true", "error", "corrupted", "28.5", ""),
    ("1", "tinyimagenet", "presnet50", "fcr+trivial", "true", "error", "clean", "32.2", ""),
    ("1", "tinyimagenet", "presnet50", "fcr+mixup", "false", "nll", "corrupted", "3.90", ""),
    ("1", "cifar100", "presnet50", "fcr+cutmix", "true", "ece", "clean", "0.19", ""),
    ("1", "cifar10", "presnet50", "none", "false", "ece", "corrupted", "0.22", ""),
    ("A1", "cifar10", "presnet50", "none", "false", "nll", "corrupted", "1.34", "0.04"),
    ("A1", "tinyimagenet", "presnet50", "none", "false", "error", "clean", "57.3", "2.12"),
    ("A1", "cifar10", "presnet50", "fcr+mixup", "false", "error", "corrupted", "21.9", "1.47"),
    ("A1", "cifar100", "presnet50", "fcr+augmix", "true", "error", "clean", "25.7", "0.30"),
    ("A1", "tinyimagenet", "presnet50", "fcr+cutmix", "true", "ece", "corrupted", "0.17", "0.00"),
    ("A1", "cifar100", "presnet50", "fcr+rand", "false", "nll", "corrupted", "2.09", "0.07"),
    ("A2", "cifar10", "allconv10", "none", "true", "error", "clean", "8.8", ""),
    ("A2", "tinyimagenet", "wrn40", "fcr", "true", "ece", "corrupted", "0.25", ""),
    ("A2", "cifar100", "googlenet", "fcr+augmix", "true", "nll", "corrupted", "1.50", ""),
    ("A2", "cifar100", "resnext29", "fcr", "true", "error", "corrupted", "38.9", ""),
    ("A2", "cifar10", "densenet40", "fcr+augmix", "true", "nll", "clean", "0.25", ""),
    ("5", "imagenet", "resnet50", "fcr+trivial", "false", "error", "corrupted", "58.2", ""),
    ("5", "imagenet", "resnet50", "fcr+trivial", "true", "error", "clean", "25.1", ""),
    ("5", "imagenet", "resnet50", "fcr+cutmix", "true", "ece", "corrupted", "0.19", ""),
    ("5", "imagenet", "resnet50", "none", "false", "nll", "corrupted", "3.27", ""),
    ("2", "cifar10", "presnet50", "fcr+trivial", "false", "error", "gaussian_noise", "31", ""),
    ("2", "cifar10", "presnet50", "fcr+trivial", "false", "error", "motion_blur", "10.0", ""),
    ("2", "cifar10", "presnet50", "fcr+trivial", "noise", "error", "shot_noise", "5.7", ""),
    ("2", "cifar100", "presnet50", "fcr+trivial", "blur", "error", "jpeg_compression", "46", ""),
    ("2", "tinyimagenet", "presnet50", "fcr+trivial", "true", "error", "contrast", "68", ""),
    ("2", "cifar10", "presnet50", "fcr+trivial", "noise", "error", "clean+corrupted", "7.6", ""),
    ("4", "imagenet", "resnet50", "none", "difference", "error", "impulse_noise", "-15.8", ""),
    ("4", "imagenet", "resnet50", "fcr+mixup", "difference", "error", "defocus_blur", "-15.8", ""),
    ("4", "imagenet", "resnet50", "fcr+trivial", "difference", "error", "jpeg_compression", "1.4", ""),
    ("4", "imagenet", "resnet50", "fcr+cutmix", "difference", "error", "corrupted", "-4.3", ""),
]


@pytest.mark.parametrize("expected", READ, ids=lambda x: "-".join(x[:7]))
def test_a_cell_is_what_the_paper_prints(expected: tuple[str, ...]) -> None:
    assert PublishedCell(*expected) in published()


def rounding(cells: list[PublishedCell]) -> float:
    """How far the mean of printed numbers may be from the mean of the unrounded ones, with 3 % of room."""
    return 1.03 * sum(x.rounding for x in cells) / len(cells)


def test_the_means_of_the_breakdowns_are_those_of_their_columns() -> None:
    # Table 2's is of 16 columns, the clean one among them; with 15 it would be up to 2.5 points off.
    for data, mollify in product(("cifar10", "cifar100", "tinyimagenet"), ("false", "true", "noise", "blur")):
        row = published(table="2", data=data, mollify=mollify)
        mean = one(table="2", data=data, mollify=mollify, images="clean+corrupted")
        columns = [x for x in row if x is not mean]
        assert len(columns) == 16
        assert abs(sum(x.value for x in columns) / 16 - mean.value) <= mean.rounding + rounding(columns)
    wrong = [x.value for x in published(table="2", data="tinyimagenet", mollify="false") if x.images in CORRUPTIONS]
    assert sum(wrong) / 15 - 68 > 2.5
    # Table 4's is of 15.
    for mean in published(table="4", images="corrupted"):
        columns = [x for x in published(table="4", augment=mean.augment) if x.images in CORRUPTIONS]
        assert abs(sum(x.value for x in columns) / 15 - mean.value) <= mean.rounding + rounding(columns)


def test_the_tables_agree_where_they_print_the_same_runs() -> None:
    for images in ("clean", "corrupted"):
        for difference in published(table="4", images=images):
            with_, without = (
                one(table="5", augment=difference.augment, mollify=x, metric="error", images=images).value
                for x in ("true", "false")
            )
            assert difference.value == pytest.approx(with_ - without, abs=0.1501)  # three numbers, each rounded
    for data, mollify in product(("cifar10", "cifar100", "tinyimagenet"), ("false", "true")):
        columns = [x for x in published(table="2", data=data, mollify=mollify) if x.images in CORRUPTIONS]
        of_75 = one(table="1", data=data, augment="fcr+trivial", mollify=mollify, metric="error", images="corrupted")
        assert abs(sum(x.value for x in columns) / 15 - of_75.value) <= of_75.rounding + rounding(columns)


def test_every_data_set_has_its_size() -> None:
    assert {x.data for x in published()} == {*SIZES}
    assert (SIZES["cifar10"], SIZES["tinyimagenet"], SIZES["imagenet"]) == (32, 64, 224)


@pytest.mark.parametrize(
    ("settings", "other"),
    [({}, False), ({"mollify.roles": [1, 1, 0]}, False), ({"optim.epochs": 4}, True), ({"optim.clip": None}, True)],
)
def test_a_run_departs_from_the_paper_with_any_setting_but_mollifications(
    settings: dict[str, object], other: bool
) -> None:
    assert departs(settings) is other


def test_a_look_up_names_what_the_paper_does_not_have() -> None:
    assert published(data="CIFAR10", table="2", mollify="blur", images="fog")[0].printed == "6.4"
    assert published(data="digits") == []
    with pytest.raises(ValueError, match="metric must be one of error, nll, ece, got 'accuracy'"):
        published(metric="accuracy")
    with pytest.raises(ValueError, match=r"images must be one of clean, corrupted, .* got 'rain'"):
        published(images="rain")
    with pytest.raises(ValueError, match=r"mollify must be one of .*, got 'yes'"):
        published(mollify="yes")


# --- comparing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "deviation", "printed", "printed_deviation", "within", "whose"),
    [
        # 2 × 0.10 and half of the last digit, 0.05.
        (5.25, 9.0, "5.0", "0.10", True, "published"),
        (5.26, 9.0, "5.0", "0.10", False, "published"),
        (4.75, 0.0, "5.0", "0.10", True, "published"),
        (4.74, 0.0, "5.0", "0.10", False, "published"),
        # A standard deviation of 0.00 is one below 0.005; what is left is the rounding.
        (0.0449, 0.01, "0.04", "0.00", True, "published"),
        (0.0451, 0.01, "0.04", "0.00", False, "published"),
        # None is printed: the measured one, and whole numbers are known to 0.5.
        (13.5, 0.5, "12", "", True, "measured"),
        (13.6, 0.5, "12", "", False, "measured"),
    ],
)
def test_within_is_two_standard_deviations_and_the_rounding(
    mean: float, deviation: float, printed: str, printed_deviation: str, within: bool, whose: str
) -> None:
    result = compare(mean, deviation, cell(printed, printed_deviation))
    assert result.difference == pytest.approx(mean - float(printed), abs=1e-12)
    assert (result.within, result.deviation) == (within, whose)


def test_one_run_is_compared_where_the_paper_prints_a_deviation_only() -> None:
    assert compare(5.1, None, cell("5.0", "0.10")).within is True
    result = compare(7.0, None, cell("5.0"))
    assert (result.difference, result.within, result.deviation) == (2.0, None, None)


@pytest.mark.parametrize(
    ("mollify", "settings", "kind"),
    [
        (False, {}, "false"),
        (False, {"mollify.beta": [1, 3]}, "false"),
        (None, {}, None),
        (True, {}, "true"),
        (True, {"optim.epochs": 30}, "true"),
        (True, {"mollify.roles": [2, 2, 2]}, "true"),
        (True, {"mollify.roles": [1, 1, 0]}, "noise"),
        (True, {"mollify.roles": (2.0, 0.0, 2.0)}, "blur"),
        (True, {"mollify.roles": [1, 2, 1]}, None),
        (True, {"mollify.roles": [0, 1, 1]}, None),
        (True, {"mollify.roles": [1, 1, 1, 1]}, None),
        (True, {"mollify.roles": ["1", 1, 1]}, None),
        (True, {"mollify.roles": [[1], 1, 1]}, None),
        (True, {"mollify.roles": [True, True, True]}, None),
        (True, {"mollify.roles": [1, 10**400, 1]}, None),
        (True, {"mollify.roles": [1, math.nan, 1]}, None),
        (True, {"mollify.roles": {"clean": 1, "noise": 1, "blur": 1}}, None),
        (True, {"mollify.beta": [1, 3]}, None),
        (True, {"mollify.roles": [1, 1, 0], "mollify.k_noise": 2}, None),
    ],
)
def test_a_run_is_the_papers_only_with_its_mollification(
    mollify: bool | None, settings: dict[str, object], kind: str | None
) -> None:
    assert paper_mollification(mollify, settings) == kind
