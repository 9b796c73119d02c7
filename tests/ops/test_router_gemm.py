import pytest
import torch

from fp8moe_plugin.ops import router_gemm, workspace
from tests import helpers as h


def operands(device: torch.device, tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = h.seeded(tokens + experts + k, device)
    return h.random_tokens(gen, tokens, k), h.random_tokens(gen, experts, k)


def error(logits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Returns the largest distance from the exact product, in units of what rounding to bfloat16 may add to it."""
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    return ((logits.double() - exact).abs() / (exact.abs() / 256 + sizes * 1e-6)).max().item()


@pytest.mark.parametrize("k", [32, 224, 2048, 4096, 7168])
@pytest.mark.parametrize("experts", [1, 8, 60, 128, 256])
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 130])
def test_it_multiplies(device, tokens, experts, k):
    x, weight = operands(device, tokens, experts, k)
    logits = router_gemm(x, weight)
    assert (logits.dtype, *logits.shape) == (torch.bfloat16, tokens, experts)
    assert error(logits, x, weight) <= 1


@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_logits_do_not_depend_on_other_tokens(device, tokens):
    x, weight = operands(device, 64, 128, 2048)
    assert h.same_bits(router_gemm(x[:tokens], weight), router_gemm(x, weight)[:tokens])
    x[tokens:] = float("nan")
    assert router_gemm(x, weight)[:tokens].isfinite().all()


def test_no_tokens(device):
    x, weight = operands(device, 0, 8, 64)
    assert router_gemm(x, weight).shape == (0, 8)


@pytest.mark.gpu
def test_it_writes_its_result_and_nothing_else(monkeypatch):
    device = torch.device("cuda")
    x, weight = operands(device, 5, 13, 256)
    room = h.poisoned(8, 13, dtype=torch.bfloat16, device=device)
    monkeypatch.setattr(workspace, "empty", lambda *_: room[:5])
    assert error(router_gemm(x, weight), x, weight) <= 1
    assert h.untouched(room[5:])


@pytest.mark.gpu
def test_a_captured_call_reads_new_tokens():
    x, weight = operands(torch.device("cuda"), 16, 128, 2048)
    router_gemm(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = router_gemm(x, weight)
    for _ in range(5):
        x.copy_(x.roll(1, 0))
        graph.replay()
        assert h.same_bits(logits, router_gemm(x, weight))
