"""A plugin of SGLang for the tests: what SGLang does differently on a CPU, and the tests want as on a GPU."""


def register() -> None:
    from sglang.srt.model_executor import model_runner
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    # `torch_native`, the only attention that needs no kernels, lacks the prefill that SGLang chooses for it (MHA).
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    # On a CPU, SGLang enlarges experts and MLPs in the model's configuration until ranks can share their blocks.
    model_runner.adjust_config_with_unaligned_cpu_tp = lambda model_config, load_config, tp_size: model_config
