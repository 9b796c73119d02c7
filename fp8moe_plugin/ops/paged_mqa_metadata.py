"""The schedule of the logits over paged KV, computed once per step for all layers."""

import torch

from fp8moe_plugin.errors import InvalidInputError
from fp8moe_plugin.jit.launch import Slot
from fp8moe_plugin.jit.launcher import Prepared
from fp8moe_plugin.launches.sm90.indexer import PAGE, paged_mqa_metadata_launch
from fp8moe_plugin.ops import devices, reference, workspace
from fp8moe_plugin.ops.devices import Device, prepares
from fp8moe_plugin.ops.indexer import check_lengths, check_no_indices
from fp8moe_plugin.ops.option_checks import check_int, check_one_of


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: None = None
) -> torch.Tensor:
    """Divide the KV of all requests into `num_sms` runs of equal length, for `fp8_paged_mqa_logits`.

    Runs consist of splits of 256 rows. Captures in a CUDA graph.

    Args:
        context_lens: int32 `[B, next_n]` on the device; the last one of a request is the length of its KV.
        block_kv: rows of a page: 64.
        num_sms: number of runs: the number of multiprocessors, or half of it if `next_n` is 4.
        indices: None.
    Returns:
        int32 `[num_sms + 1, 2]`: the begin of each run as (request, split of the request); the last row is (B, 0).
    Raises:
        InvalidInputError: wrong dtype, shape, stride, device or option.
    """
    check_lengths(context_lens, None, None)
    check_one_of("block_kv", block_kv, (PAGE,))
    check_int("num_sms", num_sms)
    if num_sms < 1:
        raise InvalidInputError(f"num_sms is {num_sms}, needs 1 or more. Pass the number of multiprocessors.")
    check_no_indices(indices)
    schedule = workspace.empty((num_sms + 1, 2), torch.int32, context_lens.device)
    device = devices.sm90_device_of(context_lens)
    if device is None:
        return schedule.copy_(reference.paged_mqa_schedule(context_lens, num_sms))
    prepared_metadata(device, *context_lens.shape, num_sms)((context_lens.data_ptr(), schedule.data_ptr()))
    return schedule


@prepares("get_paged_mqa_logits_metadata")
def prepared_metadata(device: Device, batch: int, next_n: int, runs: int) -> Prepared:
    """Returns a callable that launches `get_paged_mqa_logits_metadata`, given the addresses of lengths and schedule."""
    lengths, schedule = map(Slot, range(2))
    return device.prepare([paged_mqa_metadata_launch(lengths, schedule, batch, next_n, runs)])
