"""Packed experts in MXFP4, for any engine: the memory that they take while they grow."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.layers import pack
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.ops.mxfp4 import further_steps, widened
from tests import helpers as h

EXPERTS, FURTHER = 3, 4


def parameters_of(name: str, device: str, experts: int, hidden: int, intermediate: int) -> list[torch.nn.Parameter]:
    """Returns the weights and the scales of w13 or w2, with random contents."""
    gen, found = torch.Generator(device).manual_seed(0), []
    for suffix in ("weight", "scale"):
        with torch.device(device):
            tensor = expert_tensors(PACKED_MXFP4, experts, hidden, intermediate, "scale")[f"{name}_{suffix}"]
        tensor.view(torch.uint8).random_(generator=gen)
        found.append(torch.nn.Parameter(tensor, requires_grad=False))
    return found


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_a_tensor_is_freed_before_it_grows(
    monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture, name: str
) -> None:
    """One expert after the other is copied to the place of all."""
    parameters = parameters_of(name, "cpu", EXPERTS, 384, 256)
    wanted = widened(*(parameter.data.clone() for parameter in parameters), name == "w13", FURTHER)
    freed, experts = [StorageWeakRef(parameter.untyped_storage()) for parameter in parameters], []

    def widen(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(reference.expired() for reference in freed)
        experts.append(len(arguments[0]))
        return widened(*arguments)

    monkeypatch.setattr(pack, "widened", widen)
    with plugin_log.at_level("INFO", logger="fp8moe"):
        pack.grow("L", *parameters, name == "w13", FURTHER)
    assert f"the weights of this layer take {FURTHER} steps of K more" in plugin_log.text
    assert experts == [1] * EXPERTS
    assert further_steps(*parameters) == FURTHER
    assert all(h.same_bits(parameter.data, its) for parameter, its in zip(parameters, wanted, strict=True))


@pytest.mark.gpu
def test_growing_takes_no_memory_beside_the_result() -> None:
    parameters = parameters_of("w13", "cuda", 16, 4096, 2048)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    other = torch.cuda.memory_allocated() - sum(parameter.nbytes for parameter in parameters)
    pack.grow("L", *parameters, True, FURTHER)
    grown = sum(parameter.nbytes for parameter in parameters)
    assert torch.cuda.max_memory_allocated() - other <= grown + grown // 16
