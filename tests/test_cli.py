"""The command line: every way in, one line for every mistake."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from PIL import Image

import fastmoll
from fastmoll.cli.main import main
from fastmoll.cli.options import name_option


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and captured.out == ""
    return lines[0]


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "fastmoll", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"fastmoll {fastmoll.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["check", "preview", "--version"]),
        (["check", "--help"], ["DATA", "--split", "--allow-odd", "--threads"]),
        (
            ["preview", "--help"],
            [
                "IMAGE",
                "--output",
                "--size",
                "--temperatures",
                "--sigma-min",
                "--sigma-max",
                "--k-noise",
                "--k-blur",
                "--seed",
            ],
        ),
    ],
)
def test_help_names_every_option(arguments, words, capsys):
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["chec"], "'chec'"),
        (["evalute", "x"], "; did you mean evaluate? (see fastmoll --help)"),
        (["frobnicate"], "'report') (see fastmoll --help)"),
        (["--verison"], "there is no option --verison; did you mean --version? (see fastmoll --help)"),
        (["check"], "DATA"),
        (["check", ".", "--threads", "many"], "'many'"),
        (["check", ".", "more"], "unrecognized arguments: more (see fastmoll check --help)"),
        (["check", ".", "--thread", "2"], "no option --thread; did you mean --threads? (see fastmoll check --help)"),
        (["evaluate", "x", "--corupted=y"], "--corupted; did you mean --corrupted? (see fastmoll evaluate --help)"),
        (["preview", "x.png", "--outptu", "y.png"], "no option --outptu; did you mean --output? (see fastmoll preview"),
        (["sweep", "x", "--learning-rate", "1"], "there is no option --learning-rate (see fastmoll sweep --help)"),
        (["preview", "x.png"], "-o/--output"),
        (["preview", "x.png", "-o", "y.png", "--temperatures", "warm"], "'warm'"),
        (["check", ".", "--split="], "--split is empty: is a variable of the shell not set?"),
        (["evaluate", ""], "an argument is empty: is a variable of the shell not set?"),
    ],
)
def test_bad_usage_is_one_line_and_status_two(arguments, message, capsys):
    assert main(arguments) == 2
    line = last_line(capsys)
    assert line.startswith("error: ") and message in line and "--help" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "{}/nowhere"], "nowhere does not exist"),
        (["check", "{}"], "has no class folders"),
        (["check", "{}", "--split", "val"], "no folder 'val'"),
        (["preview", "{}/x.png", "-o", "{}/x.png"], "x.png is the image itself"),
        (["preview", "{}/nowhere.jpg", "-o", "{}/o.png"], "nowhere.jpg does not exist"),
        (["preview", "{}/x.png", "-o", "{}/nowhere/o.png"], "nowhere does not exist"),
        (
            ["preview", "{}/x.png", "-o", "{}/o.png", "--temperatures", "0", "2"],
            "error: --temperatures must be in [0, 1], got 2.0",
        ),
        (["preview", "{}/x.png", "-o", "{}/o.png", "--sigma-min", "-1"], "error: --sigma-min must be"),
        # Before the checkpoint is looked for.
        (["evaluate", "{}/nowhere.pt", "--size", "0"], "--size must be an integer at least 1, got 0"),
        (["evaluate", "{}/nowhere.pt", "--threads", "-1"], "--threads must be an integer at least 1, got -1"),
        (
            ["evaluate", "{}/nowhere.pt", "--mean", ".5", ".5", "inf", "--std", "1", "1", "1"],
            "--mean must be in [0, 1], for pixels in [0, 1], got 0.5 0.5 inf",
        ),
        (
            ["evaluate", "{}/nowhere.pt", "--mean", ".5", ".5", ".5", "--std", "0", "1", "1"],
            "--std must be in (0, 1], for pixels in [0, 1], got 0 1 1",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_two(arguments, message, tmp_path: Path, capsys):
    Image.new("RGB", (20, 20)).save(tmp_path / "x.png")
    assert main([word.format(tmp_path) for word in arguments]) == 2
    line = last_line(capsys)
    assert line.startswith("error: ") and message in line


def test_an_error_of_the_system_names_the_file_and_no_number(tmp_path: Path, capsys):
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (120, 120)).save(tmp_path / "data" / name / "x.png")
    (tmp_path / "data" / "a" / "y.png").symlink_to("nowhere.png")
    assert main(["corrupt", str(tmp_path / "data"), str(tmp_path / "out")]) == 2
    assert last_line(capsys) == f"error: {tmp_path}/data/a/y.png: No such file or directory"


def test_the_options_of_check_arrive(monkeypatch):
    seen = {}
    monkeypatch.setattr("fastmoll.check.run_check", lambda data, **options: seen.update(data=data, **options) or 1)
    assert main(["check", "d", "--split", "val", "--allow-odd", "--threads", "3"]) == 1
    assert seen == {"data": Path("d"), "split": "val", "allow_odd": True, "threads": 3}


def test_the_options_of_preview_arrive_and_the_rest_is_left_to_it(monkeypatch, tmp_path: Path, capsys):
    seen = {}
    monkeypatch.chdir(tmp_path)
    Path("i.jpg").touch()
    monkeypatch.setattr("fastmoll.preview.write_preview", lambda **options: seen.update(options))
    words = "preview i.jpg -o o.png --size 64 --temperatures 0 .5 --sigma-min .4 --k-noise 2 --k-blur 3 --seed 7"
    assert main(words.split()) == 0
    assert capsys.readouterr().out == "o.png\n"
    assert seen == {
        "image": Path("i.jpg"),
        "output": Path("o.png"),
        "size": 64,
        "temperatures": [0.0, 0.5],
        "sigma_min": 0.4,
        "k_noise": 2.0,
        "k_blur": 3.0,
        "seed": 7,
    }


def test_words_after_options_belong_to_those_before(monkeypatch):
    seen = []
    monkeypatch.setattr("fastmoll.cli.report.run", lambda args: seen.append((args.runs, args.out)) or 0)
    assert main(["report", "a", "-o", "o", "b"]) == main(["report", "-o", "o", "--", "-a"]) == 0
    assert seen == [([Path("a"), Path("b")], Path("o")), ([Path("-a")], Path("o"))]


def test_a_parameter_that_begins_a_message_is_called_as_its_option():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", metavar="DATA")
    parser.add_argument("-o", "--out")
    parser.add_argument("--batch-size")
    parser.add_argument("--format", dest="layout")
    for message, expected in (
        ("batch_size must be 1", "--batch-size must be 1"),
        ("layout[2]: no", "--format[2]: no"),
        ("out: x is a file", "-o/--out: x is a file"),
        ("data: no", "DATA: no"),
        ("data x has no layout: y", "data x has no layout: y"),
        ("--out: no", "--out: no"),
        ("outer: no", "outer: no"),
    ):
        assert name_option(message, parser) == expected


def test_after_an_interrupt_another_one_does_not_disturb_the_end(monkeypatch):
    monkeypatch.setattr("fastmoll.cli.main._run", lambda arguments: 130)
    before = signal.getsignal(signal.SIGINT)
    assert main(["check"]) == 130 and signal.getsignal(signal.SIGINT) == before  # who called goes on
    try:
        assert main() == 130 and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_report_that_is_told_to_end_leaves_nothing_half_done(monkeypatch, tmp_path: Path):
    def told(*_: object, **__: object) -> None:
        with TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("fastmoll.cli.report.run", told)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(tmp_path)])
    assert stop.value.code == 143 and not [*tmp_path.iterdir()] and signal.getsignal(signal.SIGTERM) == before


def test_an_interrupt_is_one_word(monkeypatch, tmp_path: Path, capsys):
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastmoll.preview.write_preview", interrupt)
    (tmp_path / "i.jpg").touch()
    assert main(["preview", str(tmp_path / "i.jpg"), "-o", "o.png"]) == 130
    assert last_line(capsys) == "interrupted"


@pytest.mark.parametrize("arguments", [["preview", "--help"], ["check", "{}"]])
def test_a_terminal_without_greek_gets_escapes(arguments, tmp_path: Path):
    (tmp_path / "a").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "a/x.png")  # tiny: 8×8 pixels
    command = [sys.executable, "-m", "fastmoll", *(word.format(tmp_path) for word in arguments)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "error" not in result.stderr and result.returncode == (1 if arguments[0] == "check" else 0)
    assert ("8\\xd78 pixels" if arguments[0] == "check" else "\\u03c3_t") in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["check", "{}"]])
def test_a_reader_that_goes_away_ends_it_quietly(arguments, tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.jpg").write_bytes(b"")
    command = [sys.executable, "-m", "fastmoll", *(word.format(tmp_path) for word in arguments)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    # Some versions of argparse don't mind whether their help arrives.
    assert result.returncode in ((0, 141) if arguments == ["--help"] else (141,))
    assert not any(word in result.stderr for word in ("error", "Error", "Traceback", "Exception"))


def test_closed_streams_are_no_reason_to_stop(tmp_path: Path):
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    command = f"{sys.executable} -m fastmoll preview x.png -o y.png --size 16 >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "y.png").is_file()


def test_help_loads_nothing_slow():
    code = (
        "import sys; from fastmoll.cli.main import main; main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'nvidia.dali', 'triton', 'importlib.metadata')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_what_the_words_alone_show_to_be_wrong_is_said_without_torch():
    messages = {
        "evaluate x --corruptions fogg": "'fogg'; did you mean fog?",
        "evaluate x --mean 123 116 103 --std 58 57 57": "--mean must be in [0, 1], for pixels in [0, 1], got 123",
        "corrupt digits d --severities 7": "--severities must be 1 to 5, got 7",
        "sweep nope.toml": "nope.toml: no such file",
        "sweep paper.toml --task 0/3": "--task must be",
        "preview x -o o.png": "image x does not exist",
    }
    code = (
        f"import sys; from fastmoll.cli.main import main; assert all(main(x.split()) == 2 for x in {[*messages]});"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    for message, line in zip(messages.values(), result.stderr.splitlines(), strict=True):
        assert line.startswith("error: ") and message in line


def test_one_of_several_processes_says_what_is_wrong_with_the_words_of_all(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert main(["evaluate", "x", "--corruptions", "fogg"]) == 2
        assert ("fogg" in capsys.readouterr().err) == (rank == "0")


def test_the_installed_command_is_this_one():
    try:
        entries = importlib.metadata.distribution("fastmoll").entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fastmoll is not installed, only on the path")
    assert entries["fastmoll"].value == "fastmoll.cli.main:main"
