import pytest
import torch

from fp8moe_plugin.ops import choose_experts, fused_moe, routed_moe
from tests import helpers as h


def chosen(logits: torch.Tensor, topk: int, renormalize: bool) -> tuple[list[int], list[float]]:
    """Returns the experts of one token and their weights, in float64."""
    scores = logits.double().softmax(-1).tolist()
    ids = sorted(range(len(scores)), key=lambda e: -scores[e])[:topk]
    total = sum(scores[e] for e in ids) if renormalize else 1.0
    return ids, [scores[e] / total for e in ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("topk", "experts", "renormalize"), [(8, 128, True), (1, 9, False), (32, 512, True), (6, 160, False)]
)
def test_it_chooses_the_best_experts(device, topk, experts, renormalize, dtype):
    logits = torch.randn(40, experts, generator=h.seeded(0, device), device=device).mul(3)
    logits = logits.mul(1024).round().div(1024).to(dtype)  # equal, or so different that scores differ, too
    weights, ids = choose_experts(logits, topk, renormalize=renormalize)
    assert (weights.dtype, ids.dtype, *weights.shape) == (torch.float32, torch.int32, 40, topk)
    for row in range(40):
        expected_ids, expected = chosen(logits[row], topk, renormalize)
        assert ids[row].tolist() == expected_ids
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("hidden", [8, 128, 2048, 7168])
def test_the_weight_of_a_shared_expert_is_a_last_column(device, hidden):
    gen = h.seeded(hidden, device)
    logits, x = torch.randn(40, 9, generator=gen, device=device), h.random_tokens(gen, 40, hidden)
    gate = (h.random_tokens(gen, 1, hidden).float() * 2 * hidden**-0.5).bfloat16()
    weights, ids = choose_experts(logits, 4, hidden_states=x, shared_gate=gate)
    routed, routed_ids = choose_experts(logits, 4)
    assert h.same_bits(ids, routed_ids)
    assert h.same_bits(weights[:, :4].contiguous(), routed)
    expected = (x.double() @ gate.double().T).sigmoid().float()
    torch.testing.assert_close(weights[:, 4:], expected, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen(device):
    logits = torch.zeros(3, 64, device=device)
    logits[1, 40:50] = 1.0
    logits[2, ::2] = -0.0
    weights, ids = choose_experts(logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [40, 41, 42, 43], [0, 1, 2, 3]]
    assert weights.tolist() == [[0.25] * 4] * 3


# Logits whose softmax is equal, or which the exponential of another library may order otherwise.
NEAR_TIES = {
    "underflow": [0.0, -200.0, -150.0, -199.0, -160.0],
    "subnormal": [5.0, -97.0, -96.5, -98.0, -96.75],
    "rounding": [0.3125, 1e-10, 6e-8, -1.4, 3e-8],
    "infinite": [-float("inf"), 1.0, -float("inf"), -float("inf"), 0.5],
    "all -inf": [-float("inf")] * 5,
    "inf": [1.0, float("inf"), 2.0, float("inf"), 0.5],
    "nan": [1.0, -float("nan"), 2.0, float("nan"), 3.0],
    "zeros": [-0.0, 0.0, -1e-45, 1e-45, -0.0],
}


@pytest.mark.parametrize("row", NEAR_TIES.values(), ids=NEAR_TIES)
def test_experts_are_ranked_by_their_logits(device, row):
    _, ids = choose_experts(torch.tensor([row], device=device), 4)
    magnitude = [float("inf") if value != value else value for value in row]  # NaN is above all numbers
    assert ids[0].tolist() == sorted(range(5), key=lambda e: -magnitude[e])[:4]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 12, 16, 17, 90, 400])
def test_a_layer_that_chooses_its_experts(device, tokens, padded):
    gen = h.seeded(tokens, device)
    x, layer = h.random_tokens(gen, tokens, 2048), h.random_layer(gen, 6, 2048, 128)
    logits, out = torch.randn(tokens, 6, generator=gen, device=device), torch.empty_like(x)
    padding = torch.arange(tokens, device=device) % 5 == 4 if padded else None
    assert routed_moe(x, *layer, logits, 3, padding=padding, out=out) is out
    assert h.same_bits(out, fused_moe(x, *layer, *choose_experts(logits, 3, padding=padding)))
    assert not padded or not out[padding].any()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 12, 90, 400])
def test_a_layer_that_weighs_its_shared_expert(device, tokens, padded):
    gen = h.seeded(tokens, device)
    x, layer = h.random_tokens(gen, tokens, 2048), h.random_layer(gen, 6, 2048, 128)
    logits, gate = torch.randn(tokens, 5, generator=gen, device=device), h.random_tokens(gen, 1, 2048)
    router = {"padding": torch.arange(tokens, device=device) % 5 == 4 if padded else None, "shared_gate": gate}
    out = routed_moe(x, *layer, logits, 3, **router)
    chosen = choose_experts(logits, 3, hidden_states=x, **router)
    assert h.same_bits(out, fused_moe(x, *layer, *chosen, shared_expert=True))
    assert not padded or not out[router["padding"]].any()


def test_padding_may_begin_at_any_address(device):
    """vLLM's dual-batch overlap gives a part of a longer mask."""
    logits = torch.randn(6, 8, generator=h.seeded(0, device), device=device)
    padding = torch.arange(9, device=device) == 4
    _, ids = choose_experts(logits, 2, padding=padding[3:])
    assert (ids[:, 0] == -1).tolist() == [False, True, *[False] * 4]


@pytest.mark.gpu
def test_a_captured_layer_reads_new_logits():
    gen = h.seeded(0, torch.device("cuda"))
    x, layer = h.random_tokens(gen, 5, 1024), h.random_layer(gen, 6, 1024, 128)
    logits, out = torch.randn(5, 6, generator=gen, device="cuda"), torch.empty_like(x)
    routed_moe(x, *layer, logits, 3, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed_moe(x, *layer, logits, 3, out=out)
    for _ in range(20):
        logits.copy_(torch.randn(5, 6, generator=gen, device="cuda"))
        graph.replay()
        assert h.same_bits(out, fused_moe(x, *layer, *choose_experts(logits, 3)))
