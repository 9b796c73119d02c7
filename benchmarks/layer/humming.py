"""Humming's grouped GEMMs and a fused-MoE layer made of them, as a peer.

Humming compiles its kernels with NVRTC, one for each tile, which takes 4 seconds of a core: `compile_ahead` compiles
many at once, before anything is timed. Weights have one of these formats:

- `W8A8`: e4m3 weights and activations, float32 scales per 128x128 block and per token and 128 channels. Humming
  supports this format; vLLM 0.33 has no setting that leads to it.
- `W8A16`: what vLLM 0.33 makes of a block-FP8 checkpoint with `--moe-backend humming`. It rounds the scales to
  bfloat16, repeats them for each row, and keeps the activations in bfloat16.
- `W4A8`: MXFP4 weights as in a checkpoint, activations as in `W8A8`. vLLM 0.33's default for DeepSeek-V4 on Hopper.
"""

import importlib.util
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from fp8moe_plugin.bench.peers import Layer
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.activation import FLOAT32_MAX, SILU, Activation
from fp8moe_plugin.formats.fp8_block import GROUP
from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.ops.operands import ExpertWeights, Quantized

W8A8, W8A16, W4A8 = "w8a8", "w8a16", "w4a8"
INDEXED, CONTIGUOUS = "indexed", "grouped_contiguous"  # Humming's names of the layouts of rows
LARGEST_CUT = 64  # rows of a tile; higher ones, unless Humming chose their other sizes, exceed the registers
LOCKS = 2048  # for tiles whose K several blocks share; Humming's own layer has as many

Tuning = dict[str, Any]


def check_installed() -> None:
    """End the program if Humming is missing."""
    if importlib.util.find_spec("humming") is None:
        raise SystemExit('Humming is not installed here. Run: pip install "humming-kernels[cu13]"')


def gemm_config(groups: int, n: int, k: int, weight_format: str) -> Any:
    """Humming's `LayerConfig` of a grouped GEMM with weights `[groups, n, k]`."""
    from humming import dtypes
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    weight: dict[str, Any] = {"b_dtype": dtypes.float8e4m3, "weight_scale_group_size": GROUP}
    if weight_format == W8A8:
        weight |= {"weight_scale_group_size_n": GROUP, "weight_scale_type": "block"}
    elif weight_format == W4A8:
        columns = MXFP4.scales.block[1]
        weight = {"b_dtype": dtypes.float4e2m1, "bs_dtype": dtypes.float8e8m0, "weight_scale_group_size": columns}
    inputs = {}
    if weight_format != W8A16:
        inputs = {"a_dtype": dtypes.float8e4m3, "input_scale_group_size": GROUP}
    schemas = HummingWeightSchema(**weight), HummingInputSchema(**inputs)
    return prepare_layer_config(n, k, *schemas, num_experts=groups, torch_dtype=torch.bfloat16)


def default_tuning(config: Any, layout: str, rows: int) -> Tuning:
    """Returns what Humming chooses for this many rows in all groups together, as vLLM looks it up."""
    from humming.tune import get_heuristics_config

    found: Tuning = get_heuristics_config(config, rows, gemm_type=layout)
    return found


def tunings(default: Tuning, rows_per_group: int) -> dict[str, Tuning]:
    """Humming's default, and the same with the tile cut to the rows of a group, which the default does not know."""
    rows = min(LARGEST_CUT, ceil_div(rows_per_group, 8) * 8)
    found = {"default": default}
    if default["block_shape"][0] != rows:
        sizes = {name: (rows, *default[name][1:]) for name in ("block_shape", "warp_shape")}
        found["cut"] = default | sizes
    return found


def kernel_jobs(config: Any, chosen: Iterable[tuple[str, Tuning]]) -> list[Callable[[], Any]]:
    """Returns what compiles and registers the kernel of each layout and tuning, each of them once."""
    from humming.kernel.humming import HummingKernel

    kernels = {}
    for layout, tuning in chosen:
        arguments = json.loads(config.to_str()) | _compute_config(layout) | tuning
        arguments.pop("num_sms", None)  # is an argument of the launch
        kernels[json.dumps(arguments, sort_keys=True)] = partial(HummingKernel, **arguments)
    return list(kernels.values())


