"""A plugin of SGLang for the tests: what SGLang does differently on a CPU, and the tests want as on a GPU."""


def register() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import model_runner
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    # `torch_native`, the only attention that needs no kernels, lacks the prefill that SGLang chooses for it (MHA).
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    # On a CPU, SGLang enlarges experts and MLPs in the model's configuration until ranks can share their blocks.
    model_runner.adjust_config_with_unaligned_cpu_tp = lambda model_config, load_config, tp_size: model_config
    # Steps of DP attention are padded with sequences, whose length the attention without kernels does not name.
    for name in ("get_cpu_graph_seq_len_fill_value", "get_cuda_graph_seq_len_fill_value"):  # the latter before 0.5.20
        setattr(TorchNativeAttnBackend, name, lambda backend: 1)
