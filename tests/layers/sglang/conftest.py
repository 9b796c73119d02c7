"""SGLang without an engine. Where there is no Hopper GPU it runs on the CPU, with stubs for what has no build for it
(tests/engine/sglang)."""

import importlib.util
import os
import sys

import pytest

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
