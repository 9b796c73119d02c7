"""From CUDA C++ sources to launched kernels: compile, cache, launch."""
