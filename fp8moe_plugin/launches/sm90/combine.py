"""The launch that sums the expert rows of each token, weighted by the router."""

from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.jit.launch import Address, Launch
from fp8moe_plugin.plan.sm90.catalog import combine_key

CHANNELS_PER_THREAD = 8  # 16 bytes of bfloat16


def combine_launch(
    rows: Address,
    slots: Address,
    topk_weights: Address,
    out: Address,
    *,
    tokens: int,
    topk: int,
    hidden: int,
    weight_columns: int | None = None,
    routed_scale: float = 1.0,
    pdl: bool = False,
) -> Launch:
    """Returns the launch that computes `out[t] = sum over j of topk_weights[t, j] * routed_scale * rows[slots[t, j]]`.

    The sum is float32, in the order of j.

    Args:
        rows: address of bfloat16 `[R, hidden]`.
        slots: address of int32 `[tokens, topk]`, -1 for an expert that is not on this rank.
        topk_weights: address of float32 `[tokens, weight_columns]`.
        out: address of bfloat16 `[tokens, hidden]`; a token without a slot gets zeros.
        weight_columns: topk, or one less for a last column with weight 1; None: topk.
        pdl: it may start before the preceding kernel ends. That kernel may write only one of its operands: `rows`.
    """
    vectors, key = hidden // CHANNELS_PER_THREAD, combine_key()
    return Launch(
        key,
        tokens * ceil_div(vectors, key.threads),
        key.arguments(
            rows=rows,
            slots=slots,
            weights=topk_weights,
            out=out,
            vectors=vectors,
            topk=topk,
            weight_columns=topk if weight_columns is None else weight_columns,
            routed_scale=routed_scale,
        ),
        pdl=pdl,
    )
