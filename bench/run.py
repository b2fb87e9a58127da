"""Benchmarks: ``python bench/run.py kernels|loader|mollify|train --help``.

Results go to ``bench/results/`` as JSON, and a table is printed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import tyro
from fused import bench_kernels
from harness import environment, table
from loader import bench_loader
from mollify import bench_mollify
from training import bench_train

BENCHMARKS = {"kernels": bench_kernels, "loader": bench_loader, "mollify": bench_mollify, "train": bench_train}


def main() -> None:
    """Run one benchmark of the registry, print its table, keep its numbers."""
    result: dict[str, Any] = tyro.extras.subcommand_cli_from_dict(BENCHMARKS, description=__doc__)
    result["environment"] = environment(result["settings"]["device"])
    processor = re.sub(r"[^A-Za-z0-9]+", "-", result["environment"]["processor"]).strip("-")
    file = Path(__file__).parent / "results" / f"{result['benchmark']}-{processor}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(f"{table(result['rows'])}\nwritten to {file}\n")


if __name__ == "__main__":
    main()
