"""The layers' steps as Triton kernels, for GPUs that the kernels in `csrc` do not run on. A file holds one step.

Only compiling imports this package: at run time the compiled kernels are launched like those of `csrc`. The constexpr
parameters of a kernel are its macros (`plan/triton_catalog.py`), the others are those in `plan/parameters.py`.
"""
