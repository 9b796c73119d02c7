"""A mixture-of-experts layer of a step of few tokens: two launches, which find out by themselves who goes where."""

from fp8moe_plugin.checkpoint.shapes import GROUP
from fp8moe_plugin.jit.launcher import Launch, multiprocessors, tensor_map
from fp8moe_plugin.ops.gemm_launch import LayerAddresses, matrix_map
from fp8moe_plugin.plan import (
    STREAMED_L2_FETCH,
    down_small_batch_key,
    down_splits,
    gate_up_cluster,
    gate_up_clusters,
    gate_up_small_batch_key,
    small_batch_scratch,
)


def small_batch_launches(
    tensors: LayerAddresses,
    sizes: tuple[int, int, int, int, int, int],
    width: int,
    ids_64: bool,
    ue8m0: bool,
    device_index: int,
) -> tuple[Launch, Launch]:
    """The kernels of a layer of at most `width` tokens, whose scratch is a `SmallBatchScratch`.

    Args:
        sizes: those of `moe_scratch`.
    """
    tokens, topk, hidden, intermediate, experts, global_experts = sizes
    pairs, offsets = tokens * topk, small_batch_scratch(tokens * topk, width, intermediate, experts)
    inner, inner_scales, told, _ = (tensors.scratch + offset for offset in offsets)
    ids = (tensors.topk_ids, tensors.expert_map)
    counts = (int(ids_64), global_experts, experts, tokens, topk, hidden, intermediate)
    found, groups = min(pairs, experts), intermediate // GROUP

    cluster = gate_up_cluster(width, hidden)
    clusters = gate_up_clusters(found * groups, multiprocessors(device_index), cluster)
    w13 = interleaved_map(tensors.w13, experts * 2 * intermediate, hidden)
    operands = (w13, tensors.hidden_states, tensors.w13_scale, *ids, tensors.topk_weights)
    first_key = gate_up_small_batch_key(ue8m0, width, cluster)
    first = Launch(first_key, clusters * cluster, (*operands, inner, inner_scales, told, *counts), device_index)

    splits = down_splits(hidden, width)
    blocks = hidden // GROUP * splits
    w2 = matrix_map(tensors.w2, experts * hidden, intermediate, GROUP, l2_fetch=STREAMED_L2_FETCH)
    q = matrix_map(inner, found * width, intermediate, width)
    args = (w2, q, tensors.w2_scale, inner_scales, told, *ids, tensors.out, *counts, splits)
    second_key = down_small_batch_key(width, cluster)
    return first, Launch(second_key, blocks, args, device_index, early=True, cluster=splits)


def interleaved_map(weights: int, rows: int, k: int) -> bytes:
    """Of e4m3 `[rows, k]`, in boxes of 64 rows in the order in which wgmma's sums lie in threads.

    Of 64 rows a thread has two 8 apart. With those of another box they are four that follow one another in memory. Box
    i begins at row 2i of the third dimension.
    """
    return tensor_map(weights, (k, 8, 4, rows // 32), (4 * k, k, 32 * k), (128, 8, 2, 4), 1, STREAMED_L2_FETCH)
