"""A mixture-of-experts layer of a step of few tokens: two launches, which find out by themselves who goes where."""

from fp8moe_plugin.jit.launcher import Launch, multiprocessors, tensor_map
from fp8moe_plugin.ops.gemm_launch import LayerAddresses
from fp8moe_plugin.plan import (
    DOWN_CLUSTERS,
    GATE_UP_CLUSTER,
    down_small_batch_key,
    down_splits,
    gate_up_clusters,
    gate_up_small_batch_key,
    small_batch_scratch,
)
from fp8moe_plugin.shapes import GROUP, ceil_div


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
    inner, inner_scales, _ = (tensors.scratch + offset for offset in offsets)
    ids = (tensors.topk_ids, tensors.expert_map)
    counts = (int(ids_64), global_experts, experts, tokens, topk, hidden, intermediate)
    found, groups = min(pairs, experts), intermediate // GROUP

    clusters = gate_up_clusters(found * groups, multiprocessors(device_index))
    w13 = interleaved_map(tensors.w13, experts * 2 * intermediate, hidden, 4, 64)
    operands = (w13, tensors.hidden_states, tensors.w13_scale, *ids, tensors.topk_weights)
    first_key = gate_up_small_batch_key(ue8m0, width)
    first = Launch(first_key, clusters * GATE_UP_CLUSTER, (*operands, inner, inner_scales, *counts), device_index)

    splits, cluster = down_splits(hidden, width), DOWN_CLUSTERS[width]
    blocks = ceil_div(hidden // GROUP * splits, cluster) * cluster
    w2 = interleaved_map(tensors.w2, experts * hidden, intermediate, 2, GROUP)
    q = tensor_map(inner, (intermediate, found * width), (intermediate,), (128, width), 1)
    args = (w2, q, tensors.w2_scale, inner_scales, *ids, tensors.out, *counts, splits)
    return first, Launch(down_small_batch_key(width), blocks, args, device_index, early=True)


def interleaved_map(weights: int, rows: int, k: int, neighbors: int, box_rows: int) -> bytes:
    """Of e4m3 `[rows, k]`, in boxes of `box_rows` rows in the order in which wgmma's sums lie in threads.

    Of 64 rows a thread has two 8 apart, and there are `neighbors` / 2 boxes; with them a thread's rows are `neighbors`
    that follow one another in memory. Box i begins at row 2i of the third dimension.
    """
    sizes = (k, 8, neighbors, rows // (8 * neighbors))
    return tensor_map(weights, sizes, (neighbors * k, k, 8 * neighbors * k), (128, 8, 2, box_rows // 16), 1)
