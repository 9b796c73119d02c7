"""A manifest that contradicts the archive, this GPU or itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8moe_plugin.errors import CacheError
from fp8moe_plugin.jit import bundle
from fp8moe_plugin.jit.cache import Missing
from fp8moe_plugin.jit.compiler import compile_kernel
from fp8moe_plugin.plan.keys import KernelKey
from tests.jit.test_bundle import rewrite

KEY = KernelKey("tiny", (("VALUE", 3),))


@pytest.fixture
def path(kernels: Path, tmp_path: Path) -> Path:
    bundle.write_bundle(tmp_path / "out.tar", {KEY: compile_kernel(KEY).cubin})
    return tmp_path / "out.tar"


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    def changed(name: str, content: bytes) -> bytes:
        if name != bundle.MANIFEST:
            return content
        manifest = json.loads(content)
        change(manifest)
        return json.dumps(manifest, ensure_ascii=False).encode()

    rewrite(path, changed)


@pytest.mark.parametrize(("arch", "printed"), [("sm_100a", "sm_100a"), ("", ""), ("\x7f", r"'\\x7f'")])
def test_a_bundle_for_a_gpu_that_is_not_served_is_refused(path: Path, arch: str, printed: str) -> None:
    change_manifest(path, lambda manifest: manifest.update(arch=arch))
    with pytest.raises(
        CacheError, match=rf"out\.tar contains kernels for '?{printed}'?, which are not served: create it again"
    ):
        bundle.read_bundle(path)


def test_a_bundle_for_another_gpu_that_is_served_lacks_the_kernel(path: Path) -> None:
    change_manifest(path, lambda manifest: manifest.update(arch="sm_89"))
    with pytest.raises(Missing, match=r"out\.tar contains kernels for sm_89, not for sm_90a: create it again"):
        bundle.read_bundle(path).cubin(KernelKey("tiny"))


def test_an_entry_that_is_listed_twice_is_refused(path: Path) -> None:
    change_manifest(path, lambda manifest: manifest["kernels"].append(manifest["kernels"][0] | {"bytes": 1}))
    with pytest.raises(CacheError, match=r"out\.tar is not a bundle, or it is damaged: create it again"):
        bundle.read_bundle(path)


@pytest.mark.parametrize("size", [-1, 0, 1, 1 << 40])
def test_a_wrong_size_is_damage(path: Path, size: int) -> None:
    change_manifest(path, lambda manifest: manifest["kernels"][0].update(bytes=size))
    with pytest.raises(Missing, match=r"out\.tar is damaged: the size of tiny-\w+\.cubin differs$"):
        bundle.read_bundle(path).cubin(KEY)
