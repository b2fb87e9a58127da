"""Train a classifier on small images, with or without mollification, and evaluate it.

    python train/small_images.py --mollify                          # scikit-learn's digits, a minute or two
    torchrun train/small_images.py --data cifar10 --net presnet50 --augment fcr+trivial --mollify
    python train/small_images.py --data cifar10 --help              # every setting of the paper's recipe

The images stay on the device, where they are augmented and mollified. The output folder holds the same files as that of
``imagenet.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Before torch loads OpenMP, whose idle threads else spin and take the CPUs from other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fastmoll.interrupt import importing, open_streams, reader_gone


def main(argv: Sequence[str] | None = None) -> int:
    """Run with these arguments (default: the command line's); returns the exit code that `start` says."""
    open_streams()
    with importing():
        from fastmoll.train.config import checked, parse_small

        try:
            config = checked(parse_small(argv), argv)
        except BrokenPipeError:  # --help
            return reader_gone()
        # Loaded here: neither --help nor a wrong option should wait for torch.
        from fastmoll.train.run import start
        from fastmoll.train.run_small import run
    return start(config, run, argv)


if __name__ == "__main__":
    sys.exit(main())
