"""The list of kernels, and the plan of each call. Pure Python, used by the runtime and the warm-up.

`spec` describes a layer, `keys` names a kernel and `parameters` its arguments; `sm90/` and `triton/` hold each
backend's keys, plans and kernel sets; `scratch` holds the layout of scratch memory that both share, and `tuning` the
measured constants.
"""
