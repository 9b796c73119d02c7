"""Under VLLM_BATCH_INVARIANT=1 a row has the same bits alone and in any batch; and whether kinds of tiles differ."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.plan.sm90 import dense
from fp8moe_plugin.plan.sm90.catalog import DENSE_CLUSTER_TILE_N, DENSE_TILE_N, DENSE_TILE_ROWS
from fp8moe_plugin.plan.sm90.tiles import FEW_ROWS, MANY_ROWS
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.testing import invariance
from tests import helpers as h

pytestmark = pytest.mark.gpu

BATCHES, LONGEST, KEPT = 500, 4096, 16  # batches, tokens of one, rows that each of them holds if it has as many
# Experts, hidden, intermediate and topk: narrow experts with a long K as in DeepSeek-V3 on 8 ranks, experts that read
# copies of their tokens, Qwen3.
LAYERS = {"dsv3-tp8": (64, 7168, 256, 8), "copies": (16, 1024, 2048, 4), "qwen3": (128, 2048, 768, 8)}
# The last two have more tiles than there are multiprocessors.
DENSE = [(2112, 7168), (7168, 2048), (576, 16384), (24576, 1536), (17416, 4096)]
Inputs = tuple[torch.Tensor, ...]


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


@pytest.fixture
def invariant() -> Iterator[None]:
    with invariance(True):
        yield


def uneven_tokens(gen: torch.Generator, *shape: int) -> torch.Tensor:
    """Of magnitudes that differ within a step of 32 K, where what a tensor core drops would show."""
    exponents = torch.randint(-6, 7, shape, generator=gen, device="cuda")
    return (h.random_tokens(gen, *shape) * torch.exp2(exponents)).bfloat16()


def draw_batch(gen: torch.Generator, tokens: int, hidden: int, topk: int, experts: int, kind: str) -> Inputs:
    return uneven_tokens(gen, tokens, hidden), *h.random_routing(gen, kind, tokens, topk, experts)


def rows_that_differ(
    layer: Callable[..., torch.Tensor], kept: Inputs, draw: Callable[[int, int], Inputs], batches: int
) -> int:
    """Returns how many of `kept`'s rows come out otherwise than alone, over so many batches that hold them somewhere.

    Args:
        layer: rows in, rows out.
        kept: inputs, `KEPT` rows each.
        draw: the other inputs of a batch, from its length and its number.
    """
    alone = torch.cat([layer(*(part[i : i + 1] for part in kept)) for i in range(KEPT)])
    order, differing = random.Random(0), torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(batches):
        tokens = round(2 ** order.uniform(0, LONGEST.bit_length() - 1))
        at = torch.tensor(order.sample(range(tokens), min(tokens, KEPT)), device="cuda")
        which = torch.tensor(order.sample(range(KEPT), len(at)), device="cuda")
        batch = draw(tokens, step)
        for part, own in zip(batch, kept, strict=True):
            part[at] = own[which]
        out = layer(*batch)
        differing += (h.bits(out[at]) != h.bits(alone[which])).any(1).sum()
    return int(differing)


def moe_rows_that_differ(gen: torch.Generator, name: str, batches: int) -> int:
    experts, hidden, intermediate, topk = LAYERS[name]
    weights = h.random_layer(gen, experts, hidden, intermediate)

    def draw(tokens: int, step: int) -> Inputs:
        return draw_batch(gen, tokens, hidden, topk, experts, h.ROUTINGS[step % len(h.ROUTINGS)])

    kept = draw_batch(gen, KEPT, hidden, topk, experts, "distinct")
    return rows_that_differ(lambda x, w, ids: ops.fused_moe(x, *weights, w, ids), kept, draw, batches)


@pytest.mark.parametrize("name", LAYERS)
def test_a_token_of_a_layer_has_the_same_bits_in_any_batch(gen, invariant, name):
    assert moe_rows_that_differ(gen, name, BATCHES) == 0


def test_by_default_it_has_not(gen):
    """Else the test above shows nothing."""
    with invariance(False):
        assert moe_rows_that_differ(gen, "dsv3-tp8", 50) > 0


@pytest.mark.parametrize(("n", "k"), DENSE)
def test_a_row_of_a_dense_layer_has_the_same_bits_in_any_batch(gen, invariant, n, k):
    weight = h.random_weights(gen, n, k)
    kept = (uneven_tokens(gen, KEPT, k),)
    differing = rows_that_differ(
        lambda x: ops.fp8_linear(x, *weight), kept, lambda tokens, _: (uneven_tokens(gen, tokens, k),), BATCHES
    )
    assert differing == 0


@pytest.mark.parametrize("name", LAYERS)
def test_a_row_of_a_slab_has_the_same_bits_in_any_batch(gen, invariant, name):
    """Wherever in the slab of its expert it is, and whatever number of rows the caller expects."""
    experts, hidden, intermediate, _ = LAYERS[name]
    weights, order = h.random_layer(gen, experts, hidden, intermediate), random.Random(0)
    (own, own_scales), expert, alone = h.random_quantized(gen, 1, hidden), experts // 2, None
    for step in range(100):
        max_m = 1 if step == 0 else order.randint(1, 300)
        row = order.randrange(max_m)
        q, scales = h.random_quantized(gen, experts, max_m, hidden)
        q[expert, row], scales[expert, row] = own[0], own_scales[0]
        counts = torch.randint(0, max_m + 1, (experts,), generator=gen, device="cuda", dtype=torch.int32)
        counts[expert] = order.randint(row + 1, max_m)
        out = ops.batched_experts(q, scales, *weights, counts, expected_m=order.choice((1, 64, 65, 1000)))
        result = h.bits(out[expert, row])
        alone = result if alone is None else alone
        assert torch.equal(result, alone), f"call {step}: row {row} of {int(counts[expert])}"


# ---- whether tiles that multiply weights by tokens and those that multiply tokens by weights round alike ----------


@pytest.mark.parametrize(("n", "k"), [(512, 7168), (7168, 256), (4096, 7168), (7168, 2048), (1536, 2048), (2048, 768)])
def test_both_kinds_of_tiles_give_the_same_bits(gen, n, k):
    """Of any width, with tails and without."""
    groups, max_m = 48, 300
    q, scales = ops.per_token_group_quant_fp8(uneven_tokens(gen, groups, max_m, k))
    b = h.random_weights(gen, groups, n, k)
    counts = torch.randint(0, max_m + 1, (groups,), generator=gen, device="cuda", dtype=torch.int32)
    counts[:16] = torch.tensor([1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 144, 145])
    here = torch.arange(max_m, device="cuda") < counts[:, None]
    results = []
    with invariance(False):
        for expected_m in (FEW_ROWS.rows, MANY_ROWS.rows):
            out = torch.zeros(groups, max_m, n, dtype=torch.bfloat16, device="cuda")
            results.append(ops.m_grouped_fp8_gemm_nt_masked((q, scales), b, out, counts, expected_m)[here])
    assert h.same_bits(*results)


@pytest.mark.parametrize("tokens", [1, 40, 700, 3000])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_both_kinds_of_tiles_give_the_same_bits(gen, name, tokens):
    """Where neither divides K."""
    experts, hidden, intermediate, topk = LAYERS[name]
    weights = h.random_layer(gen, experts, hidden, intermediate)
    call = draw_batch(gen, tokens, hidden, topk, experts, "distinct")
    results = []
    for tile in (FEW_ROWS, MANY_ROWS):
        with invariance(True), pytest.MonkeyPatch.context() as patch:
            h.force_step(patch, tile=tile)
            results.append(ops.fused_moe(call[0], *weights, *call[1:]))
    assert h.same_bits(*results)


@pytest.mark.parametrize(("n", "k"), DENSE)
def test_dense_kernels_give_the_same_bits(gen, monkeypatch, n, k):
    weight = h.random_weights(gen, n, k)
    tiles = list(itertools.product(DENSE_TILE_ROWS, DENSE_TILE_N))
    with invariance(True):
        for m in (1, 8, 17, 64, 65, 128, 140, 145, 300, 1000):
            x = uneven_tokens(gen, m, k)
            h.force_dense(monkeypatch, lambda m, n, sms: dense.grouped(m, n, Output.BF16, sms))
            results = [ops.fp8_linear(x, *weight)]
            for tile in tiles:
                h.force_dense_tile(monkeypatch, *tile)
                results.append(ops.fp8_linear(x, *weight))
            for tile_n in DENSE_CLUSTER_TILE_N:
                h.force_dense_clusters(monkeypatch, tile_n)
                results.append(ops.fp8_linear(x, *weight))
            assert all(h.same_bits(results[0], other) for other in results[1:]), f"{m} rows"
