"""FP8MOE_PRINT_CONFIGS=1: a line on standard error for each new shape."""

import pytest
import torch

from fp8moe_plugin.ops import fp8_gemm_nt, fp8_linear
from fp8moe_plugin.plan.parameters import K_GROUPS
from tests import helpers as h
from tests.k_grouped import gradients

CPU = torch.device("cpu")


def test_each_new_shape_costs_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gen = h.seeded(0, CPU)
    weight = h.random_weights(gen, 136, 256)
    h.serve(monkeypatch, h.Recorder())
    with h.environment("FP8MOE_PRINT_CONFIGS", "1"):
        for rows in (3, 300, 3):
            a = h.random_quantized(gen, rows, 256)
            capsys.readouterr()
            fp8_gemm_nt(a, weight, torch.empty(rows, 136, dtype=torch.bfloat16))
            lines = capsys.readouterr().err.splitlines()
            if len(lines) == 0:
                break
            (line,) = lines
            assert line.startswith("fp8moe: fp8_gemm_nt: dense_gemm BLOCK_M=")
            assert f" m={rows} n=136 k=256 tile_n=" in line
            assert " grid=" in line
    assert rows == 3
    assert not lines


def test_an_op_of_several_kernels_names_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gen = h.seeded(0, CPU)
    h.serve(monkeypatch, h.Recorder())
    with h.environment("FP8MOE_PRINT_CONFIGS", "1"):
        fp8_linear(h.random_tokens(gen, 5, 256), *h.random_weights(gen, 136, 256))
    assert capsys.readouterr().err.count("; dense_gemm BLOCK_M=64 ") == 1


def test_each_launch_of_gradients_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = gradients(h.seeded(0, CPU), 16, 32, [128] * (K_GROUPS + 2))
    h.serve(monkeypatch, h.Recorder())
    with h.environment("FP8MOE_PRINT_CONFIGS", "1"):
        call.run(call.c, call.c)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    begin = f"fp8moe: k_grouped_fp8_gemm_nt_contiguous: k_grouped_gemm GROUPS={K_GROUPS} "
    assert all(line.startswith(begin) and f"m=16 n=32 groups={K_GROUPS // 2 + 1} " in line for line in lines)


def test_nothing_is_printed_unasked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gen = h.seeded(0, CPU)
    h.serve(monkeypatch, h.Recorder())
    fp8_linear(h.random_tokens(gen, 5, 256), *h.random_weights(gen, 136, 256))
    assert capsys.readouterr().err == ""
