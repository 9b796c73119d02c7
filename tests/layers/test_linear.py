import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.errors import CheckpointError, InvalidInputError
from fp8moe_plugin.layers.linear import FP8Linear
from fp8moe_plugin.ops import torch_ops
from tests import helpers as h

# Not test_schema: it multiplies its inputs, which torch cannot do in e4m3.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def assert_close(out: torch.Tensor, exact: torch.Tensor) -> None:
    assert out.dtype == torch.bfloat16
    assert h.cosine(out, exact) >= 0.999
    assert h.relative_l2(out, exact) <= 0.05


@given(n=st.sampled_from((64, 136, 576)), bias=st.booleans(), ue8m0=st.booleans(), seed=h.seeds)
def test_a_checkpoint_layer_is_close_to_unquantized_math(device, n, bias, ue8m0, seed):
    gen = h.seeded(seed, device)
    weight, added = h.random_weights(gen, n, 640), h.random_tokens(gen, n)
    layer = FP8Linear.from_fp8(*weight, added if bias else None, ue8m0)
    x = h.random_tokens(gen, 2, 80, 640)
    assert_close(layer(x), x.double() @ h.dequantize_weights(*weight).T + (added.double() if bias else 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_quantized_here_is_close_to_unquantized_math(device, dtype):
    gen = h.seeded(0, device)
    weight = torch.randn(576, 640, generator=gen, device=device).mul(640**-0.5).to(dtype)
    x = h.random_tokens(gen, 200, 640)
    assert_close(FP8Linear.from_bf16(weight)(x), x.double() @ weight.double().T)


def test_nothing_is_trained_and_everything_is_saved(device):
    layer = FP8Linear.from_fp8(*h.random_weights(h.seeded(0, device), 64, 256))
    assert sorted(layer.state_dict()) == ["weight", "weight_scale"]
    assert not any(p.requires_grad for p in layer.parameters())


WRONG = {
    "no scales, which an FP8 weight needs": lambda w, s: (w, None),
    "has dtype torch.bfloat16.*from_bf16": lambda w, s: (w.bfloat16(), s),
    r"scales have shape \[2, 2\].*makes \[2, 3\]": lambda w, s: (w, s[:, :2]),
    "scales have dtype torch.bfloat16, but must be float32": lambda w, s: (w, s.bfloat16()),
    "scales hold NaN or infinity": lambda w, s: (w, s * float("inf")),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_checkpoint_that_does_not_fit_is_refused(device, message):
    weight = h.random_weights(h.seeded(0, device), 136, 384)
    with pytest.raises(CheckpointError, match=message):
        FP8Linear.from_fp8(*WRONG[message](*weight))


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.zeros(128), None, "must have 2 dimensions"),
        (torch.zeros(128, 100), None, "K > 0 a multiple of 128"),
        (torch.zeros(4, 128), None, "N > 0 to be a multiple of 8"),
        (torch.full((8, 128), torch.inf), None, "NaN or infinity"),
        (torch.zeros(8, 128), torch.zeros(9, dtype=torch.bfloat16), r"requires torch.bfloat16 \[8\]"),
        (torch.zeros(8, 128), torch.zeros(8), "bias is torch.float32"),
        (torch.zeros(8, 128).to(torch.float8_e4m3fn), None, "float8_e4m3fn, .*from_fp8"),
        (torch.zeros(8, 128, dtype=torch.uint8), None, "uint8, .*from_fp8"),
        (torch.zeros(8, 128, dtype=torch.complex64), None, "complex64, .*from_fp8"),
    ],
)
def test_unquantized_weights_that_cannot_be_served_are_refused(weight, bias, message):
    with pytest.raises(CheckpointError, match=message):
        FP8Linear.from_bf16(weight, bias)


def test_inputs_that_do_not_fit_are_refused(device):
    gen = h.seeded(0, device)
    layer = FP8Linear.from_fp8(*h.random_weights(gen, 64, 256))
    for x in (h.random_tokens(gen, 3, 128), h.random_tokens(gen, 3, 256).float()):
        with pytest.raises(InvalidInputError):
            layer(x)


@pytest.mark.parametrize("rows", [0, 1, 65])
def test_torch_can_trace_the_op(device, rows):
    gen = h.seeded(0, device)
    x, weight, bias = h.random_tokens(gen, rows, 256), h.random_weights(gen, 64, 256), h.random_tokens(gen, 64)
    for added in (None, bias):
        torch.library.opcheck(torch_ops.linear, (x, *weight, added, False), test_utils=OPCHECKS)


def test_it_compiles_without_a_graph_break(device):
    gen = h.seeded(0, device)
    layer = FP8Linear.from_fp8(*h.random_weights(gen, 64, 256), h.random_tokens(gen, 64))
    compiled = torch.compile(lambda x: layer(x * 2) + 1, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 65):
        x = h.random_tokens(gen, rows, 256)
        assert h.same_bits(compiled(x), layer(x * 2) + 1)


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_a_parameter_without_memory_is_refused(name: str) -> None:
    """torch passes such calls to the op's fake, which only determines the shape of the result."""
    layer, x = FP8Linear.from_bf16(torch.randn(256, 256)), torch.randn(4, 256).bfloat16()
    setattr(layer, name, torch.nn.Parameter(getattr(layer, name).data.to("meta"), requires_grad=False))
    with pytest.raises(InvalidInputError, match="The tensors are on cpu, meta"):
        layer(x)
    assert layer.to("meta")(x.to("meta")).is_meta


@pytest.mark.parametrize("rows", [1, 3])
def test_a_slice_at_any_channel_is_taken(device, rows):
    """A slice of one row is contiguous wherever it begins, so a decode step must not fail where a prefill does not."""
    gen = h.seeded(0, device)
    layer, x = FP8Linear.from_fp8(*h.random_weights(gen, 64, 256)), h.random_tokens(gen, rows, 384)
    assert h.same_bits(layer(x[:, 1:257]), layer(x[:, 1:257].clone()))
