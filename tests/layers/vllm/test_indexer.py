"""The indexer of a model under vLLM: its wrappers of DeepGEMM call our ops, in the form of each version."""

import inspect
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.platforms import current_platform
from vllm.utils import deep_gemm
from vllm.v1.attention.backends.mla import indexer as metadata_builder

from fp8moe_plugin import ops
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.layers import kernels
from fp8moe_plugin.layers.vllm import config as seam
from fp8moe_plugin.layers.vllm.indexer import serve_indexer
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.plan.sm90.kernel_sets import indexer_kernels
from tests import helpers as h
from tests.indexer import PAGE, decode, prefill

pytestmark = pytest.mark.seam

CPU = torch.device("cpu")
V32 = SimpleNamespace(index_n_heads=64, index_head_dim=128)
FUNCTIONS = ("_fp8_fp4_mqa_logits_impl", "_fp8_fp4_paged_mqa_logits_impl", "_get_paged_mqa_logits_metadata_impl")


@pytest.fixture(autouse=True)
def vllm_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What serving an indexer changes in vLLM is undone."""
    for name in [name for name in vars(deep_gemm) if name.endswith("_impl")]:
        monkeypatch.setattr(deep_gemm, name, None)
    for module in (sparse_attn_indexer, metadata_builder):
        monkeypatch.setattr(module, "has_deep_gemm", lambda: False)


@pytest.fixture
def served() -> None:
    serve_indexer(V32, CPU, "fp8moe-warmup")


def takes(function: Callable[..., Any], argument: str) -> bool:
    return argument in inspect.signature(function).parameters


def test_logits_of_a_chunk_are_ours(served: None) -> None:
    call = prefill(h.seeded(0, CPU), 7, 90, ranges="causal")
    arguments = (call.q, None), call.kv, call.weights, call.starts, call.ends
    whole = takes(deep_gemm.fp8_fp4_mqa_logits, "clean_logits")  # else the result is compressed
    logits = deep_gemm.fp8_fp4_mqa_logits(*arguments, **({"clean_logits": False} if whole else {"max_seqlen_k": 90}))
    expected = ops.fp8_mqa_logits(call.q, *arguments[1:])
    assert logits.shape == (7, 90)
    for row, own, start, end in zip(logits, expected, call.starts.tolist(), call.ends.tolist(), strict=True):
        first = start if whole else 0
        assert torch.equal(row[first : first + end - start], own[start:end])


@pytest.mark.parametrize("next_n", [1, 2])
def test_logits_of_pages_are_ours(served: None, next_n: int) -> None:
    call = decode(h.seeded(0, CPU), [300, 0, 64], next_n)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(call.context_lens, PAGE, 132)
    assert torch.equal(schedule, ops.get_paged_mqa_logits_metadata(call.context_lens, PAGE, 132))
    operands = call.kv_cache, call.weights, call.context_lens, call.block_table, schedule
    options = {"clean_logits": False} if takes(deep_gemm.fp8_fp4_paged_mqa_logits, "clean_logits") else {}
    logits = deep_gemm.fp8_fp4_paged_mqa_logits((call.q, None), *operands, max_model_len=512, **options)
    expected = ops.fp8_paged_mqa_logits(call.q, *operands, 512)
    assert logits.shape == (3 * next_n, 512)
    for i, length in enumerate(call.lengths):
        rows = slice(i * next_n, (i + 1) * next_n)
        assert torch.equal(logits[rows, :length], expected[rows, :length])


def test_one_line_says_so(plugin_log: pytest.LogCaptureFixture) -> None:
    with plugin_log.at_level(logging.INFO, "fp8moe"):
        for _ in range(2):
            serve_indexer(V32, CPU, "fp8moe-warmup")
    assert [record.message for record in plugin_log.records if "logits" in record.message] == [
        "fp8moe: the indexer's logits: backend reference, 64 heads of 128 channels"
    ]


class Cuda:
    """The platform, except that it has GPUs."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)

    @staticmethod
    def is_cuda() -> bool:
        return True


def test_an_indexer_needs_no_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attn_indexer, "current_platform", Cuda())

    def make() -> torch.nn.Module:
        with set_current_vllm_config(VllmConfig()):
            return sparse_attn_indexer.SparseAttnIndexer(None, 128, "ue8m0", 2048, 128, 1000, 1000, None)

    with pytest.raises(RuntimeError, match="requires DeepGEMM"):
        make()
    serve_indexer(V32, CPU, "fp8moe-warmup")
    assert make().head_dim == 128
    assert metadata_builder.has_deep_gemm(), "or the schedules of decode would not be computed"
    assert not deep_gemm._fp8_gemm_nt_impl, "other users of DeepGEMM see what is there"


