"""A trainer starts an engine with `quantization="fp8"` and random weights, and then sends weights in buckets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_reload import ARGUMENTS, FAST, Host

ON_GPU = torch.cuda.is_available()
MODE = ARGUMENTS[FAST if ON_GPU else "eager"]


@pytest.fixture
def host(environment_of_engines: dict[str, str]) -> Iterator[Host]:
    host = Host(environment_of_engines | {"FP8MOE_TAKE_FP8": "1"})
    yield host
    host.end()


def quantized(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the digests of FP8 weights and their scales."""
    found = answer["parameters"]
    return {name: digest for name, digest in found.items() if f"{name}_scale_inv" in found or "scale" in name}


def test_buckets_of_a_trainer_arrive_as_a_checkpoint_would(checkpoints: Path, host: Host) -> None:
    unquantized, other, converted = (str(checkpoints / f"qwen3_moe-{name}") for name in ("bf16", "other", "converted"))
    blocks = json.loads(Path(converted, "config.json").read_text())["quantization_config"]
    of_trainer = {"quantization": "fp8", "load_format": "dummy", "hf_overrides": {"quantization_config": blocks}}
    dummy = host.ask({"start": unquantized, "arguments": MODE | of_trainer})
    updated = [host.ask({"buckets": name}) for name in (other, unquantized)]
    host.renew()
    fresh = host.ask({"start": converted, "arguments": MODE})
    assert len(quantized(dummy)) == 2 * len(["qkv_proj", "o_proj", "w13", "w2"])
    # On a GPU a trainer sends all weights, so what engines say is the same, too.
    first, before, after, wanted = (dummy, *updated, fresh) if ON_GPU else map(quantized, (dummy, *updated, fresh))
    assert after == wanted
    assert first != before != after
