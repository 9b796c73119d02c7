"""The cases of `benchmarks.engine.splits`: which engines are compared, on which checkpoints."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from benchmarks.checkpoints.synthetic import PRESETS, Shape
from benchmarks.engines import ENGINES as PEERS

ON_GPU = torch.cuda.is_available()
REDUNDANT = 4  # experts
EPLB = {"window_size": 16, "step_interval": 24, "num_redundant_experts": REDUNDANT}
# Cases for which vLLM 0.32 on CPUs lacks FP8 kernels, a collective, the drafter of a pipeline, or EPLB.
NOT_ON_CPUS = ("converted", "dp2", "pp2-mtp", "eplb", "eplb-greedy", "reload-eplb", "push2-engine", "push2-eplb")


def shapes() -> dict[str, Shape]:
    """Shapes by the checkpoint's name. The experts are in the last layer, and scales differ between blocks."""
    preset = "small" if ON_GPU else "tiny"
    deepseek, qwen = (replace(PRESETS[f, preset], moe_layers=1, block_spread=1.0) for f in ("deepseek_v3", "qwen3_moe"))
    dense = deepseek.dense_intermediate + 128  # half of it, on two ranks, ends within a scale block
    return {
        "deepseek": deepseek,
        "deepseek_odd": replace(deepseek, moe_intermediate=384, dense_intermediate=dense),
        # Wide enough for steps in which four ranks push rows. The second one is for multi-token prediction alone.
        "deepseek_wide": replace(deepseek, moe_intermediate=1280),
        "deepseek_draft": replace(deepseek, experts=deepseek.experts // 2),
        "deepseek_ue8m0": replace(deepseek, ue8m0=True),
        "qwen_odd": replace(qwen, moe_intermediate=384),
    }


@dataclass(frozen=True)
class Engine:
    checkpoint: str  # a name of `shapes`, and -fp8, -bf16 or -converted
    arguments: dict[str, Any]
    gpus: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    replicas: int = 1  # of data parallelism, a process each
    moves: bool = False  # moves experts before it answers
    placed_as: str | None = None  # the engine whose final placement it starts with
    reloads: bool = False  # the same checkpoint, before it moves experts
    draft: str | None = None  # the checkpoint of multi-token prediction, if it has one of its own
    windows: int = 0


OURS = {"quantization": "fp8moe"}
TP2 = OURS | {"tensor_parallel_size": 2}
EP2 = TP2 | {"enable_expert_parallel": True}
DP2 = OURS | {"enable_expert_parallel": True, "all2all_backend": "allgather_reducescatter"}
PP2 = OURS | {"pipeline_parallel_size": 2}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
BALANCED = EP2 | {"enable_eplb": True, "worker_extension_cls": "benchmarks.engine.placement.Placement"}
WINDOWS = "benchmarks.engine.placement.Placement" if ON_GPU else "tests.engine.gloo_windows.Windows"
PUSH = DP2 | {"worker_extension_cls": WINDOWS}
UNQUANTIZED = {"moe_backend": "triton"} if ON_GPU else {}
OWN_FP8, OWN_FP8_ENVIRONMENT = PEERS["triton"]  # FP32 scales of activations, as ours


def pushing(ranks: int, checkpoint: str) -> dict[str, Engine]:
    """Engines with FP8MOE_EP=push on this number of GPUs, and the one with vLLM's all-to-all."""
    own = Engine(f"{checkpoint}-fp8", DP2, gpus=ranks, replicas=ranks)
    push = replace(own, arguments=PUSH, environment={"FP8MOE_EP": "push"}, windows=1)
    moving = PUSH | {"enable_eplb": True, "eplb_config": EPLB | {"step_interval": EPLB["window_size"]}}
    return {
        f"dp{ranks}": own,
        f"push{ranks}": push,
        f"push{ranks} moved": replace(push, arguments=moving, moves=True),
        f"push{ranks} mtp": replace(push, arguments=PUSH | MTP, draft="deepseek_draft-fp8", windows=2),
    }


ENGINES = {
    "deepseek": Engine("deepseek-fp8", OURS),
    "deepseek twin": Engine("deepseek-bf16", UNQUANTIZED),
    "ue8m0": Engine("deepseek_ue8m0-fp8", OURS),
    "ue8m0 twin": Engine("deepseek_ue8m0-bf16", UNQUANTIZED),
    "online": Engine("deepseek-bf16", OURS),
    "converted": Engine("deepseek-converted", OURS),
    "vllm fp8": Engine("deepseek-converted", {"moe_backend": OWN_FP8["moe_backend"]}, environment=OWN_FP8_ENVIRONMENT),
    "mtp": Engine("deepseek-fp8", OURS | MTP),
    "tp2": Engine("deepseek-fp8", TP2, gpus=2),
    "ep2": Engine("deepseek-fp8", EP2, gpus=2),
    **pushing(2, "deepseek"),
    **pushing(4, "deepseek_wide"),
    "wide": Engine("deepseek_wide-fp8", OURS),
    "wide twin": Engine("deepseek_wide-bf16", UNQUANTIZED),
    "pp2": Engine("deepseek-fp8", PP2, gpus=2),
    "pp2 mtp": Engine("deepseek-fp8", PP2 | MTP, gpus=2),
    "moved": Engine("deepseek-fp8", BALANCED | {"eplb_config": EPLB}, gpus=2, moves=True),
    "placed": Engine(
        "deepseek-fp8", BALANCED | {"eplb_config": EPLB | {"step_interval": 10**6}}, gpus=2, placed_as="moved"
    ),
    "reloaded, moved": Engine("deepseek-fp8", BALANCED | {"eplb_config": EPLB}, gpus=2, moves=True, reloads=True),
    "placed after reload": Engine(
        "deepseek-fp8",
        BALANCED | {"eplb_config": EPLB | {"step_interval": 10**6}},
        gpus=2,
        placed_as="reloaded, moved",
    ),
    "reloaded": Engine("deepseek-fp8", OURS, reloads=True),
    "deepseek odd": Engine("deepseek_odd-fp8", OURS),
    "deepseek odd tp2": Engine("deepseek_odd-fp8", TP2, gpus=2),
    "deepseek odd twin": Engine("deepseek_odd-bf16", UNQUANTIZED),
    "qwen odd": Engine("qwen_odd-fp8", OURS),
    "qwen odd tp2": Engine("qwen_odd-fp8", TP2, gpus=2),
    "qwen odd twin": Engine("qwen_odd-bf16", UNQUANTIZED),
}


@dataclass(frozen=True)
class Case:
    what: str
    engine: str
    reference: str
    check: Literal["bits", "greedy", "twin"] = "greedy"
    twin: str | None = None  # the engine must not be further from it than the reference is

    def engines(self) -> list[str]:
        names = [self.reference, self.engine] + ([self.twin] if self.twin else [])
        return names if ENGINES[self.engine].placed_as is None else [str(ENGINES[self.engine].placed_as), *names]


def push_cases(ranks: int, reference: str) -> dict[str, Case]:
    """The cases of `pushing`, beside one GPU and beside vLLM's all-to-all."""
    split = f"data and expert parallel on {ranks} GPUs"
    push, twin = f"push{ranks}", f"{reference} twin"
    moved, mtp = "experts moving under CUDA graphs", "multi-token prediction with a window of its own"
    return {
        f"dp{ranks}": Case(f"{split} (all-gather, reduce-scatter) vs one", f"dp{ranks}", reference, twin=twin),
        push: Case(f"{split} (windows) vs one", push, reference, twin=twin),
        f"{push}-engine": Case(f"{split}, windows vs all-gather, reduce-scatter", push, f"dp{ranks}"),
        f"{push}-eplb": Case(f"{split} (windows), {moved} vs one", f"{push} moved", reference, twin=twin),
        f"{push}-mtp": Case(f"{split} (windows), {mtp} vs one", f"{push} mtp", reference, twin=twin),
    }


CASES = {
    "fp32": Case("FP32 scales vs the unquantized model", "deepseek", "deepseek twin", "twin"),
    "ue8m0": Case("scale_fmt ue8m0 vs the unquantized model", "ue8m0", "ue8m0 twin", "twin"),
    "online": Case("quantized while loading vs converted before", "online", "converted", "bits"),
    "converted": Case("a converted checkpoint under vLLM's own fp8 vs ours", "vllm fp8", "converted"),
    "mtp": Case("multi-token prediction vs one token per step", "mtp", "deepseek", twin="deepseek twin"),
    "tp2": Case("tensor parallel vs one GPU", "tp2", "deepseek", twin="deepseek twin"),
    "ep2": Case("expert parallel vs one GPU", "ep2", "deepseek", twin="deepseek twin"),
    **push_cases(2, "deepseek"),
    **push_cases(4, "wide"),
    "pp2": Case("a pipeline vs one GPU", "pp2", "deepseek", twin="deepseek twin"),
    "pp2-mtp": Case("a pipeline with multi-token prediction vs one GPU", "pp2 mtp", "deepseek", twin="deepseek twin"),
    "eplb": Case("experts moved under CUDA graphs vs loaded where they ended", "placed", "moved", "bits"),
    "eplb-greedy": Case("experts moved under CUDA graphs vs one GPU", "moved", "deepseek", twin="deepseek twin"),
    "reload": Case("reloaded under CUDA graphs vs loaded once", "reloaded", "deepseek", "bits"),
    "reload-eplb": Case(
        "reloaded, then experts moved vs loaded where they ended", "placed after reload", "reloaded, moved", "bits"
    ),
    "odd-deepseek": Case(
        "192 of 384 channels per rank vs one GPU", "deepseek odd tp2", "deepseek odd", twin="deepseek odd twin"
    ),
    "odd-qwen": Case("192 of 384 channels per rank vs one GPU", "qwen odd tp2", "qwen odd", twin="qwen odd twin"),
}
