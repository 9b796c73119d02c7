"""SGLang without an engine. Where there is no Hopper GPU it runs on the CPU, with stubs for what has no build for it
(tests/engine/sglang)."""

import importlib.util
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import has_hopper
from tests.engine.sglang.conftest import STUBS

if importlib.util.find_spec("sglang") and not has_hopper():  # before anything imports it
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.insert(0, str(STUBS))


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def slicing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loaders slice tensors in one way on a CPU and in another elsewhere."""
    from sglang.srt.layers import linear, parameter
    from sglang.srt.layers.moe.fused_moe_triton import layer

    for module in (linear, parameter, layer):
        monkeypatch.setattr(module, "_is_cpu", request.param == "as on a CPU")


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], dict[str, Any]]:
    """The options of a linear layer on one rank of several."""
    from sglang.srt.distributed import utils
    from sglang.srt.layers import linear

    from tests.layers.sglang.layers import Quantized

    def options(rank: int, ranks: int) -> dict[str, Any]:
        of_rank = {"tp_rank": rank, "tp_size": ranks}
        if hasattr(utils, "get_group_rank_size"):  # SGLang 0.5.22
            of_rank = {}
            for module in (utils, linear):
                monkeypatch.setattr(module, "get_group_rank_size", lambda group: (rank, ranks))
            monkeypatch.setattr(linear, "_resolve_linear_group", lambda group: SimpleNamespace(world_size=ranks))
        return {"quant_config": Quantized(), "bias": False, "params_dtype": torch.bfloat16, **of_rank}

    return options


@pytest.fixture
def make_mlp(on_rank: Callable[[int, int], dict[str, Any]]) -> Callable[..., Any]:
    """Makes the `gate_up_proj` and `down_proj` of an MLP on one rank of several."""
    from sglang.srt.layers import linear

    from tests.layers.experts import HIDDEN

    def make(intermediate: int, ranks: int, rank: int) -> tuple[torch.nn.Module, torch.nn.Module]:
        options = on_rank(rank, ranks)
        gate_up = linear.MergedColumnParallelLinear(HIDDEN, [intermediate] * 2, prefix="mlp.gate_up_proj", **options)
        return gate_up, linear.RowParallelLinear(intermediate, HIDDEN, prefix="mlp.down_proj", **options)

    return make
