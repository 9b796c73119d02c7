import pytest
import torch

from fp8moe_plugin.errors import CheckpointError, InvalidInputError
from fp8moe_plugin.layers.fused_moe import OPTIONS, FP8MoE
from fp8moe_plugin.ops import torch_ops
from fp8moe_plugin.plan.options import layer_options
from tests import helpers as h

EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 8, 3, 384, 256
# Not test_schema: it multiplies its inputs, which torch cannot do in e4m3.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def random_call(gen: torch.Generator, tokens: int, kind: str = "distinct"):
    """Hidden states, router weights and expert ids."""
    return h.random_tokens(gen, tokens, HIDDEN), *h.random_routing(gen, kind, tokens, TOPK, EXPERTS)


def assert_close(out: torch.Tensor, exact: torch.Tensor, min_cosine: float = 0.999, max_l2: float = 0.05) -> None:
    assert out.dtype == torch.bfloat16
    assert h.cosine(out, exact) >= min_cosine
    assert h.relative_l2(out, exact) <= max_l2


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("kind", ["distinct", "one_expert", "some_missing"])
def test_a_checkpoint_layer_is_close_to_unquantized_math(device, kind, ue8m0):
    gen = h.seeded(0, device)
    weights, (x, router, ids) = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE), random_call(gen, 400, kind)
    out = FP8MoE.from_fp8(*weights, ue8m0)(x, router, ids)
    # Rounding with scales that are powers of two gives 0.9989, with any scales 0.9991.
    assert_close(out, h.layer_reference(x, weights, router, ids, quantized=False), 0.9985 if ue8m0 else 0.999)


