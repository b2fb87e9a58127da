"""Crops to their final size on a CPU, by compiled code: DALI's own operator takes three to four times as long there."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.pipeline import do_not_convert


@do_not_convert  # type: ignore[untyped-decorator]
def resize_compiled(images: Any, size: int) -> Any:
    """A node of uint8 HWC images on the CPU, resized to ``size``², linear and with antialiasing; it needs Numba."""
    sizes = types.Constant(np.zeros(size, np.uint8), device="cpu")
    return fn.reshape(_operator()(sizes, images), layout="HWC")


@functools.cache
def _operator() -> Any:
    from nvidia.dali.plugin import numba as plugin

    from fastmoll.kernels import resize_numba

    def setup(outs: Any, ins: Any) -> None:
        for sample in range(len(outs[0])):
            outs[0][sample][0] = outs[0][sample][1] = ins[0][sample][0]
            outs[0][sample][2] = 3

    def run(out: Any, sizes: Any, image: Any) -> None:
        resize_numba.resize(image, out)

    documented: Any = plugin.NumbaFunction

    class Resize(documented):  # type: ignore[misc]
        """Takes the compiled code from Numba's cache, where DALI would compile for two to three seconds a process.

        What is replaced is not public: should DALI change it, the functions above are used as it documents.
        """

        def _get_setup_fn_cpu(self, *arguments: Any) -> Any:
            known = self._setup_fn_sig() == resize_numba.SETUP
            return resize_numba.setup.address if known else super()._get_setup_fn_cpu(*arguments)

        def _get_run_fn_cpu(self, *arguments: Any) -> Any:
            known = self._run_fn_sig() == resize_numba.RUN
            return resize_numba.run.address if known else super()._get_run_fn_cpu(*arguments)

    pixels = types.UINT8
    return Resize(
        run_fn=run, setup_fn=setup, in_types=[pixels, pixels], ins_ndim=[1, 3], out_types=[pixels], outs_ndim=[3]
    )
