"""Block-FP8 mixture-of-experts layers for vLLM on Hopper GPUs."""

__version__ = "0.1.0"


def register() -> None:
    """Entry point of vLLM's `vllm.general_plugins`: makes `--quantization fp8moe` known, and nothing else.

    Runs in every vLLM process, may run more than once, touches no GPU and imports no kernel.
    """
    from fp8moe_plugin.layers.vllm import register_quantization

    register_quantization()