def test_vllm_finds_the_rest_of_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its look-up stops at once where a function has been set before."""
    library = SimpleNamespace(fp8_gemm_nt=object(), fp8_fp4_mqa_logits=object())
    monkeypatch.setattr(deep_gemm, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(deep_gemm, "_import_deep_gemm", lambda: library)
    monkeypatch.setattr(deep_gemm.DeepGemmQuantScaleFMT, "init_oracle_cache", lambda: None)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "unused")
    serve_indexer(V32, CPU, "fp8moe-warmup")
    deep_gemm._lazy_init()
    assert deep_gemm._fp8_gemm_nt_impl is library.fp8_gemm_nt
    assert deep_gemm._fp8_fp4_mqa_logits_impl.theirs is library.fp8_fp4_mqa_logits


def test_calls_of_another_models_indexer_go_to_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in FUNCTIONS:
        monkeypatch.setattr(deep_gemm, name, lambda *args, name=name, **kwargs: calls.append(name))
    for _ in range(2):  # a second model does not hide DeepGEMM's functions behind ours
        serve_indexer(V32, CPU, "fp8moe-warmup")
    query, few_heads = torch.empty(3, 64, 128), torch.empty(3, 16, 128)
    pages, wrong_pages = torch.empty(4, PAGE, 1, 132), torch.empty(4, 32, 1, 132)
    contiguous, paged, metadata = (getattr(deep_gemm, name) for name in FUNCTIONS)
    contiguous((few_heads, None), None, None, None, None)
    contiguous((query, torch.empty(0)), None, None, None, None)  # MXFP4
    paged((few_heads[:, None], None), pages, None)
    paged((query[:, None], None), wrong_pages, None)
    metadata(torch.zeros(3, 1, dtype=torch.int32), 32, 132)
    assert calls == [FUNCTIONS[0], FUNCTIONS[0], FUNCTIONS[1], FUNCTIONS[1], FUNCTIONS[2]]
    call = prefill(h.seeded(0, CPU), 7, 90, ranges="causal")
    arguments = (call.q, None), call.kv, call.weights, call.starts, call.ends
    assert torch.equal(contiguous(*arguments), ops.fp8_mqa_logits(*arguments))
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("model", "setting", "line"),
    [
        (V32, "0", "the indexer's logits: DeepGEMM (FP8MOE_INDEXER=0)"),
        (
            SimpleNamespace(index_n_heads=16, index_head_dim=128),
            "1",
            "the indexer's logits: DeepGEMM (it has 16 heads of 128 channels, the kernels need 32 or 64 of 32, "
            "64 or 128)",
        ),
        (SimpleNamespace(index_n_heads=None), "1", None),
        (SimpleNamespace(), "1", None),
    ],
    ids=["off", "other heads", "no heads", "no indexer"],
)
def test_other_indexers_are_left_to_deepgemm(
    monkeypatch: pytest.MonkeyPatch,
    plugin_log: pytest.LogCaptureFixture,
    model: SimpleNamespace,
    setting: str,
    line: str | None,
) -> None:
    with h.environment("FP8MOE_INDEXER", setting), plugin_log.at_level(logging.INFO, "fp8moe"):
        serve_indexer(model, CPU, "fp8moe-warmup")
    assert [getattr(deep_gemm, name) for name in FUNCTIONS] == [None] * 3
    assert not sparse_attn_indexer.has_deep_gemm()
    assert [record.message for record in plugin_log.records] == ([f"fp8moe: {line}"] if line else [])


def test_its_kernels_are_loaded_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(kernels, "backend_of", lambda tensor: BACKENDS[SM90])
    monkeypatch.setattr(kernels.driver, "load", lambda key, device, warmup: loaded.append((key, warmup)))
    serve_indexer(V32, CPU, "the command")
    assert loaded == [(key, "the command") for key in indexer_kernels(64)]


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of each call of `serve_indexer`, by a config on a machine that vLLM takes for one with a GPU."""
    calls: list[Any] = []
    model = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=V32))
    monkeypatch.setattr(seam, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setattr(seam, "get_current_vllm_config", lambda: model)
    monkeypatch.setattr(seam, "warmup_command", lambda: "the command")
    monkeypatch.setattr(seam, "serve_indexer", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return calls


def test_the_first_layer_of_a_model_finds_its_indexer_served(on_hopper: list[Any]) -> None:
    config = seam.Fp8MoeConfig(QuantSpec(FP8_BLOCK, unquantized=("model.layers.0.x",)))
    for _ in range(2):
        config.get_quant_method(object.__new__(ReplicatedLinear), "model.layers.0.x")
    assert on_hopper == [(V32, torch.device("cuda", 3), "the command")]


def test_on_a_cpu_vllm_keeps_its_own_kernels(on_hopper: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    config = seam.Fp8MoeConfig(QuantSpec(FP8_BLOCK, unquantized=("model.layers.0.x",)))
    config.get_quant_method(object.__new__(ReplicatedLinear), "model.layers.0.x")
    assert on_hopper == []
