"""The indexer of a model with sparse attention: vLLM calls our ops for its logits instead of DeepGEMM's functions."""

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp8moe_plugin import ops
from fp8moe_plugin.launches.sm90.indexer import PAGE
from fp8moe_plugin.layers import metrics
from fp8moe_plugin.layers.kernels import backend_name, kernels_backend, prepare_kernels
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.plan.sm90.indexer import indexer_refusal
from fp8moe_plugin.settings import settings

Function = Callable[..., torch.Tensor]


def serve_indexer(description: Any, device: torch.device, warmup: str) -> None:
    """Make our ops compute the logits of a model's indexer, if it has one, and load their kernels.

    Must be called in the process that runs the model, before its layers are created: vLLM refuses to create an indexer
    without DeepGEMM. vLLM still manages the cache of the indexer's keys and selects the largest logits.

    Args:
        description: the language model's part of config.json, as an object with attributes.
        warmup: the command that compiles the kernels in advance.
    Raises:
        KernelNotPrecompiled, CompileError, LaunchError: see `prepare_kernels`.
    """
    heads, dim = (getattr(description, name, None) or 0 for name in ("index_n_heads", "index_head_dim"))
    if not heads:
        return
    place = torch.empty(0, device=device)
    refusal = indexer_refusal(heads, dim) if settings().indexer else "FP8MOE_INDEXER=0"
    backend = kernels_backend(place)
    if not backend.has_all_ops:
        refusal = "our kernels for them need a Hopper GPU and FP8MOE_BACKEND=sm90"
    if refusal:
        log_once(logging.INFO, f"the indexer's logits: DeepGEMM ({refusal})")
        return
    kernels = prepare_kernels(backend.indexer_kernels(heads, dim), place, warmup)
    compat.replace_deep_gemm(
        fp8_fp4_mqa_logits=partial(ours_where_it_fits, ops.fp8_fp4_mqa_logits, _fits_query),
        fp8_fp4_paged_mqa_logits=partial(ours_where_it_fits, ops.fp8_fp4_paged_mqa_logits, _fits_pages),
        get_paged_mqa_logits_metadata=partial(ours_where_it_fits, ops.get_paged_mqa_logits_metadata, _fits_size),
    )
    compat.expect_no_deep_gemm()
    metrics.update(kernels)
    log_once(logging.INFO, f"the indexer's logits: backend {backend_name(place)}, {heads} heads of {dim} channels")


def ours_where_it_fits(ours: Function, fits: Callable[..., bool], theirs: Function | None) -> Function:
    """Returns a function that calls `ours`, or `theirs` for calls that `ours` does not support.

    Such calls come from another model in this process. Without `theirs`, our op refuses them.
    """
    theirs = getattr(theirs, "theirs", theirs)  # if a second model is served, our function is installed already
    if theirs is None or theirs is ours:
        return ours

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        return (ours if fits(*args) else theirs)(*args, **kwargs)

    vars(call)["theirs"] = theirs
    return call


def _fits_query(q: Any, *_: object) -> bool:
    values, scales = q if isinstance(q, tuple | list) else (q, None)
    return scales is None and indexer_refusal(*values.shape[-2:]) is None  # scales: MXFP4


def _fits_pages(q: Any, kv_cache: torch.Tensor, *_: object) -> bool:
    return _fits_query(q) and kv_cache.shape[1] == PAGE


def _fits_size(lens: torch.Tensor, block_kv: int, *_: object) -> bool:
    return block_kv == PAGE
