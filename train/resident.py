"""A loader of one batch, to measure the trainer without the loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fastmoll


class ResidentLoader:
    """Gives the first batch of a loader again and again, as many times an epoch as the loader has batches."""

    def __init__(self, loader: fastmoll.ImageNetLoader | fastmoll.SmallImageLoader) -> None:
        """Take the first batch of ``loader``, which stays where it is: on the device."""
        self._length = len(loader)
        self._batch = next(iter(loader))
        loader.close()

    def set_epoch(self, epoch: int) -> None:
        """Nothing: every epoch is the same."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """The batch, once for each batch of the loader."""
        for _ in range(self._length):
            yield self._batch