def test_a_layer_quantized_here_is_close_to_unquantized_math(device):
    gen = h.seeded(0, device)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=gen, device=device).mul(HIDDEN**-0.5).bfloat16()
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=gen, device=device).mul(INTERMEDIATE**-0.5).bfloat16()
    x, router, ids = random_call(gen, 400)
    exact = torch.zeros(400, HIDDEN, dtype=torch.float64, device=device)
    for e in range(EXPERTS):
        down = h.swiglu(x.double() @ w13[e].double().T) @ w2[e].double().T
        exact += (router.double() * (ids == e)).sum(1, keepdim=True) * down
    layer = FP8MoE.from_bf16(w13, w2)
    out, weights = layer(x, router, ids), h.Layer(layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    assert_close(out, h.layer_reference(x, weights, router, ids, quantized=False))
    # Rounding the weights adds an independent error of the same size in both GEMMs: 1.4 times in total.
    assert_close(out, exact, min_cosine=0.9975, max_l2=0.05 * 2**0.5)


def test_ranks_with_an_expert_map_add_up_to_the_layer(device):
    gen = h.seeded(0, device)
    weights, call = h.random_layer(gen, EXPERTS, HIDDEN, INTERMEDIATE), random_call(gen, 129)
    whole, parts = FP8MoE.from_fp8(*weights)(*call), []
    for half in range(2):
        mine = slice(half * EXPERTS // 2, (half + 1) * EXPERTS // 2)
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32, device=device)
        expert_map[mine] = torch.arange(EXPERTS // 2, dtype=torch.int32, device=device)
        parts.append(FP8MoE.from_fp8(*(w[mine] for w in weights))(*call, expert_map))
    assert h.relative_l2(parts[0].double() + parts[1].double(), whole) <= 1e-2


def test_every_parameter_is_contiguous_with_experts_first(device):
    layer = FP8MoE.from_fp8(*h.random_layer(h.seeded(0, device), EXPERTS, HIDDEN, INTERMEDIATE))
    assert sorted(layer.state_dict()) == ["w13", "w13_scale", "w2", "w2_scale"]
    assert all(p.is_contiguous() and p.shape[0] == EXPERTS and not p.requires_grad for p in layer.parameters())


WRONG = {
    "w13 has no scales": lambda w13, s13, w2, s2: (w13, None, w2, s2),
    "w2 has no scales": lambda w13, s13, w2, s2: (w13, s13, w2, None),
    "w2 has dtype torch.bfloat16.*from_bf16": lambda w13, s13, w2, s2: (w13, s13, w2.bfloat16(), s2),
    "w13's scales have shape .*Check that weight and scales": lambda w13, s13, w2, s2: (w13, s13[:-1], w2, s2),
    "w2's scales hold NaN": lambda w13, s13, w2, s2: (w13, s13, w2, s2 * float("nan")),
    "w2 .* requires .*gate rows, then up rows": lambda w13, s13, w2, s2: (w13[:, :256], s13[:, :2], w2, s2),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_checkpoint_that_does_not_fit_is_refused(device, message):
    weights = h.random_layer(h.seeded(0, device), EXPERTS, HIDDEN, INTERMEDIATE)
    with pytest.raises(CheckpointError, match=message):
        FP8MoE.from_fp8(*WRONG[message](*weights))


def test_unquantized_weights_that_do_not_fit_each_other_are_refused(device):
    w = torch.zeros(2, 128, 256, device=device)
    with pytest.raises(CheckpointError, match="gate rows, then up rows"):
        FP8MoE.from_bf16(w, w)


def test_codes_of_a_quantized_weight_are_not_quantized_again(device):
    """Without their scales they are other weights, and the layer would be wrong without a word."""
    w13, w2 = torch.zeros(2, 256, 128, device=device), torch.zeros(2, 128, 128, device=device)
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        for wrong in ((w13.to(dtype), w2), (w13, w2.to(dtype))):
            with pytest.raises(CheckpointError, match=rf"{dtype}, .*from_fp8"):
                FP8MoE.from_bf16(*wrong)


@pytest.mark.parametrize(
    ("w13", "w2", "message"),
    [
        (torch.zeros(256, 128), torch.zeros(128, 128), "must have 3 dimensions"),
        (torch.zeros(2, 128, 128), torch.zeros(2, 128, 64), "K > 0 a multiple of 128"),
        (torch.zeros(0, 256, 128), torch.zeros(0, 128, 128), "multiple of 128"),
    ],
)
def test_sizes_that_are_not_served_are_refused(w13, w2, message):
    with pytest.raises(CheckpointError, match=message):
        FP8MoE.from_bf16(w13, w2)


def test_inputs_that_do_not_fit_are_refused(device):
    gen = h.seeded(0, device)
    layer, (x, router, ids) = FP8MoE.from_fp8(*h.random_layer(gen, EXPERTS, HIDDEN, 128)), random_call(gen, 3)
    for wrong in ((x.float(), router, ids), (x[:, :128], router, ids), (x, router, ids[:2]), (x, router, ids.float())):
        with pytest.raises(InvalidInputError):
            layer(*wrong)
    with pytest.raises(InvalidInputError, match=r"hidden_scale is None, .*or tokens in bfloat16"):
        layer(x.to(torch.float8_e4m3fn), router, ids)


def test_torch_can_trace_the_ops(device):
    gen = h.seeded(0, device)
    weights, (x, router, ids) = h.random_layer(gen, EXPERTS, HIDDEN, 128), random_call(gen, 5)
    torch.library.opcheck(
        torch_ops.fused_moe,
        (OPTIONS[False], x, None, *weights, None, None, router, ids, None, torch.zeros_like(x)),
        test_utils=OPCHECKS,
    )
    q, scales = h.random_quantized(gen, 5, HIDDEN)
    torch.library.opcheck(
        torch_ops.fused_moe,
        (OPTIONS[False], q, scales.contiguous(), *weights, None, None, router, ids, None, torch.zeros_like(x)),
        test_utils=OPCHECKS,
    )
    logits = torch.randn(5, EXPERTS, device=device)
    for padding, gate in ((None, None), (torch.arange(5, device=device) > 3, h.random_tokens(gen, 1, HIDDEN))):
        options, routed = layer_options(shared_expert=gate is not None).text, logits if gate is None else logits[:, 1:]
        routing = routed.contiguous(), padding, gate
        torch.library.opcheck(
            torch_ops.routed_moe,
            (options, TOPK, True, x, *weights, None, None, *routing, torch.zeros_like(x)),
            test_utils=OPCHECKS,
        )
    rows = h.random_quantized(gen, EXPERTS, 16, HIDDEN)
    counts = torch.arange(EXPERTS, dtype=torch.int32, device=device)
    out = torch.zeros(EXPERTS, 16, HIDDEN, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(
        torch_ops.batched_experts,
        (OPTIONS[False], 4, *rows, *weights, *h.random_biases(gen, EXPERTS, HIDDEN, 128).values(), counts, out),
        test_utils=OPCHECKS,
    )


def test_it_compiles_without_a_graph_break(device):
    gen = h.seeded(0, device)
    layer = FP8MoE.from_fp8(*h.random_layer(gen, EXPERTS, HIDDEN, 128))
    compiled = torch.compile(lambda x, *r: layer(x * 2, *r) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 65):
        x, *routing = random_call(gen, tokens)
        assert h.same_bits(compiled(x, *routing), layer(x * 2, *routing) + 1)
