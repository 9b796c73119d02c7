"""A benchmark of the fused-MoE layer against vLLM's own backends: `fp8moe-warmup bench`."""
