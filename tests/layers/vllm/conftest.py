from collections.abc import Callable

import pytest


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
