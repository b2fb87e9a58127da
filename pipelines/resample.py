"""Crops to their final size on a CPU, by compiled code: DALI's own operators take three to four times as long there."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from nvidia.dali import fn, types
from nvidia.dali.pipeline import do_not_convert


@do_not_convert  # type: ignore[untyped-decorator]
def resample(images: Any, size: int, angle: Any = None) -> Any:
    """A node of uint8 HWC images on the CPU, to ``size``², and rotated by a node of angles in degrees; it needs Numba.

    What it does is said in :func:`fastmoll.kernels.resample_numba.resize` and ``rotate``.
    """
    inputs = [types.Constant(np.zeros(size, np.uint8), device="cpu"), images]
    if angle is not None:
        inputs.append(fn.reshape(angle, shape=[1]))
    return fn.reshape(_operator(len(inputs))(*inputs), layout="HWC")


@functools.cache
def _operator(inputs: int) -> Any:
    from nvidia.dali.plugin import numba as plugin

    from fastmoll.kernels import resample_numba

    def setup(outs: Any, ins: Any) -> None:
        for sample in range(len(outs[0])):
            outs[0][sample][0] = outs[0][sample][1] = ins[0][sample][0]
            outs[0][sample][2] = 3

    def resize(out: Any, sizes: Any, image: Any) -> None:
        resample_numba.resize(image, out)

    def rotate(out: Any, sizes: Any, image: Any, angle: Any) -> None:
        resample_numba.rotate(image, angle[0], out)

    documented: Any = plugin.NumbaFunction

    class Resample(documented):  # type: ignore[misc]
        """Takes the compiled code from Numba's cache, where DALI would compile for two to three seconds a process.

        What is replaced is not public: should DALI change it, the functions above are used as it documents.
        """

        def _get_setup_fn_cpu(self, *arguments: Any) -> Any:
            known = self._setup_fn_sig() == resample_numba.SETUP
            return resample_numba.setup.address if known else super()._get_setup_fn_cpu(*arguments)

        def _get_run_fn_cpu(self, *arguments: Any) -> Any:
            known = self._run_fn_sig() == resample_numba.RUN
            return resample_numba.run.address if known else super()._get_run_fn_cpu(*arguments)

    return Resample(
        run_fn=resize if inputs == 2 else rotate,
        setup_fn=setup,
        in_types=[types.UINT8, types.UINT8, types.FLOAT][:inputs],
        ins_ndim=[1, 3, 1][:inputs],
        out_types=[types.UINT8],
        outs_ndim=[3],
    )
