"""The windows of a group, as far as they need no GPU."""

import pytest
import torch

from fp8moe_plugin.layers import window


def test_windows_are_found_inside_of_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(offsets: list[int], mine: int, group: object) -> None:
        offsets[:] = [256, mine]

    monkeypatch.setattr(window.dist, "all_gather_object", gather)
    memory = torch.zeros(64, dtype=torch.uint8)[32:]
    shared = [4096, memory.data_ptr() - 32]
    assert window.window_addresses(memory, shared, 1, None) == [4096 + 256, memory.data_ptr()]
