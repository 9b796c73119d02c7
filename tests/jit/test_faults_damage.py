"""Bytes that change on disk are detected, never returned, and replaced.

Full counts: 10,000 flips, truncations and exchanges of cached entries, 10,000 of a bundle's members, 10,000 flips
anywhere in a bundle.
"""

import os
import random
from pathlib import Path

import pytest

from fp8moe_plugin.jit import lookup
from fp8moe_plugin.jit.bundle import write_bundle
from fp8moe_plugin.jit.compiler import compile_kernel, entry_name, nvrtc_version
from fp8moe_plugin.jit.lookup import Origin, find_or_compile
from fp8moe_plugin.plan.keys import KernelKey
from tests import faults
from tests.jit.conftest import forget, set_variables
from tests.jit.test_bundle import rewrite

KEYS = [KernelKey("tiny", (("VALUE", value),)) for value in (3, 4, 5)]


@pytest.fixture
def cubins(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> dict[KernelKey, bytes]:
    """Real cubins; from now on, the compiler returns them without compiling."""
    compiled = {key: compile_kernel(key) for key in KEYS}
    monkeypatch.setattr(lookup, "compile_kernel", compiled.__getitem__)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no process crashes here, and fsync takes most of a round
    return {key: made.cubin for key, made in compiled.items()}


@pytest.fixture
def draw() -> random.Random:
    return faults.draw()


def flip(content: bytes, draw: random.Random) -> bytes:
    """One byte becomes another."""
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ draw.randrange(1, 256)]) + content[at + 1 :]


def damaged(contents: dict[str, bytes], draw: random.Random) -> dict[str, bytes]:
    """Flip a byte of or truncate one content, or exchange two. Returns the changed ones by name."""
    one, other = draw.sample(sorted(contents), 2)
    match draw.choice(["flip", "truncate", "exchange"]):
        case "flip":
            return {one: flip(contents[one], draw)}
        case "truncate":
            return {one: contents[one][: draw.randrange(len(contents[one]))]}
        case _:
            return {one: contents[other], other: contents[one]}


def test_a_damaged_entry_is_never_a_hit_and_is_healed_by_one_compile(
    kernels: Path, cubins: dict[KernelKey, bytes], draw: random.Random
) -> None:
    names = {entry_name(key, nvrtc_version()): key for key in KEYS}
    for key in KEYS:
        find_or_compile(key)
    entries = {name: (kernels / name).read_bytes() for name in names}
    for _ in range(faults.rounds(10_000)):
        changed = damaged(entries, draw)
        for name, content in changed.items():
            (kernels / name).write_bytes(content)
        for name, key in names.items():
            origin = Origin.COMPILER if name in changed else Origin.CACHE
            assert find_or_compile(key) == (cubins[key], origin)
        assert {name: (kernels / name).read_bytes() for name in names} == entries


def test_damaged_bundle_member_is_read_from_cache(
    cubins: dict[KernelKey, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: random.Random
) -> None:
    path = tmp_path / "b.tar"
    write_bundle(path, cubins)
    whole, names = path.read_bytes(), {entry_name(key, nvrtc_version()): key for key in KEYS}
    for key in KEYS:
        find_or_compile(key)
    set_variables(monkeypatch, FP8MOE_BUNDLE=path)
    for _ in range(faults.rounds(10_000)):
        changed = damaged({name: cubins[key] for name, key in names.items()}, draw)
        path.write_bytes(whole)
        rewrite(path, lambda name, content, changed=changed: changed.get(name, content))
        for name, key in names.items():
            assert find_or_compile(key) == (cubins[key], Origin.CACHE if name in changed else Origin.BUNDLE)


def test_whatever_byte_of_a_bundle_changes_every_kernel_is_found(
    cubins: dict[KernelKey, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draw: random.Random
) -> None:
    path = tmp_path / "b.tar"
    write_bundle(path, cubins)
    whole = path.read_bytes()
    set_variables(monkeypatch, FP8MOE_BUNDLE=path)
    for _ in range(faults.rounds(10_000)):
        path.write_bytes(flip(whole, draw))
        forget()
        assert {key: find_or_compile(key).cubin for key in KEYS} == cubins
