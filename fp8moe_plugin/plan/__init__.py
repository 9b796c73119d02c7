"""Which kernels exist, and which of them a call launches. Pure Python, used by the runtime and the warm-up.

`spec` describes a layer, `keys` names a kernel and `parameters` its arguments; `sm90/` and `triton/` hold each
backend's keys, plans and kernel sets; `scratch` is what their scratch memory has in common, and `tuning` holds the
measured constants.
"""
