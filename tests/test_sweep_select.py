"""Which runs of a sweep are chosen, by filters and as a part of them, and what is said of those that are done."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import DIGITS, finish, names

from fastmoll.cli.main import main
from fastmoll.sweep.file import Run, read_sweep
from fastmoll.sweep.select import select


@pytest.mark.parametrize("task", ["0/3", "4/3", "1", "1/0", "-1/3", "a/3"])
def test_a_task_that_is_no_part_is_refused(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "paper.toml", f"--task={task}"]) == 2
    assert f"1 <= i <= n, for example 1/8 to 8/8 (--array=1-8), got '{task}'" in capsys.readouterr().err


def test_a_filter_is_a_value_before_it_is_a_part_of_a_name(paper_sweep: list[Run]) -> None:
    def chosen(*filters: str) -> list[str]:
        return names(select(paper_sweep, filters))

    assert chosen("cifar10") == [name for name in names(paper_sweep) if name.startswith("cifar10-")]
    assert chosen("cifar") == [name for name in names(paper_sweep) if name.startswith("cifar")]
    plain = ["cifar10-presnet50-fcr-seed0", "cifar10-presnet50-fcr-seed1", "cifar10-presnet50-fcr-seed2"]
    assert chosen("cifar10", "presnet50", "fcr", "mollify=false") == plain
    assert chosen("data=cifar10", "net=presnet50", "augment=fcr", "mollify=false", "seed=1") == plain[1:2]
    assert {*chosen("mollify.k-noise=2.0")} == {*chosen("mollify.k_noise=2")} == {*chosen("mollify.k_noise=2")}
    assert len(chosen("mollify.k_noise=2")) == 9
    assert len(chosen("mollify.roles=1,0,1", "seed0")) == 3


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (["cifra10"], "no run matches 'cifra10'; did you mean cifar10?"),
        (["nets=presnet50"], "unknown key 'nets'; did you mean net?"),
        (["net=presnet51"], "no run matches 'net=presnet51'; did you mean presnet50?"),
        (["mollify=maybe"], "no run matches 'mollify=maybe'; there are false, true"),
        (["seed=3"], "no run matches 'seed=3'; there are 0, 1, 2"),
        (["zzz"], "no run matches 'zzz'; there are allconv10, cifar10, cifar100, densenet40, fcr, "),
        (["zzz=1"], "unknown key 'zzz'; there are data, net, augment, mollify, seed, mollify.beta, mollify.k_blur, "),
        (["wrn40", "fcr+mixup"], "no run matches all of wrn40, fcr+mixup"),
    ],
)
def test_a_filter_that_matches_nothing_is_an_error(paper_sweep: list[Run], filters: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        select(paper_sweep, filters)


@pytest.mark.parametrize("done", [0, 2])
def test_the_tasks_of_an_array_share_no_run_and_leave_none_out(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str], done: int
) -> None:
    runs = read_sweep(write_sweep(DIGITS.replace("seed = [0, 1]", "seed = [0, 1, 2, 3, 4]")))
    for run in runs[:done]:
        finish(Path("runs/some") / run.name, error=0.1)
    listed = []
    for part in (1, 2, 3, 4):
        assert main(["sweep", "some.toml", "--list", "--task", f"{part}/4"]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert len(lines) in (2, 3) and last.startswith(f"{len(lines)} runs in runs/some: ")
        listed += [tuple(line.split(maxsplit=1 if line[:4] == "done" else 2)) for line in lines]
    assert sorted(words[-1] for words in listed) == sorted(names(runs))
    assert sum(words[0] == "done" for words in listed) == done


def test_a_part_beyond_the_last_run_has_nothing_to_do(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(DIGITS)
    assert main(["sweep", "some.toml", "--task", "5/8", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "--task 5/8: nothing to do, there are only 4 runs\n" and not Path("runs").exists()


def test_runs_that_were_done_with_other_settings_are_named(
    write_sweep: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = DIGITS.replace(
        'data = "digits"', "data = './a/mine'\noptions.data.mean = [0, 0, 0]\noptions.data.std = [1, 1, 1]"
    )
    Path("a/mine").mkdir(parents=True)
    runs = read_sweep(write_sweep(text))
    for run in runs[:3]:
        folder = Path("runs/some") / run.name
        finish(folder, 0.1)
        config: dict[str, dict[str, object]] = {}
        for name, value in run.settings.items():
            config.setdefault(name.partition(".")[0], {})[name.partition(".")[2]] = value
        config["data"] |= {"name": str(Path("a/mine").resolve()), "threads": 7}  # as the trainer writes it
        config["mollify"] |= {"beta": [9, 9]} if not run.mollify else {}
        (folder / "config.json").write_text(json.dumps(config))
    assert main(["sweep", "some.toml", "--table"]) == 0 and capsys.readouterr().err == ""
    write_sweep(text.replace("./a/mine", "./b/mine"))
    Path("b/mine").mkdir(parents=True)
    assert main(["sweep", "some.toml", "--table"]) == 0
    change = f"data.name {Path('a/mine').resolve()} instead of {Path('b/mine').resolve()}"
    expected = f"runs/some: done before with {change}, and left as it is: {', '.join(names(runs[:3]))}\n"
    assert capsys.readouterr().err == expected
