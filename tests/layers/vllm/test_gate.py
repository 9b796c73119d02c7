"""Which gates our kernel computes, and in which steps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.router import gate
from fp8moe_plugin.layers.vllm.router.gate import GateMethod, replace_gate
from fp8moe_plugin.ops import router_gemm
from tests import helpers as h

pytestmark = pytest.mark.seam

EXPERTS, HIDDEN, MULTIPROCESSORS = 128, 256, 132
MOST_TOKENS = 128  # 8 blocks of tokens by 16 blocks of experts


@pytest.fixture(autouse=True)
def one_rank(on_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own method reads what its loader makes of a weight on a CPU."""
    on_rank(1, 0)
    product = lambda self, layer, x, bias=None: torch.nn.functional.linear(x, layer.weight, bias)  # noqa: E731
    monkeypatch.setattr(UnquantizedLinearMethod, "apply", product)


def linear(experts: int = EXPERTS, hidden: int = HIDDEN, **options: Any) -> ReplicatedLinear:
    with set_current_vllm_config(VllmConfig()):
        layer = ReplicatedLinear(hidden, experts, **{"bias": False, "params_dtype": torch.bfloat16} | options)
    layer.weight.data.copy_(torch.randn(experts, hidden, generator=h.seeded(0, torch.device("cpu"))))
    return layer


def taken_over(monkeypatch: pytest.MonkeyPatch, layer: Any, multiprocessors: int = MULTIPROCESSORS) -> Any:
    monkeypatch.setattr(compat, "runner_of", lambda experts: SimpleNamespace(gate=layer))
    replace_gate(SimpleNamespace(), multiprocessors)
    return layer


@pytest.mark.parametrize(("experts", "most_tokens"), [(128, 128), (256, 64), (60, 256), (8, 256)])
def test_steps_whose_blocks_run_at_once(monkeypatch, plugin_log, experts, most_tokens):
    plugin_log.set_level("INFO")
    method = taken_over(monkeypatch, linear(experts)).quant_method
    assert (type(method), method.most_tokens, type(method.fallback)) == (
        GateMethod,
        most_tokens,
        UnquantizedLinearMethod,
    )
    assert f"in steps of up to {most_tokens} tokens, routers' logits are computed by our kernel" in plugin_log.text


@pytest.mark.parametrize("tokens", [0, 1, MOST_TOKENS, MOST_TOKENS + 1])
def test_logits_are_those_of_our_kernel_in_short_steps(monkeypatch, tokens):
    calls = []
    monkeypatch.setattr(gate.torch_ops, "router_gemm", lambda *args: calls.append(args) or router_gemm(*args))
    layer, x = taken_over(monkeypatch, linear()), h.random_tokens(h.seeded(1, torch.device("cpu")), tokens, HIDDEN)
    logits, _ = layer(x)
    torch.testing.assert_close(logits, x @ layer.weight.T, rtol=2**-7, atol=1e-2)
    assert len(calls) == (tokens <= MOST_TOKENS)


def test_tokens_that_the_kernel_does_not_read_are_left_to_vllm(monkeypatch):
    monkeypatch.setattr(gate.torch_ops, "router_gemm", lambda *args: pytest.fail("it was called"))
    layer, x = taken_over(monkeypatch, linear()), torch.randn(4, 2 * HIDDEN + 8).bfloat16()
    for strided in (x[:, :HIDDEN], x.view(-1)[4 : 4 + HIDDEN].view(1, HIDDEN), x[:, None, :HIDDEN].contiguous()):
        layer(strided)


def with_attribute(name: str, value: object) -> ReplicatedLinear:
    layer = linear()
    setattr(layer, name, value)
    return layer


def strided(layer: ReplicatedLinear) -> ReplicatedLinear:
    layer.weight.data = torch.empty(HIDDEN, EXPERTS, dtype=torch.bfloat16).T
    return layer


def other_method(layer: ReplicatedLinear) -> ReplicatedLinear:
    """One whose method is another's, e.g. a quantized gate's."""
    layer.quant_method = type("Other", (UnquantizedLinearMethod,), {})()
    return layer


OTHERS = {
    "none": lambda: None,
    "a bias": lambda: linear(bias=True),
    "float32": lambda: linear(params_dtype=torch.float32),
    "another method": lambda: other_method(linear()),
    "another K": lambda: linear(hidden=HIDDEN + 8),
    "more experts than SMs have blocks": lambda: linear(8 * MULTIPROCESSORS + 1),
    "a strided weight": lambda: strided(linear()),
    "float32 logits": lambda: with_attribute("out_dtype", torch.float32),
    "a kernel of vLLM's": lambda: with_attribute("allow_dsv3_router_gemm", True),
    "no layer of vLLM's": lambda: SimpleNamespace(quant_method=UnquantizedLinearMethod()),
}


def test_a_gate_that_vllm_joins_with_another_stays_as_it_is(monkeypatch):
    layer = linear()
    monkeypatch.setattr(compat, "runner_of", lambda experts: SimpleNamespace(gate=layer, _fse_fuse_gate=True))
    replace_gate(SimpleNamespace(), MULTIPROCESSORS)
    assert type(layer.quant_method) is UnquantizedLinearMethod


def test_weights_that_are_loaded_again_are_processed_by_vllm(monkeypatch):
    layer, processed = taken_over(monkeypatch, linear()), []
    monkeypatch.setattr(
        UnquantizedLinearMethod, "process_weights_after_loading", lambda _, layer: processed.append(layer)
    )
    layer.quant_method.process_weights_after_loading(layer)
    assert processed == [layer]


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_gates_stay_as_they_are(monkeypatch, make):
    layer = make()
    before = layer and layer.quant_method
    assert taken_over(monkeypatch, layer) is None or layer.quant_method is before
