"""`python -m warmup`: every kernel that a checkpoint needs, compiled before it is deployed, without a GPU."""
