"""Train a classifier on mollified images and evaluate it.

    python train/imagenet.py                                       # the bundled photographs, a few minutes
    torchrun --nproc-per-node 8 train/imagenet.py /data/imagenet   # the paper's recipe
    python train/imagenet.py /data/imagenet --recipe scratch --help

Any ImageFolder tree is data. ``--help`` lists every setting. The output folder holds ``config.json``, ``log.jsonl``,
``tensorboard/``, ``checkpoint.pt`` and, at the end, ``model.pt`` (a state dict) and ``result.json``, in which errors
are fractions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Before torch loads OpenMP, whose idle threads else spin and take the CPUs from the threads that decode.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fastmoll.interrupt import importing, open_streams, reader_gone


def main(argv: Sequence[str] | None = None) -> int:
    """Run with these arguments (default: the command line's); returns the exit code that `start` says."""
    open_streams()
    with importing():
        from fastmoll.train.config import checked, parse

        try:
            config = checked(parse(argv), argv)
        except BrokenPipeError:  # --help
            return reader_gone()
        # Loaded here: neither --help nor a wrong option should wait for torch.
        from fastmoll.train.run import start
        from fastmoll.train.run_imagenet import run
    return start(config, run, argv)


if __name__ == "__main__":
    sys.exit(main())