def compile_ahead(jobs: Iterable[Callable[[], Any]]) -> int:
    """Run jobs in as many threads as there are cores. Returns how many failed; they fail again when used."""
    from humming.utils.cpu import get_available_cpu_count

    device = torch.cuda.current_device()

    def run(job: Callable[[], Any]) -> None:
        with torch.cuda.device(device):
            job()

    with ThreadPoolExecutor(get_available_cpu_count()) as pool:
        futures = [pool.submit(run, job) for job in jobs]
    return sum(future.exception() is not None for future in futures)


class HummingGemm:
    """A grouped GEMM with its weights in Humming's form."""

    def __init__(self, weight_format: str, weights: Quantized) -> None:
        from humming.transform import transform_humming_tensors

        q, scales = weights
        groups, n, columns = q.shape
        self.config = gemm_config(groups, n, columns * (2 if weight_format == W4A8 else 1), weight_format)
        if weight_format == W8A16:
            scales = scales.repeat_interleave(GROUP, 1).bfloat16()
        elif weight_format == W4A8:
            scales = scales.view(torch.float8_e8m0fnu)
        self.tensors = transform_humming_tensors(self.config, {"weight": q.view(torch.int32), "weight_scale": scales})
        self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=q.device)

    def caller(self, layout: str, tuning: Tuning, rows: int) -> Callable[..., torch.Tensor]:
        """Returns a function of `inputs`, `input_scale`, `outputs` and the layout's operands; `rows`: see tuning."""
        from humming.forward import humming_forward

        return partial(
            humming_forward,
            self.config,
            **self.tensors,
            locks=self.locks,
            valid_shape_m=rows,
            compute_config=json.dumps(_compute_config(layout)),
            tuning_config=json.dumps(tuning),
        )


