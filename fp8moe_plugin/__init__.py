"""Block-FP8 mixture-of-experts layers for vLLM and SGLang on Hopper GPUs."""

__version__ = "0.1.0"


def register() -> None:
    """Register `--quantization fp8moe` with vLLM, which calls this as an entry point of `vllm.general_plugins`.

    Runs in every vLLM process, possibly more than once. It touches no GPU and imports no kernels.
    """
    from fp8moe_plugin.layers.vllm import register_quantization

    register_quantization()


def register_sglang() -> None:
    """Register `--quantization fp8moe` with SGLang, which calls this as an entry point of `sglang.srt.plugins`."""
    from fp8moe_plugin.layers.sglang import register_quantization

    register_quantization()
