"""Which kernels a result was measured with: hashes of their sources, by which later changes are noticed."""

import functools
import hashlib
import re
from collections import defaultdict

from fp8moe_plugin.jit.compiler import translation_unit
from fp8moe_plugin.launches.kernel_sets import all_kernels

IGNORED = re.compile(r"//[^\n]*|/\*.*?\*/|^#line [^\n]*", re.DOTALL | re.MULTILINE)


@functools.cache
def hashes() -> dict[str, str]:
    """By the source of a kernel: the hash of what is compiled for its variants, without comments and white space."""
    texts = defaultdict(list)
    for key in all_kernels():
        texts[key.source].append(" ".join(IGNORED.sub("", translation_unit(key)).split()))
    return {source: short_hash("\0".join(sorted(units))) for source, units in sorted(texts.items())}


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def described(recorded: dict[str, str] | None) -> str:
    """Returns what the documents say about the kernels of a result."""
    if recorded is None:
        return "hash of the kernels not recorded"
    now = hashes()
    changed = sorted(source for source in recorded if recorded[source] != now.get(source))
    since = f"; kernels changed since: {', '.join(f'`{source}`' for source in changed)}" if changed else ""
    return f"kernels {short_hash(str(sorted(recorded.items())))}{since}"
