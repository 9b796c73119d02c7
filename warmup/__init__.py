"""`fp8moe-warmup`: compiles every kernel that a checkpoint needs before deployment, without a GPU."""
