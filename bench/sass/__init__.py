"""The batch tail's machine code for sm_90 on a CPU: what it computes, and how long an H200 would take.

``program`` reads what ``cuobjdump`` prints and ``decode`` turns it into records; ``interpreter`` runs blocks of them on
the tensors of a launch (``interpreter.c`` and what it includes) and traces each warp; ``timing`` runs traces on a model
of one multiprocessor (``timing.c``) with the fitted figures of ``card``. ``native`` compiles the C.

Known is what compiled ``batch_tail.cu`` and the batch tail's Triton kernels need, of any size, dtype and mixture. A
trace depends on what kernels compute, not on time: nothing here is right for code in which warps wait for each other
otherwise than at barriers of the block.
"""
