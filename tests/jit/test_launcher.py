"""What the launcher says when the driver refuses; the GPU tests run the rest."""

import pytest
from cuda.bindings import driver

from fp8moe_plugin.errors import LaunchError
from fp8moe_plugin.jit import launcher


def test_a_refusal_of_the_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (None, b"the reason"))
    with pytest.raises(LaunchError, match=r"refused the load of tiny: the reason .*nvidia-smi.*report this"):
        launcher._check(driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None, "load of tiny")
