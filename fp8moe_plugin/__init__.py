"""Block-FP8 mixture-of-experts layers for vLLM and SGLang on Hopper GPUs."""


def __getattr__(name: str) -> str:
    """Returns the installed version as `__version__`, which engines do not need when they import the plugin."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("fp8moe-plugin")


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
