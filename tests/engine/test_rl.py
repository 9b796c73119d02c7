"""A trainer starts an engine with `quantization="fp8"` and random weights, and then sends weights in buckets."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8moe_plugin.compare.cells import EAGER
from tests.engine.test_reload import Host


@pytest.fixture
def host(environment_of_engines: dict[str, str]) -> Iterator[Host]:
    host = Host(environment_of_engines | {"FP8MOE_TAKE_FP8": "1"})
    yield host
    host.end()


def quantized(answer: dict[str, Any]) -> dict[str, str]:
    """Returns the digests of FP8 weights and their scales."""
    found = answer["parameters"]
    return {name: digest for name, digest in found.items() if f"{name}_scale_inv" in found or "scale" in name}


def test_buckets_of_a_trainer_arrive_as_a_checkpoint_would(checkpoints: Path, host: Host) -> None:
    unquantized, other, converted = (str(checkpoints / f"qwen3_moe-{name}") for name in ("bf16", "other", "converted"))
    blocks = json.loads(Path(converted, "config.json").read_text())["quantization_config"]
    of_trainer = {"quantization": "fp8", "load_format": "dummy", "hf_overrides": {"quantization_config": blocks}}
    dummy = host.ask({"start": unquantized, "arguments": EAGER | of_trainer})
    answers = [host.ask({"buckets": name}) for name in (other, unquantized)]
    fresh = host.ask({"start": converted, "arguments": EAGER})
    held = [quantized(answer) for answer in (dummy, *answers, fresh)]
    assert len(held[0]) == 2 * len(["qkv_proj", "o_proj", "w13", "w2"])
    assert held[2] == held[3]
    assert held[0] != held[1] != held[2]
