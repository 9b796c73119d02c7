"""Keys, plans and kernel sets of the Triton kernels."""
