"""Unquantized checkpoints under `--quantization fp8moe`: as they load, and converted before."""

import json

import pytest

from fp8moe_plugin.compare.cells import EAGER

FAMILIES = ("deepseek_v3", "qwen3_moe")
LOADS = [("fp8moe", "bf16"), ("fp8moe", "converted"), ("fp8", "converted")]


@pytest.fixture(scope="module")
def loaded(checkpoints, start):
    """The digest of each parameter, by what was asked for and from which checkpoint; all loaded by one process."""
    loads = [(method, f"{family}-{kind}") for family in FAMILIES for method, kind in LOADS]
    done = start("load", checkpoints, json.dumps(EAGER | {"loads": loads}))
    assert done.returncode == 0, done.stderr[-4000:]
    digests = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return dict(zip(loads, digests, strict=True))


def quantized(parameters):
    """The FP8 weights and their scales alone."""
    scales = [name for name in parameters if name.endswith("_scale_inv")]
    return {name: parameters[name] for scale in scales for name in (scale, scale.removesuffix("_scale_inv"))}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_loads_is_what_convert_writes(loaded, family):
    """Byte for byte, also of what is not quantized."""
    online, converted = loaded["fp8moe", f"{family}-bf16"], loaded["fp8moe", f"{family}-converted"]
    assert quantized(online)
    assert online == converted


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_itself_loads_what_convert_writes(loaded, family):
    own, ours = loaded["fp8", f"{family}-converted"], loaded["fp8moe", f"{family}-converted"]
    assert quantized(own) == quantized(ours)
