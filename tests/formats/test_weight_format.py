"""Formats are compared by identity, in each process of an engine."""

import copy
import pickle
import subprocess
import sys

import pytest

from fp8moe_plugin.formats.mxfp4 import MXFP4
from fp8moe_plugin.formats.spec import FORMATS, QuantSpec
from fp8moe_plugin.formats.weight_format import WeightFormat

UNPICKLED = """
import pickle, sys
form = pickle.load(sys.stdin.buffer)
from fp8moe_plugin.formats import mxfp4, spec
sys.exit(not any(form is known for known in (*spec.FORMATS, mxfp4.MXFP4)))
"""


@pytest.mark.parametrize("form", [*FORMATS, MXFP4], ids=lambda form: form.name)
def test_a_copy_is_the_format_itself(form: WeightFormat) -> None:
    spec = QuantSpec(form)
    for copied in (copy.copy(form), copy.deepcopy(spec).weights, pickle.loads(pickle.dumps(spec)).weights):
        assert copied is form


def test_a_new_process_unpickles_the_format_itself() -> None:
    subprocess.run([sys.executable, "-c", UNPICKLED], input=pickle.dumps(MXFP4), check=True)
