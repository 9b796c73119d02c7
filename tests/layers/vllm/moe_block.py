"""A block of a vLLM model with experts and a shared expert; no model is around it, and no engine."""

from collections.abc import Callable

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.layers.vllm import config as config_module
from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.shared_expert import Mlp
from tests import helpers as h
from tests.layers.experts import HIDDEN

TOKENS, PREFIX = 7, "model.layers.3.mlp"


class MoeBlock:
    """A loaded block, and tokens for it.

    Args:
        make: makes the block.
        shared: the name of its shared expert.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        make: Callable[[VllmConfig, Fp8MoeConfig], torch.nn.Module],
        shared: str,
    ) -> None:
        monkeypatch.setattr(config_module, "warmup_command", lambda: "warmup")
        self.config = VllmConfig()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with set_current_vllm_config(self.config):
                self.module = make(self.config, Fp8MoeConfig(QuantSpec(FP8_BLOCK)))
                mlp = getattr(self.module, shared)
                self.mlp = Mlp(mlp.gate_up_proj, mlp.down_proj)
                self.runner = self.module.experts
                self.experts = self.runner.routed_experts
                self.load()
                for part in (*self.mlp, self.experts):
                    part.quant_method.process_weights_after_loading(part)
        finally:
            torch.set_default_dtype(torch.float32)
        self.gen = h.seeded(0, torch.device("cpu"))
        self.x = h.random_tokens(self.gen, TOKENS, HIDDEN)

    def load(self) -> None:
        """Load the weights."""
        raise NotImplementedError

    def run(self) -> torch.Tensor:
        with set_forward_context(None, self.config), torch.inference_mode():
            return self.module(self.x.clone())

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors of the experts, with expert 1 as the shared one, too."""
        tensors = [getattr(self.experts, name).data for name in expert_tensors(FP8_BLOCK, 1, 128, 128)]
        return [
            torch.cat([tensor.view(torch.uint8), tensor[1:2].view(torch.uint8)]).view(tensor.dtype)
            for tensor in tensors
        ]
