"""Layers that quantize their activations and call the ops: engine-neutral here, vLLM's in `vllm/`."""
