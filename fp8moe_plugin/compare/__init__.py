"""What `fp8moe-warmup compare` measures: engines on one checkpoint, each in a process of its own."""
