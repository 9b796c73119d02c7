"""A benchmark of the fused-MoE layer against vLLM's own backends: `python -m warmup bench`."""
