"""The benchmarks of fastmoll. Each prints a table and writes its results as JSON to bench/results/.

With --out FOLDER they go there. A sweep is drawn, too, and plot draws one again. The settings of a benchmark are listed
by python bench/run.py NAME --help.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro
from augment import bench_augment
from corruptions import bench_corruptions
from fused import bench_kernels
from harness import environment, table
from loader import bench_loader
from mollify import bench_mollify
from roofline import bench_roofline
from simulate import bench_simulate
from sweep import bench_sweep, plot
from training import bench_train
from tune import bench_tune

BENCHMARKS: dict[str, Callable[..., Any]] = {
    "augment": bench_augment,
    "corruptions": bench_corruptions,
    "kernels": bench_kernels,
    "loader": bench_loader,
    "mollify": bench_mollify,
    "plot": plot,
    "roofline": bench_roofline,
    "simulate": bench_simulate,
    "sweep": bench_sweep,
    "train": bench_train,
    "tune": bench_tune,
}


def main() -> int:
    """Run one benchmark of the registry, print its table, keep its numbers; returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    common, arguments = parser.parse_known_args()
    try:
        if not {"-h", "--help"} & {*arguments}:
            common.out.mkdir(parents=True, exist_ok=True)  # before the work, which would be lost without it
        result: Any = tyro.extras.subcommand_cli_from_dict(BENCHMARKS, description=__doc__, args=arguments)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if isinstance(result, Path):
        sys.stdout.write(f"drawn to {result}\n")
        return 0
    device = result["settings"].get("device")
    result["environment"] = environment(device or "cpu")
    processor = re.sub(r"[^A-Za-z0-9]+", "-", result["environment"]["processor"]).strip("-")
    # What is computed rather than timed is the same everywhere.
    name = f"{result['benchmark']}-{processor}" if device else result["benchmark"]
    file = common.out / f"{name}.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    skipped = "".join(f"left out: {peer}: {why}\n" for peer, why in result.get("skipped", {}).items())
    failed = "".join(f"failed: {side}: {why}\n" for side, why in result.get("failed", {}).items())
    entries = "".join(f"{entry}\n" for entry in result.get("entries", ()))
    sys.stdout.write(f"{table(result['rows'])}\n{entries}{skipped}{failed}written to {file}\n")
    if result["benchmark"] == "sweep":
        drawn = plot(file) if importlib.util.find_spec("matplotlib") else "nothing: matplotlib is not installed"
        sys.stdout.write(f"drawn to {drawn}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
