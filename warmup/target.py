"""The GPUs to serve a model on, and the limits and defaults of the command line."""

from dataclasses import dataclass
from pathlib import Path

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.jit import lookup

GIB = 1 << 30
BUNDLE = Path(lookup.BUNDLE)
TUNING = Path("fp8moe-tuning.json")
MAX_TOKENS = 8192  # of a step: the engines' default for a server on Hopper GPUs
MAX_COUNT = 1 << 20
NODE = 8  # GPUs connected by NVLink
MOST_GPUS = 2 * NODE  # most GPUs that `explain --gpu` considers by default
UTILIZATION = 0.92  # the default of recent vLLMs
CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3")


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int  # as CUDA reports it


GPUS = {
    "h100": Gpu("H100 80GB", int(79.1 * GIB)),
    "h200": Gpu("H200 141GB", int(139.8 * GIB)),
    "h20": Gpu("H20 96GB", int(95.1 * GIB)),
    "h800": Gpu("H800 80GB", int(79.1 * GIB)),
}


@dataclass(frozen=True)
class Target:
    """The GPUs to serve on, and an engine's options."""

    gpu: str  # a key of GPUS
    gpus: int | None  # None to consider up to 16
    utilization: float
    fp8_cache: bool
    max_model_len: int | None  # None for the model's own
    max_tokens: int  # of a step
    split: Parallel | None = None  # the only one to consider
    sglang: bool = False  # consider SGLang's splits instead of vLLM's
    dense_tp1: bool = False  # of SGLang

    def tokens(self, way: Parallel) -> int:
        """Returns the tokens of the longest step on each replica. SGLang divides a step's among them."""
        return max(1, self.max_tokens // way.dp) if way.sglang else self.max_tokens
