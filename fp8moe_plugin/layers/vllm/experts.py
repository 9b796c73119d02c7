"""The experts of a layer, as called by vLLM's modular kernel between dispatch and combine."""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

from fp8moe_plugin.checkpoint import gpt_oss
from fp8moe_plugin.checkpoint.shapes import local_intermediate, padded_hidden
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.layers.experts import Experts
from fp8moe_plugin.layers.vllm.gather import all_tokens
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape
from fp8moe_plugin.settings import batch_invariant

# Not supported: MoRI (AMD only), MoonEP (supplies weights of its own), passthrough (leaves dispatch to the experts) and
# FlashInfer (vLLM's own FP8 experts refuse it too).
ALL2ALL = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "deepep_v2", "nixl_ep")
ALTERNATING = {gpt_oss.ACTIVATION.kind: "swigluoai"}  # vLLM's name where gate and up rows alternate
SWIGLUSTEP, SWIGLUSTEP_LIMIT = "swiglustep", 7.0  # vLLM's kernel for it has no other limit, and ignores a given one


class Fp8MoeExperts(mk.FusedMoEExpertsModular):
    """Base class for both layouts of tokens. It keeps no state between calls, and no copies of weights or scales.

    vLLM passes keyword arguments to `apply`; each subclass declares the ones that it uses.
    """

    spec: LayerSpec  # of the class, because vLLM creates further instances itself (elastic expert parallelism)

    @staticmethod
    def _supports_current_device() -> bool:
        return True  # `layers.machine.check_machine` has already refused unsupported devices

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @classmethod
    def _supports_activation(cls, activation: MoEActivation) -> bool:
        kinds = cls.spec.activation.kind, ALTERNATING.get(cls.spec.activation.kind)
        return activation.value in kinds  # `check_layer` has refused what no kernel computes

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        backend = moe_parallel_config.all2all_backend
        # With "passthrough", vLLM leaves dispatch to the experts even if there is no all-to-all.
        return backend in ALL2ALL or not (moe_parallel_config.use_all2all_kernels or backend == "passthrough")

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True  # the plans are batch invariant, and `layers.machine.check_machine` has refused the reference

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), self.output_shape(M, K, local_num_experts)  # the ops allocate their own scratch memory

    def output_shape(self, tokens: int, hidden: int, local_experts: int) -> tuple[int, ...]:
        raise NotImplementedError

    def experts(self, w1: torch.Tensor, w2: torch.Tensor) -> Experts:
        """Returns the experts with the weights of a call, and the scales of this instance."""
        tensors = {"w13": w1, "w13_scale": self.w1_scale, "w2": w2, "w2_scale": self.w2_scale}
        tensors |= {"w13_bias": self.w1_bias, "w2_bias": self.w2_bias} if self.spec.bias else {}
        return Experts(self.spec, tensors, tensors)


class StandardExperts(Fp8MoeExperts):
    """Tokens in any order, with the ids of their experts. One op computes the whole layer.

    The tokens are in bfloat16, or in e4m3 from `QuantizedGather`.
    """

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True  # vLLM's dispatch must not quantize them: the op does, or `QuantizedGather`

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def output_shape(self, tokens: int, hidden: int, local_experts: int) -> tuple[int, ...]:
        return tokens, hidden

    def apply(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        a1q_scale: torch.Tensor | None = None,
        **_: Any,
    ) -> None:
        """Write all of `output`, bfloat16 `[M, K]`. `topk_ids` are global; -1 means no expert.

        Args:
            a1q_scale: float32 `[M, K/128]` if `hidden_states` are in e4m3, else None.
        """
        if apply_router_weight_on_input:  # vLLM's dispatch has already multiplied the tokens by them
            topk_weights = torch.ones_like(topk_weights)
        self.experts(w1, w2).run(hidden_states, topk_weights, topk_ids, expert_map, output, a1q_scale)


class BatchedExperts(Fp8MoeExperts):
    """FP8 rows grouped by expert (DeepEP low latency, NIXL). vLLM's combine computes their weighted sums."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def output_shape(self, tokens: int, hidden: int, local_experts: int) -> tuple[int, ...]:
        return local_experts, self.max_num_tokens * self.num_dispatchers, hidden

    def apply(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        global_num_experts: int,
        a1q_scale: torch.Tensor,
        expert_tokens_meta: Any,
        **_: Any,
    ) -> None:
        """Write the valid rows of each expert, given e4m3 `hidden_states` `[E, max_m, K]` and float32 `a1q_scale`."""
        # Of this step, as max_m is that of any step. Assumes uniform routing; changes the speed, never the result.
        pairs = all_tokens(len(topk_ids), self.num_dispatchers) * topk_ids.shape[1]
        expected_m = ceil_div(pairs, global_num_experts)
        counts = expert_tokens_meta.expert_num_tokens
        self.experts(w1, w2).run_batched(hidden_states, a1q_scale, counts, expected_m, output)


CLASSES: dict[Arrival, type[Fp8MoeExperts]] = {Arrival.STANDARD: StandardExperts, Arrival.BATCHED: BatchedExperts}


def experts_class(arrival: Arrival, spec: LayerSpec) -> type[Fp8MoeExperts]:
    """Returns the class of the experts of layers with this spec."""
    base = CLASSES[arrival]
    return type(base.__name__, (base,), {"spec": spec})


def layer_spec(moe: Any, quant: QuantSpec) -> LayerSpec:
    """Returns the spec of a layer that vLLM's configuration describes, without a shared expert."""
    intermediate = local_intermediate(moe.intermediate_size, moe.tp_size)
    hidden = padded_hidden(moe.hidden_dim) if quant.gpt_oss else moe.hidden_dim
    return LayerSpec(
        MoeShape(moe.experts_per_token, hidden, intermediate, moe.num_local_experts, moe.num_experts),
        weights=quant.weights,
        ue8m0=quant.ue8m0,
        activation=gpt_oss.ACTIVATION if quant.gpt_oss else layer_activation(moe),
        bias=moe.has_bias,
        batch_invariant=batch_invariant(),
    )


def layer_activation(moe: Any) -> Activation:
    """Returns the activation that vLLM's configuration of a layer describes. Kinds have vLLM's names."""
    kind = moe.activation.value
    if kind == SWIGLUSTEP:
        return Activation(kind, SWIGLUSTEP_LIMIT)
    given = {"limit": moe.swiglu_limit, "alpha": moe.swiglu_alpha, "beta": moe.swiglu_beta}
    return Activation(kind, **{name: value for name, value in given.items() if value is not None})
