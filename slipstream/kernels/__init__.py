"""Triton kernels, each module with a plain torch reference of the same signature beside it.

Sizes that change from step to step are read from device memory or are never specialised on, so that
no step compiles anything that its warm-up did not. With TRITON_INTERPRET=1 in the environment the
kernels run on a CPU, slowly, which is how they are tested without a GPU.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from slipstream.kernels.interpreter import repair

    repair()
