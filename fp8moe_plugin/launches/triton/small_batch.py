"""The launches of the Triton kernels for steps of few tokens."""

from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.launches.operands import Ids, LayerAddresses
from fp8moe_plugin.launches.triton.kernels import pairs_arguments, triton_launch
from fp8moe_plugin.plan.triton.catalog import TritonKey


def triton_gate_up_small_batch_launch(key: TritonKey, tensors: LayerAddresses, ids: Ids, inner: Address) -> Launch:
    """Returns the launch of GEMM 1 with SwiGLU for each pair of a step, to bfloat16 `[tokens * topk, I]` at `inner`."""
    shape, (w13, _) = ids.spec.shape, tensors.weights(ids.spec)
    return triton_launch(
        key,
        ids.pairs * (shape.intermediate // dict(key.defines)["BLOCK_N"]),
        x=tensors.hidden_states,
        b=w13.values,
        b_scales=w13.scales,
        bias=w13.bias,
        inner=inner,
        channels=shape.intermediate,
        k=shape.hidden,
        **pairs_arguments(ids),
        **ids.spec.activation.numbers._asdict(),
    )


def triton_down_small_batch_launch(key: TritonKey, tensors: LayerAddresses, ids: Ids, inner: Address) -> Launch:
    """Returns the launch of GEMM 2 for each pair of a step, and the weighted sum of each token's pairs."""
    shape, (_, w2) = ids.spec.shape, tensors.weights(ids.spec)
    return triton_launch(
        key,
        ids.tokens * (shape.hidden // dict(key.defines)["BLOCK_N"]),
        inner=inner,
        weights=tensors.topk_weights,
        b=w2.values,
        b_scales=w2.scales,
        bias=w2.bias,
        out=tensors.out,
        hidden=shape.hidden,
        k=shape.intermediate,
        weight_columns=ids.spec.weight_columns,
        routed_scale=ids.spec.routed_scale,
        **pairs_arguments(ids),
    )
