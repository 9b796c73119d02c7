"""Both engines in one environment, which their pins rule out today: stand-ins for the parts that registration uses."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "class QuantizationConfig: pass\n"
FILES = {
    "vllm/model_executor/layers/quantization/__init__.py": """
QUANTIZATION_METHODS, CLASSES = [], {}

def register_quantization_config(name):
    def register(cls):
        QUANTIZATION_METHODS.append(name)
        CLASSES[name] = cls
        return cls
    return register
""",
    "vllm/model_executor/layers/quantization/base_config.py": BASE,
    "sglang/srt/layers/quantization/__init__.py": "QUANTIZATION_METHODS, CPU_QUANTIZATION_METHODS = {}, {}\n",
    "sglang/srt/layers/quantization/base_config.py": BASE,
    "sglang/srt/server_args.py": "CHOICES = []\nadd_quantization_method_choices = CHOICES.extend\n",
}
BOTH = """
import sys
import fp8moe_plugin

def seams():
    return {name for name in ("vllm", "sglang") if f"fp8moe_plugin.layers.{name}.entry" in sys.modules}

FIRST, SECOND = {"vllm": ("vllm", "sglang"), "sglang": ("sglang", "vllm")}[sys.argv[1]]
CALL = {"vllm": fp8moe_plugin.register, "sglang": fp8moe_plugin.register_sglang}
CALL[FIRST]()
assert seams() == {FIRST}, seams()
assert not any(name.partition(".")[0] == SECOND for name in sys.modules), f"{FIRST}'s process imports {SECOND}"
CALL[SECOND]()
from sglang.srt.layers import quantization as of_sglang
from sglang.srt.server_args import CHOICES
from vllm.model_executor.layers import quantization as of_vllm
classes = {of_vllm.CLASSES["fp8moe"], of_sglang.QUANTIZATION_METHODS["fp8moe"]}
assert {cls.__module__ for cls in classes} == {f"fp8moe_plugin.layers.{name}.entry" for name in CALL}
assert of_sglang.CPU_QUANTIZATION_METHODS == of_sglang.QUANTIZATION_METHODS
assert (of_vllm.QUANTIZATION_METHODS, CHOICES) == (["fp8moe"], ["fp8moe"])
for cls in classes:  # no checkpoint is taken over unless the user asks
    assert cls.override_quantization_method({"quant_method": "fp8"}, None) is None
"""


def test_each_engine_finds_its_own_class_and_imports_nothing_of_the_other(tmp_path: Path) -> None:
    for name, content in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        for level in file.relative_to(tmp_path).parents[:-1]:
            (tmp_path / level / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
    for first in ("vllm", "sglang"):
        done = subprocess.run([sys.executable, "-c", BOTH, first], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
