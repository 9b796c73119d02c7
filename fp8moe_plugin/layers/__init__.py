"""Layers that call the ops on their weights: engine-neutral ones here, the integration with vLLM in `vllm/`."""
