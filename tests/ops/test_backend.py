from types import SimpleNamespace

import pytest
import torch

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.ops import devices


def test_the_reference_refuses_to_be_captured(monkeypatch):
    monkeypatch.setattr(devices, "_gpu", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="--enforce-eager"):
        devices.device_of(SimpleNamespace(device=torch.device("cuda", 0), is_cuda=True))
