import pytest

from benchmarks.layer import around_experts


def test_the_time_of_a_step_lies_between_those_measured():
    points = {1: 1.0, 16: 2.5, 1024: 6.0}
    assert [around_experts.interpolated(points, tokens) for tokens in (1, 6, 16, 1024)] == [1.0, 1.5, 2.5, 6.0]
    with pytest.raises(ValueError, match="2048 tokens"):
        around_experts.interpolated(points, 2048)


def test_what_all_layers_of_a_step_save():
    found = around_experts.row("top-k", "dsv3-tp1", 1, today=100, fewer=94.6)
    assert found["step_ms"] == 1.08
    assert found["saved_percent"] == 1.0  # two layers of 5.4 us
    assert around_experts.row("silu, quantize: dense MLP", "dsv3-tp1", 1, 100, 94.6)["saved_percent"] == 0.5
    assert "step_ms" not in around_experts.row("top-k", "dsv3-tp8", 1, today=100, fewer=94.6)
    milliseconds, layers = around_experts.steps("qwen3-30b")
    assert around_experts.row("top-k", "qwen3-30b", 1, 100, 90)["saved_percent"] == round(layers / milliseconds[1], 2)
