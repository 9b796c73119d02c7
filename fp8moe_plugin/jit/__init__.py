"""From CUDA C++ sources to launched kernels: compilation, bundle and cache, launch."""
