"""Whether windows (FP8MOE_EP=push) are used, and their sizes: for engines and `fp8moe-warmup`. Needs no torch."""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from fp8moe_plugin.formats.weight_format import ceil_div
from fp8moe_plugin.plan.sm90.push import window_layout
from fp8moe_plugin.plan.tuning import EP_WINDOW_BYTES

NO_ALL_GATHER = "no data parallelism with --enable-expert-parallel and --all2all-backend allgather_reducescatter"
NO_KERNELS = "a device without our CUDA kernels"
WEIGHTED_TOKENS = "a router whose weights multiply the tokens"
UNDER_SGLANG = (
    "FP8MOE_EP=push has no effect under SGLang, which gathers the tokens of all ranks before it calls a layer"
)


def vllm_keeps_its_own(refusal: str) -> str:
    return f"FP8MOE_EP=push: vLLM's all-to-all is used, because there is {refusal}"


class Windows(NamedTuple):
    """The windows of a group: `nbytes` on each rank, with room for `rows` tokens of each."""

    ranks: int
    rows: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks store tokens into each other's windows of {self.nbytes / 2**20:.0f} MiB, in steps of "
            f"up to {self.rows} tokens a rank. Longer steps use vLLM's all-to-all"
        )


def windows(ranks: int, step: int, sharing: int, hidden: int, topk: int, experts: int) -> Windows:
    """Returns the windows of a group: with room for all steps, unless EP_WINDOW_BYTES do not suffice for that.

    Args:
        step: tokens of the longest step, which `sharing` ranks share.
        experts: of all ranks.
    """

    def nbytes(rows: int) -> int:
        return window_layout(ranks, rows, hidden, topk, experts).nbytes

    rows = bisect_right(range(1, ceil_div(step, sharing) + 1), EP_WINDOW_BYTES, key=nbytes)
    return Windows(ranks, rows, nbytes(rows))


def place_refusal(places: Sequence[tuple[Hashable, Hashable]], reaches: Sequence[bool]) -> str | None:
    """Returns why the ranks of a group cannot store into each other's memory, or None if they can.

    Args:
        places: the host and the GPU of each rank.
        reaches: whether a rank's GPU can store, and add, to the memory of the group's other GPUs on its host.
    """
    hosts, gpus = zip(*places, strict=True)
    if len(set(hosts)) > 1:
        return "a group whose ranks are on several hosts"
    if len(set(gpus)) < len(gpus):
        return "a GPU that several ranks share"
    return None if all(reaches) else "a GPU that cannot store into the memory of another one over NVLink"
