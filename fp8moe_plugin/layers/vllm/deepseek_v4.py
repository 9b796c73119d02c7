"""What vLLM's DeepSeek-V4 needs: the format of its experts before it is made, and the batched product `wo_a`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.transformers_utils.config import get_safetensors_params_metadata

from fp8moe_plugin import ops
from fp8moe_plugin.checkpoint.expert_format import is_weight_of_expert, named_dtype, stored_dtype
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.layers import metrics
from fp8moe_plugin.layers.kernels import kernels_backend, prepare_kernels
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.indexer import ours_where_it_fits
from fp8moe_plugin.ops.operands import Quantized


def dtype_of_experts(model: str, revision: str | None, fields: Mapping[str, Any]) -> str | None:
    """Returns the safetensors dtype of an expert's weight, or None if it is not known.

    Of a model in a hub, headers are read only if its config.json does not name the dtype: that takes many requests.

    Args:
        model, revision: vLLM's, a folder or the name of a model in a hub.
        fields: see `expert_format`.
    Raises:
        CheckpointError: the index or a header in the folder is damaged.
    """
    folder = Path(model)
    if folder.is_dir():
        return stored_dtype(folder)
    if named_dtype(fields):
        return None
    tensors = get_safetensors_params_metadata(model, revision=revision)
    return next((entry["dtype"] for name, entry in tensors.items() if is_weight_of_expert(name)), None)


def serve_batched_product(prefix: str, weight: torch.Tensor, groups: int, warmup: str) -> None:
    """Make vLLM multiply by the weight of a batched layer with our kernels, and load them.

    vLLM's model does not call such a layer. It passes weight and scales to DeepGEMM's `fp8_einsum`.

    Args:
        weight: e4m3 `[G * N, K]`, as it is loaded; DeepGEMM needs `[G, N, K]`.
        groups: G on this rank.
    Raises:
        UnsupportedError: groups are no whole blocks, or this GPU has no kernels for them.
        KernelNotPrecompiled, CompileError, LaunchError: see `prepare_kernels`.
    """
    backend = kernels_backend(weight)
    if len(weight) % (GROUP * groups):
        raise UnsupportedError(
            f"{prefix}: {len(weight)} output channels in {groups} groups are no whole scale blocks of {GROUP}. Use a "
            "smaller --tensor-parallel-size."
        )
    if not backend.has_all_ops:
        raise UnsupportedError(
            f"{prefix}: a batched product needs a Hopper GPU, and FP8MOE_BACKEND=sm90. Serve the checkpoint without "
            "--quantization fp8moe."
        )
    if groups > 1:
        metrics.update(prepare_kernels(backend.batched_dense_kernels(), weight, warmup))
    compat.replace_deep_gemm(fp8_einsum=partial(ours_where_it_fits, _einsum, _has_our_weight))


def _einsum(expr: str, a: Quantized, b: Quantized, d: torch.Tensor, **options: Any) -> torch.Tensor:
    weight, scales = (part.view(d.shape[1], -1, part.shape[-1]) for part in b)
    return ops.fp8_einsum(expr, a, (weight, scales), d, **options)


def _has_our_weight(expr: str, a: Quantized, b: Quantized, *_: object, **__: object) -> bool:
    return b[0].dim() == 2  # DeepGEMM's has a dimension for the groups
