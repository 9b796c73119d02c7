"""Compilation, storage (bundle and cache) and launch of kernels."""
