"""Layers that call the ops on their weights: engine-neutral ones here, the integrations in `vllm/` and `sglang/`."""
