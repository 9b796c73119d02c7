"""The measurements of `fp8moe-warmup compare`: engines on one checkpoint, each in a process of its own."""
