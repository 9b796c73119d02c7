"""Programmatic dependent launch (PDL): a kernel may start before the preceding one has ended, and waits here for it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr):
    """To be called first, by every program: then all kernels before have ended, as each has waited for its own."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
