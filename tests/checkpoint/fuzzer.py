"""Damage descriptions of checkpoints in many ways, and read each: `python -m tests.checkpoint.fuzzer FIRST COUNT DIR`.

One or more DIRs each hold a small complete checkpoint. The number of a case determines checkpoint and damage; the
first is FIRST. It runs in its own process, because it measures its memory, and prints the results as JSON.
"""

import copy
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8moe_plugin.checkpoint.headers import INDEX_NAME
from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from tests.checkpoint.published import PATHS

SHARD = "model-00001.safetensors"
BOMBS = 1000  # one case in this many is as large as the limits allow

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 127, 128, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308,
    "", "fp8", "F32", "F8_E4M3", "../x.safetensors", "\0", "\x1b[2J", "\ud800", "\u202e", "x" * 5000,
    [], {}, [[]], [0], [1, 2], [128, 128], [None], {"a": 1}, [0] * 5000, [1] * 9, {"text_config": {}},
]  # fmt: skip
TOKENS = [
    b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800", b"\\u001b", b"\xff", b"\xed\xa0\x80",
    b"\xef\xbb\xbf", b"\0", b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"0", b"9" * 30, b"9" * 5000, b"null",
    b"true", b"..", b"/", b"\n", b"[" * 3000, b'{"a":' * 3000, b" " * 5000,
]  # fmt: skip
REPEATED = [b"[],", b"{},", b'{"":0},', b"0,", b'"",', b"[", b'{"a":', b" ", b"9", b"\\u0041", b"\xf0\x9f\x98\x80"]


def flip(text: bytes, rng: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text))]


def splice(text: bytes, rng: random.Random) -> bytes:
    """Returns the bytes with a piece removed, doubled or moved."""
    a, b = sorted(rng.choices(range(len(text) + 1), k=2))
    at = rng.randrange(len(text) + 1)
    return rng.choice((text[:a] + text[b:], text[:b] + text[a:], text[:at] + text[a:b] + text[at:]))


def insert(text: bytes, rng: random.Random) -> bytes:
    at, token = rng.randrange(len(text) + 1), rng.choice(TOKENS)
    return text[:at] + token + text[at + rng.choice((0, len(token))) :]


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Each list or object in a JSON value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [node for key in keys for node in nodes(value[key])]


def restructure(text: bytes, rng: random.Random) -> bytes:
    """Valid JSON with a few keys removed, renamed or doubled, or values replaced."""
    value = json.loads(text)
    doubled = None
    for _ in range(rng.choice((1, 1, 2, 4))):
        found = nodes(value)
        if not found:
            break
        parent, key = rng.choice(found[:60] if rng.random() < 0.5 else found)
        match rng.randrange(6):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[rng.choice([key for _, key in found if isinstance(key, str)])] = parent.pop(key)
            case 2 if isinstance(parent, dict):
                doubled = json.dumps(key).encode()
            case 3:
                other, name = rng.choice(found)
                parent[key] = copy.deepcopy(other[name])
            case _:
                parent[key] = copy.deepcopy(rng.choice(VALUES))
    changed = json.dumps(value).encode()
    return changed.replace(doubled + b":", doubled + b": 0, " + doubled + b":", 1) if doubled else changed


def bomb(text: bytes, rng: random.Random) -> bytes:
    at, piece = rng.randrange(len(text) + 1), rng.choice(REPEATED)
    size = rng.choice((1 << 20, 4 << 20, 16 << 20, 33 << 20))
    return text[:at] + piece * (size // len(piece)) + text[at:]


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [flip, cut, splice, insert, restructure, restructure]


def write_case(number: int, folder: Path, sound: dict[str, bytes], configs: list[bytes], weights: int) -> None:
    """One damaged checkpoint: the config.json of a published one, or any file of the small one."""
    rng, texts = random.Random(number), dict(sound)
    if rng.random() < 0.4:
        texts = {"config.json": rng.choice(configs)}
    name = rng.choice(list(texts))
    mutate = bomb if number % BOMBS == 0 else rng.choice(MUTATIONS)
    texts[name] = mutate(texts[name], rng)
    for old in folder.iterdir():
        old.unlink()
    for name, text in texts.items():
        if name == SHARD:
            write_shard(rng, folder / name, text, weights)
        else:
            (folder / name).write_bytes(text)


def write_shard(rng: random.Random, path: Path, header: bytes, weights: int) -> None:
    """A file with this header and a hole as large as the weights; sometimes with another length or size."""
    length, size = len(header), weights
    if rng.random() < 0.1:
        length = rng.choice((0, 1, length + 1, length // 2, 2**24 + 1, 2**64 - 1))
    if rng.random() < 0.1:
        size = rng.choice((0, weights - 1, weights + 1))
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def read(folder: Path) -> str:
    """Returns the outcome: a valid model, one of our two errors with a short harmless message, or else a fault."""
    try:
        model = read_model(folder)
    except (CheckpointError, UnsupportedError) as error:
        message = str(error)
        assert message.isprintable(), message[:2000]
        assert len(message) < 1000, message[:2000]
        return type(error).__name__
    assert type(model) is Model
    assert model.experts.layers + (model.plain_experts.layers if model.plain_experts else 0) > 0
    return "Model"


def peak_mib() -> float:
    # Not getrusage: its ru_maxrss starts at the peak of the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def sound_files(source: Path) -> tuple[dict[str, bytes], int]:
    """Returns the files of a checkpoint, of its weights only their header, and the size of the weights."""
    assert read(source) == "Model"
    with (source / SHARD).open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    weights = (source / SHARD).stat().st_size - 8 - len(header)
    return {name: (source / name).read_bytes() for name in ("config.json", INDEX_NAME)} | {SHARD: header}, weights


def main(first: int, count: int, *sources: Path) -> dict[str, Any]:
    checkpoints = [sound_files(source) for source in sources]
    configs = [path.read_bytes() for path in PATHS.values()]
    outcomes, slowest, before = Counter[str](), 0.0, peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            sound, weights = checkpoints[number % len(checkpoints)]
            write_case(number, Path(folder), sound, configs, weights)
            start = time.process_time()
            try:
                outcomes[read(Path(folder))] += 1
            except BaseException:  # noqa: BLE001 - of whatever came out
                return {"case": number, "fault": traceback.format_exc()[-3000:]}
            slowest = max(slowest, time.process_time() - start)
    return {"outcomes": outcomes, "slowest_s": slowest, "growth_mib": peak_mib() - before}


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:3]), *map(Path, sys.argv[3:]))))
