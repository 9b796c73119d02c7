"""The two launches of a mixture-of-experts layer of few tokens. Their kernels find the tokens of each expert."""

from typing import Any

from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.jit.launch import Launch
from fp8moe_plugin.launches.operands import Ids, LayerAddresses, placed
from fp8moe_plugin.launches.sm90.tensor_maps import interleaved_map, matrix_map, weights_map
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep
from fp8moe_plugin.plan.tuning import STREAMED_L2_FETCH


def small_batch_launches(step: SmallBatchStep, tensors: LayerAddresses, ids_64: bool) -> tuple[Launch, Launch]:
    """Returns the launches of a layer of at most `step.padded_tokens` tokens; its scratch is a `SmallBatchScratch`."""
    spec = step.spec
    topk, hidden, intermediate, experts, _ = spec.shape
    at = placed(step.scratch, tensors.scratch)
    (w13, w2), slots = tensors.weights(spec), min(step.tokens * topk, experts) * step.padded_tokens
    common: dict[str, Any] = {
        **Ids(tensors.topk_ids, ids_64, tensors.expert_map, step.tokens, spec).arguments(),
        "tokens_written": at.tokens_written,
        "tokens": step.tokens,
        "hidden": hidden,
        "intermediate": intermediate,
        "topk_weights": tensors.topk_weights,
        "weight_columns": spec.weight_columns,
        "routed_scale": spec.routed_scale,
    }
    first = Launch(
        step.gate_up,
        step.clusters * step.cluster,
        step.gate_up.arguments(
            w_map=interleaved_map(w13),
            x=tensors.hidden_states,
            w_scales=w13.scales,
            q=at.inner,
            scales=at.inner_scales,
            activation=spec.activation.numbers,
            bias=w13.bias,
            stages_before_down=step.stages_before_down,
            **common,
        ),
    )
    second = Launch(
        step.down,
        hidden // GROUP * step.down_splits,
        step.down.arguments(
            w_map=weights_map(w2, GROUP, STREAMED_L2_FETCH),
            q_map=matrix_map(at.inner, slots, intermediate, step.padded_tokens),
            w_scales=w2.scales,
            scales=at.inner_scales,
            out=tensors.out,
            splits=step.down_splits,
            bias=w2.bias,
            **common,
        ),
        pdl=True,
        cluster=step.down_splits,
    )
    return first, second
