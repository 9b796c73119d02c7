"""DeepGEMM's settings of a process: the number of multiprocessors, and those without effect."""

from collections.abc import Iterator

import pytest
import torch

from fp8moe_plugin import deep_gemm, ops
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.ops import devices
from fp8moe_plugin.plan.sm90.dense import plan_dense
from fp8moe_plugin.plan.sm90.layer import SmallBatchStep
from fp8moe_plugin.plan.spec import MoeShape, Output
from tests import helpers as h

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    devices.set_num_sms(0)
    deep_gemm.set_mk_alignment_for_contiguous_layout(128)
    deep_gemm.set_tc_util(0)
    deep_gemm.set_pdl(False)


def test_settings_without_effect_are_remembered() -> None:
    assert (deep_gemm.get_tc_util(), deep_gemm.get_pdl()) == (100, False)
    deep_gemm.set_tc_util(70)
    deep_gemm.set_pdl(True)
    deep_gemm.set_ignore_compile_dims(True)
    deep_gemm.set_block_size_multiple_of((16, 16))
    assert (deep_gemm.get_tc_util(), deep_gemm.get_pdl()) == (70, True)


def test_the_alignment_is_that_of_the_kernels_until_it_is_set() -> None:
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 128
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == deep_gemm.get_k_alignment_for_contiguous_layout() == 64
    assert deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout(expected_m=20) == 128


# ---- multiprocessors -------------------------------------------------------------------------------------------------


class Recording(devices.Gpu):
    """A GPU of 132 multiprocessors that records its launches."""

    def __init__(self, recorder: h.Recorder) -> None:
        super().__init__(0, 132)
        object.__setattr__(self, "recorder", recorder)

    def prepare(self, launches):
        return vars(self)["recorder"].prepare(launches)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> h.Recorder:
    recorder = h.Recorder()
    gpu = Recording(recorder)
    monkeypatch.setattr(devices, "_gpu", lambda device: gpu)
    return recorder


def blocks(launch) -> int:
    return launch.grid if isinstance(launch.grid, int) else launch.grid[0] * launch.grid[1]


def calls(gen: torch.Generator) -> None:
    """Every op whose grids follow the number of multiprocessors, in decode and prefill."""
    layer, weight = h.random_layer(gen, 4, 512, 256), h.random_weights(gen, 1056, 512)
    for tokens in (4, 40, 600):
        x = h.random_tokens(gen, tokens, 512)
        ops.fused_moe(x, *layer, *h.random_routing(gen, "distinct", tokens, 2, 4))
        ops.fp8_linear(x, *weight)
        a = h.random_quantized(gen, tokens, 512)
        ops.fp8_gemm_nt(a, weight, torch.empty(tokens, 1056))
        ids = torch.zeros(tokens, dtype=torch.int32)
        grouped = weight[0][None], weight[1][None]
        ops.m_grouped_fp8_gemm_nt_contiguous(a, grouped, torch.empty(tokens, 1056, dtype=torch.bfloat16), ids)


MEMORY = {"quantize", "route", "count_experts", "combine", "tiles_of_indices"}


@pytest.mark.parametrize("num_sms", [16, 30, 100])
def test_no_grid_is_larger_and_no_kernel_starts_early(recorder: h.Recorder, num_sms: int) -> None:
    deep_gemm.set_num_sms(num_sms)
    calls(h.seeded(0, CPU))
    gemms = [launch for launch in recorder.launches if launch.key.source not in MEMORY]
    assert {launch.key.source for launch in gemms} >= {"gate_up", "grouped_gemm", "dense_gemm", "gate_up_small_batch"}
    assert max(map(blocks, gemms)) <= num_sms
    assert not any(launch.pdl for launch in recorder.launches)


def test_without_a_limit_all_are_taken_again(recorder: h.Recorder) -> None:
    for num_sms in (16, 0, 500):
        recorder.clear()
        deep_gemm.set_num_sms(num_sms)
        calls(h.seeded(0, CPU))
        largest = max(blocks(launch) for launch in recorder.launches if launch.key.source == "grouped_gemm")
        assert largest == (16 if num_sms == 16 else 132)
        assert any(launch.pdl for launch in recorder.launches) == (num_sms != 16)


def test_triton_kernels_take_all_and_one_line_says_so(
    recorder: h.Recorder, monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    gpu = devices.Gpu(0, 132, BACKENDS["sm_89"])
    monkeypatch.setattr(devices, "_gpu", lambda device: gpu)
    deep_gemm.set_num_sms(16)
    assert devices.device_of(torch.empty(0)) is devices.device_of(torch.empty(0)) is gpu
    assert plugin_log.messages == ["fp8moe: set_num_sms does not limit Triton kernels: they take all multiprocessors"]


def test_a_limit_is_a_device_of_its_own(recorder: h.Recorder) -> None:
    whole = devices.device_of(torch.empty(0))
    deep_gemm.set_num_sms(64)
    half = devices.device_of(torch.empty(0))
    assert half is devices.device_of(torch.empty(0))
    assert half is not whole
    assert half is not None
    assert half.multiprocessors == 64
    deep_gemm.set_num_sms(0)
    assert devices.device_of(torch.empty(0)) is whole


def test_the_number_is_that_of_the_gpu_unless_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert deep_gemm.get_num_sms() == 132
    deep_gemm.set_num_sms(78)
    assert deep_gemm.get_num_sms() == 78


@pytest.mark.parametrize("multiprocessors", [8, 20, 56, 78, 100])
def test_small_batches_and_few_rows_fit_fewer_multiprocessors(multiprocessors: int) -> None:
    shape = MoeShape(topk=8, hidden=7168, intermediate=512, local_experts=8, global_experts=256)
    step = h.plan_step(shape, 4, multiprocessors=multiprocessors)
    assert isinstance(step, SmallBatchStep) == (multiprocessors >= 56)
    if isinstance(step, SmallBatchStep):
        assert step.clusters * step.cluster <= multiprocessors
        assert 56 * step.down_splits <= multiprocessors
    assert plan_dense(8, 2112, 7168, Output.BF16, multiprocessors).blocks <= multiprocessors


@pytest.mark.gpu
def test_results_do_not_depend_on_it() -> None:
    gen = h.seeded(0, torch.device("cuda", 0))
    layer = h.random_layer(gen, 8, 1024, 512)
    for tokens in (4, 40, 900):
        x = h.random_tokens(gen, tokens, 1024)
        weights, ids = h.random_routing(gen, "distinct", tokens, 2, 8)
        deep_gemm.set_num_sms(0)
        expected = ops.fused_moe(x, *layer, weights, ids)
        deep_gemm.set_num_sms(64)
        assert deep_gemm.get_num_sms() == 64
        assert h.relative_l2(ops.fused_moe(x, *layer, weights, ids), expected) < 1e-2
