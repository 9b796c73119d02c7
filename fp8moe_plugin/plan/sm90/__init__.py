"""Keys, plans and kernel sets of the CUDA kernels in csrc, which run on Hopper GPUs."""
