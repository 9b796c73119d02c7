"""The largest descriptions within the limits, and the worst just beyond them, take bounded time and memory."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.config_fields import MAX_LAYERS
from fp8moe_plugin.checkpoint.config_json import LIMITS as CONFIG
from fp8moe_plugin.checkpoint.headers import HEADER, INDEX, INDEX_NAME
from fp8moe_plugin.formats.patterns import MAX_PATTERNS

V3 = json.loads((Path(__file__).parent / "configs" / "DeepSeek-V3.json").read_text())
SHARD = "model.safetensors"

# The kernel's count of this process's peak; ru_maxrss would start at the peak of the parent.
READ = """
import sys, time
from pathlib import Path
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.errors import CheckpointError, UnsupportedError

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

before, start = peak(), time.process_time()
try:
    found = read_model(Path(sys.argv[1])).architecture
except (CheckpointError, UnsupportedError) as error:
    found = str(error)
print(time.process_time() - start, peak() - before, found)
"""


def read(folder: Path) -> tuple[float, float, str]:
    """Seconds, MiB, and the outcome."""
    done = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seconds, mib, found = done.stdout.split(maxsplit=2)
    return float(seconds), float(mib), found


def filled(head: bytes, piece: bytes, tail: bytes, size: int, count: int = 2**31) -> bytes:
    """`size` bytes of as many pieces as fit and are allowed."""
    count = min(count, (size - len(head) - len(tail)) // len(piece))
    text = head + piece * count + tail
    return text + b" " * (size - len(text))


def keyed(head: str, count: int, tail: str) -> bytes:
    return (head + ",".join(f'"{i:x}":1.5' for i in range(count)) + tail).encode()


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "nested lists": ("config.json", lambda: filled(b"[", b"[", b"", CONFIG.size, CONFIG.containers - 1)),
    "digits": ("config.json", lambda: filled(b'{"a":', b"1", b"}", CONFIG.size)),
    "keys": ("config.json", lambda: keyed("{", CONFIG.values, "}")),
    "wide characters": ("config.json", lambda: filled('{"a":"\U0001f600'.encode(), b"a", b'"}', CONFIG.size)),
    "empty lists": (INDEX_NAME, lambda: filled(b"[", b"[],", b"[]]", INDEX.size)),
    "one string": (INDEX_NAME, lambda: filled(b'{"weight_map":"', b"a", b'"}', INDEX.size)),
    "wide one": (INDEX_NAME, lambda: filled('{"weight_map":"\U0001f600'.encode(), b"a", b'"}', INDEX.size)),
    "surrogates": (INDEX_NAME, lambda: filled(b'{"weight_map":"', b"\\ud83d\\ude00", b'"}', INDEX.size)),
    "long keys": (INDEX_NAME, lambda: json.dumps({f"{i:0150}": "a" for i in range(INDEX.values)}).encode()),
    "small objects": (SHARD, lambda: filled(b'{"a":[', b'{"":0},', b"1]}", HEADER.size, HEADER.containers - 2)),
    "small lists": (SHARD, lambda: filled(b'{"a":[', b"[1.5],", b"1]}", HEADER.size, HEADER.containers - 2)),
    "floats": (SHARD, lambda: filled(b'{"a":[', b"1.5,", b"1]}", HEADER.size, HEADER.values)),
    "names": (SHARD, lambda: keyed("{", HEADER.values, "}")),
    "wide header": (SHARD, lambda: filled('{"a":"\U0001f600'.encode(), b"a", b'"}', HEADER.size)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs(tmp_path, bomb):
    name, make = BOMBS[bomb]
    text = make()
    (tmp_path / "config.json").write_text(json.dumps(V3))
    prefix = len(text).to_bytes(8, "little") if name == SHARD else b""
    (tmp_path / name).write_bytes(prefix + text)
    seconds, mib, found = read(tmp_path)
    assert name in found
    assert seconds < 1
    assert mib < 200


def test_names_of_unquantized_layers_take_no_time_for_each_layer(tmp_path):
    names = [f"model.layers.{i % 8192}.mlp.shared_experts.x{i}" for i in range(80_000)]
    assert read_deepest(tmp_path, names) == "DeepseekV3ForCausalLM"


def test_patterns_of_unquantized_layers_take_bounded_time(tmp_path):
    names = [f"re:.*x.*y{i}$" for i in range(MAX_PATTERNS)]
    assert read_deepest(tmp_path, names, seconds=6) == "DeepseekV3ForCausalLM"
    assert "more than 512" in read_deepest(tmp_path, [*names, "re:a"])


@pytest.mark.parametrize("pattern", ["re:" + "a" * 4_000_000, "re:(.*.*)*_norm_$", "re:" + "a?" * 30 + "a" * 30])
def test_patterns_without_bound_are_refused_at_once(tmp_path, pattern):
    assert re.search("has the pattern|patterns that may take long", read_deepest(tmp_path, [pattern]))


def read_deepest(folder: Path, names: list[str], seconds: float = 1) -> str:
    """Returns the outcome for a model of the most layers whose list of unquantized layers is `names`."""
    quantization = V3["quantization_config"] | {"modules_to_not_convert": names}
    layers = {"num_hidden_layers": MAX_LAYERS, "num_nextn_predict_layers": MAX_LAYERS}
    (folder / "config.json").write_text(json.dumps(V3 | layers | {"quantization_config": quantization}))
    taken, mib, found = read(folder)
    assert taken < seconds
    assert mib < 200
    return found.strip()


def test_the_checkpoint_of_the_most_tensors(tmp_path):
    """As large as Kimi-K2's: 60 layers of 384 experts, in an index of 14 MB and headers of 18 MB."""
    config = V3 | {"n_routed_experts": 384, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for layer in range(1, 61):
        header, end = {}, 0
        for expert in range(384):
            for name, shape in (("gate_proj", (2048, 7168)), ("up_proj", (2048, 7168)), ("down_proj", (7168, 2048))):
                weight = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                for tensor, dtype, size, sides in (
                    (weight, "F8_E4M3", 1, shape),
                    (f"{weight}_scale_inv", "F32", 4, (shape[0] // 128, shape[1] // 128)),
                ):
                    begin, end = end, end + math.prod(sides) * size
                    header[tensor] = {"dtype": dtype, "shape": sides, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        shard = f"model-{layer:05}-of-000061.safetensors"
        with (tmp_path / shard).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        weight_map |= dict.fromkeys(header, shard)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    seconds, mib, found = read(tmp_path)
    assert found.strip() == "DeepseekV3ForCausalLM"
    assert seconds < 1
    assert mib < 200