def even_rows(layout: str, tuning: Tuning, groups: int, rows: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Returns the operands of a layout in which each group has `rows` consecutive rows of the inputs."""
    if layout == CONTIGUOUS:
        return {"expert_layout": torch.arange(groups + 1, device=device) * rows}
    tile = tuning["block_shape"][0]
    blocks = ceil_div(rows, tile)
    ids = torch.full((groups, blocks * tile), groups * rows, dtype=torch.int32, device=device)  # padding: no row
    ids[:, :rows] = torch.arange(groups * rows, dtype=torch.int32, device=device).view(groups, rows)
    experts = torch.arange(groups, dtype=torch.int32, device=device)
    return {
        "sorted_ids": ids.flatten(),
        "expert_ids": experts.repeat_interleave(blocks),
        "num_tokens_padded": torch.tensor([ids.numel()], dtype=torch.int32, device=device),
    }


def swiglu(activation: Activation) -> dict[str, str]:
    """Returns the arguments of `may_process_input` that compute an activation."""
    code = "a * b / (1.f + expf(-a))"
    if activation.variant:
        numbers = (f"{min(number, FLOAT32_MAX)}f" for number in activation.numbers)
        gate_limit, activated_limit, up_limit, alpha, beta = numbers
        gate = f"fminf(a, {gate_limit})"
        activated = f"fminf({gate} / (1.f + expf(-{alpha} * {gate})), {activated_limit})"
        code = f"{activated} * (fmaxf(fminf(b, {up_limit}), -{up_limit}) + {beta})"
    return {"activation_type": "binary_split", "activation_impl": code}


def layer_jobs(
    weight_format: str, layout: str, experts: Experts, tokens: Iterable[int], activation: Activation = SILU
) -> list[Callable[[], Any]]:
    """Returns what compiles the kernels of `humming_layer`'s layers."""
    from humming.forward import may_process_input

    first, second = (gemm_config(experts.experts, *sizes, weight_format) for sizes in _sizes(experts))
    x, gate_up = (torch.zeros(1, k, dtype=torch.bfloat16, device="cuda") for k in (experts.hidden, first.shape_n))
    places = torch.arange(experts.topk, dtype=torch.int32, device="cuda").view(1, -1)
    scatter = {"layout": "scatter", "scatter_idx": places} if layout == CONTIGUOUS else {}
    # They come first, as each of the two compiles several kernels.
    jobs = [
        partial(may_process_input, first, x, **scatter),
        partial(may_process_input, second, gate_up, **swiglu(activation)),
    ]
    rows = [count * experts.topk for count in tokens]
    for config in (first, second):
        jobs += kernel_jobs(config, [(layout, default_tuning(config, layout, count)) for count in rows])
    return jobs


def make_humming(weight_format: str, layout: str, experts: Experts, weights: ExpertWeights, tokens: int) -> Layer:
    return humming_layer([HummingGemm(weight_format, weight) for weight in weights[:2]], layout, experts, tokens)


def humming_layer(
    gemms: list[HummingGemm], layout: str, experts: Experts, tokens: int, activation: Activation = SILU
) -> Layer:
    """Returns a layer of the steps of vLLM 0.33's `HummingIndexedExperts` or `HummingGroupedExperts` on one rank.

    Humming's own: both GEMMs, with the tile of its default tuning, the quantization of the tokens, and SwiGLU with the
    quantization of its result. vLLM's, in the version that is installed: around the indexed layout the alignment of
    the tokens of each expert to the tile (twice if the tiles differ) and the weighted sum; around the contiguous one
    the sort and the weighted sum that reads permuted rows. Where vLLM 0.33 only sorts (`moe_prepare_scatter`), this
    calls `moe_permute`, which 0.25 has, too, on rows of 16 bytes; Humming's quantization then scatters the tokens.
    """
    rows = tokens * experts.topk
    chosen = [default_tuning(gemm.config, layout, rows) for gemm in gemms]
    calls = [gemm.caller(layout, tuning, rows) for gemm, tuning in zip(gemms, chosen, strict=True)]
    configs, act = [gemm.config for gemm in gemms], swiglu(activation)
    if layout == CONTIGUOUS:
        return partial(_contiguous_layer, experts, configs, calls, act)
    return partial(_indexed_layer, experts, configs, calls, act, [tuning["block_shape"][0] for tuning in chosen])


def _indexed_layer(
    experts: Experts,
    configs: list[Any],
    calls: list[Callable[..., torch.Tensor]],
    act: dict[str, str],
    tiles: list[int],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    from humming.forward import may_process_input
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

    names = "sorted_ids", "expert_ids", "num_tokens_padded"
    aligned = {tile: moe_align_block_size(ids, tile, experts.experts) for tile in dict.fromkeys(tiles)}
    first, second = (dict(zip(names, aligned[tile], strict=True)) for tile in tiles)
    inputs, scales, _ = may_process_input(configs[0], x)
    gate_up, down = (x.new_empty(ids.numel(), n) for n, _ in _sizes(experts))
    calls[0](inputs=inputs, input_scale=scales, outputs=gate_up, top_k=experts.topk, **first)
    inputs, scales, _ = may_process_input(configs[1], gate_up, **act)
    calls[1](inputs=inputs, input_scale=scales, outputs=down, **second)
    return moe_fused_mul_sum(down.view(*ids.shape, -1), topk_weights, torch.empty_like(x))


def _contiguous_layer(
    experts: Experts,
    configs: list[Any],
    calls: list[Callable[..., torch.Tensor]],
    act: dict[str, str],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    from humming.forward import may_process_input
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_permute, moe_unpermute

    narrow = x.new_empty(len(x), 8)
    _, _, starts, places, _ = moe_permute(narrow, None, ids, experts.experts)
    counts = {"num_valid_tokens": starts[-1:]}
    scatter = {"layout": "scatter", "scatter_idx": places.view(ids.shape)}
    inputs, scales, _ = may_process_input(configs[0], x, **scatter, **counts)
    gate_up, down = (x.new_empty(ids.numel(), n) for n, _ in _sizes(experts))
    calls[0](inputs=inputs, input_scale=scales, outputs=gate_up, expert_layout=starts)
    inputs, scales, _ = may_process_input(configs[1], gate_up, **act, **counts)
    calls[1](inputs=inputs, input_scale=scales, outputs=down, expert_layout=starts)
    out = torch.empty_like(x)
    moe_unpermute(out, down, topk_weights, places, starts)
    return out


def _sizes(experts: Experts) -> tuple[tuple[int, int], tuple[int, int]]:
    """N and K of both GEMMs."""
    return (2 * experts.intermediate, experts.hidden), (experts.hidden, experts.intermediate)


def _compute_config(layout: str) -> dict[str, Any]:
    return {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": layout}
