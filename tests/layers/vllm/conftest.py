import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.load import join_ranks, load, replaced

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def workspaces() -> Iterator[None]:
    """What a worker makes ready for vLLM's modular kernel, on the CPU."""
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    with replaced("fp8moe"):
        init_workspace_manager(torch.device("cpu"))
        yield
        reset_workspace_manager()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, workspaces: None) -> Iterator[None]:
    """vLLM's groups, of one rank each."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    with mock.patch.dict(os.environ):  # vLLM sets variables, which must not affect later tests
        with set_current_vllm_config(VllmConfig()):
            join_ranks(tmp_path_factory.mktemp("ranks"))
        yield
        destroy_model_parallel()
        destroy_distributed_environment()


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of the module's `checkpoint`, which has one shard."""
    (shard,) = checkpoint.glob("*.safetensors")
    return load_file(shard)


@pytest.fixture(scope="module")
def model(checkpoint: Path, workspaces: None) -> Iterator[torch.nn.Module]:
    """The module's `checkpoint`, a Qwen3-MoE, as vLLM loads it."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    ModelRegistry.register_model(
        "Qwen3MoeForCausalLM", Qwen3MoeForCausalLM
    )  # otherwise vLLM inspects the class in a new process
    with mock.patch.dict(os.environ, ENVIRONMENT):  # vLLM sets further variables, which must not affect later tests
        yield load(checkpoint, "fp8moe", enforce_eager=True)
        destroy_model_parallel()
        destroy_distributed_environment()


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
