"""The integration with SGLang: `--quantization fp8moe`."""

from fp8moe_plugin.layers.registration import register_safely
from fp8moe_plugin.settings import NAME


def register_quantization() -> None:
    """Register `--quantization fp8moe` with SGLang, if SGLang is installed.

    Called in every SGLang process, possibly more than once. It imports only modules that all of them import anyway and
    touches no GPU. It never raises.
    """
    register_safely("SGLang", "sglang", _register)


def _register() -> None:
    from sglang.srt.layers.quantization import CPU_QUANTIZATION_METHODS, QUANTIZATION_METHODS
    from sglang.srt.server_args import add_quantization_method_choices

    if NAME in QUANTIZATION_METHODS:
        return
    from fp8moe_plugin.layers.sglang.entry import Entry

    others = dict(QUANTIZATION_METHODS)
    QUANTIZATION_METHODS.clear()  # SGLang asks them in order, and its own for ModelOpt disregards what the user chose
    QUANTIZATION_METHODS.update({NAME: Entry} | others)
    CPU_QUANTIZATION_METHODS[NAME] = Entry  # the only ones on a CPU with AMX
    add_quantization_method_choices([NAME])  # of the command line
