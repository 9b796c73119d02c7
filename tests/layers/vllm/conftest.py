from collections.abc import Callable, Iterator

import pytest
import torch

from tests.engine.load import replaced


@pytest.fixture(scope="module")
def workspaces() -> Iterator[None]:
    """What a worker makes ready for vLLM's modular kernel, on the CPU."""
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    with replaced("fp8moe"):
        init_workspace_manager(torch.device("cpu"))
        yield
        reset_workspace_manager()


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes vLLM's dense layers those of one rank of several."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear

    def set_rank(ranks: int, rank: int) -> None:
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)

    return set_rank
