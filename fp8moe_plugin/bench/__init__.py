"""This project's fused-MoE layer, timed beside vLLM's own backends: `python -m warmup bench`."""
