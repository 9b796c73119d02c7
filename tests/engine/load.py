"""What vLLM loads, with no engine around it: of each checkpoint, the SHA-256 of each parameter, as a line of JSON.

python -m tests.engine.load FOLDER ARGUMENTS_AS_JSON

ARGUMENTS have `loads`: pairs of a `--quantization` and the name of a checkpoint in FOLDER. The parameters of vLLM's own
`fp8` are those before its kernels, which few CPUs can run, rearrange them.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from tests.engine.generate import LIMITS, share_imports


def digests(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: sha256(parameter.data.reshape(-1).cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


@contextmanager
def replaced(method: str) -> Iterator[None]:
    """Without what a worker makes ready for the loader on a CPU, and without the kernels of vLLM's own `fp8`."""
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader import base_loader

    # With AMX tiles, vLLM rearranges more weights, by kernels that its builds for GPUs lack.
    functions: list[tuple[object, str, object]] = [(torch.cpu, "_is_amx_tile_supported", False)]
    if not torch.accelerator.is_available():
        functions += [(torch.accelerator, "empty_cache", None)]
    if method == "fp8":
        functions += [
            (fp8, "init_fp8_linear_kernel", SimpleNamespace()),
            (fp8, "select_fp8_moe_backend", (None, None)),
            (base_loader, "process_weights_after_loading", None),
        ]
    with ExitStack() as stack:
        for module, name, result in functions:
            stack.enter_context(mock.patch.object(module, name, return_value=result))
        yield


def load(model: Path, method: str, **arguments: object) -> torch.nn.Module:
    """Returns a checkpoint as vLLM loads it under `--quantization METHOD`, on one rank: this process."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    own = {"model": str(model), "quantization": method, "dtype": "bfloat16", "skip_tokenizer_init": True}
    config = EngineArgs(**own, **LIMITS, **arguments).create_engine_config()
    with set_current_vllm_config(config), replaced(method):
        join_ranks(model.parent)
        return get_model(vllm_config=config)


def join_ranks(folder: Path) -> None:
    """Make this process the only rank of a group, unless it is one already."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.platforms import current_platform

    if not model_parallel_is_initialized():
        init_distributed_environment(1, 0, f"file://{folder}/ranks-meet", 0, current_platform.dist_backend)
        initialize_model_parallel()


def main() -> None:
    folder, arguments = Path(sys.argv[1]), json.loads(sys.argv[2])
    share_imports()
    for method, name in arguments.pop("loads"):
        print("\n" + json.dumps(digests(load(folder / name, method, **arguments))), flush=True)


if __name__ == "__main__":
    main()
