"""SGLang without an engine. Where there is no Hopper GPU it runs on the CPU, with stubs for what has no build for it
(tests/engine/sglang)."""

import importlib.util
import os
import sys

from tests.conftest import has_hopper
from tests.engine.sglang.conftest import STUBS

if importlib.util.find_spec("sglang") and not has_hopper():  # before anything imports it
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.insert(0, str(STUBS))
