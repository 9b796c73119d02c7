"""Time how a layer of experts in MXFP4 is loaded from a file in memory, in turns, with vLLM's loader of experts.

    python -m benchmarks.engine.load_mxfp4 --out benchmarks/results/load_mxfp4-<date>.json

- `copies`: one `copy_` for each tensor, without a loader of vLLM
- `vllm`: vLLM's loader with parameters as its own method for MXFP4 has them, before its kernels rearrange them
- `packed`: vLLM's loader with our method, which packs the experts and checks them

By default the layer has the shape of DeepSeek-V4-Flash's. On a CPU, a small shape such as `--hidden 256 --intermediate
128` shows what Python and torch's dispatch cost. `extra_mib` is GPU memory that is held at most while loading, beyond
the layer.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.report import write_report
from fp8moe_plugin.bench.packed import random_mxfp4
from fp8moe_plugin.bench.peers import set_up_vllm, vllm_layer
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.mxfp4 import MXFP4, PACKED_MXFP4
from fp8moe_plugin.formats.spec import QuantSpec
from fp8moe_plugin.layers.parameters import expert_tensors
from warmup.report import installed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = "weight_scale"

Load = Callable[[Path], None]


def write_checkpoint(path: Path, experts: Experts) -> None:
    """Write codes and exponents of each projection, named as vLLM's DeepSeek-V4 names them."""
    (w13, w13_exponents), (w2, w2_exponents), _ = random_mxfp4(experts, DEVICE)
    found = {}
    for kind, gate_up, down in (("weight", w13, w2), (SCALE, w13_exponents, w2_exponents)):
        gate, up = gate_up.cpu().chunk(2, 1)
        for shard, tensors in (("w1", gate), ("w2", down.cpu()), ("w3", up)):
            own = tensors if kind == "weight" else tensors.view(torch.float8_e8m0fnu)
            found |= {f"experts.{expert}.{shard}.{kind}": tensor for expert, tensor in enumerate(own.contiguous())}
    save_file(found, path)


def tensors_of(path: Path) -> Iterator[tuple[str, str, int, torch.Tensor]]:
    """Yields parameter, shard, expert and tensor, in the order in which vLLM reads a file."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dictionary)
            _, expert, shard, kind = name.split(".")
            # vLLM's DeepSeek-V4 passes the bits of exponents, too.
            tensor = file.get_tensor(name).view(torch.uint8)
            yield f"{'w2' if shard == 'w2' else 'w13'}_{kind}", shard, int(expert), tensor


def copies(experts: Experts) -> Load:
    parameters = plain_parameters(experts)

    def load(path: Path) -> None:
        for name, shard, expert, tensor in tensors_of(path):
            own = parameters[name][expert]
            own = own if shard == "w2" else own.chunk(2)[shard == "w3"]
            own.copy_(tensor)

    return load


def by_vllm(experts: Experts) -> Load:
    layer = empty_layer(experts)
    layer.quant_method = SimpleNamespace()
    for name, tensor in plain_parameters(experts).items():
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        parameter.quant_method = "block"
        parameter.weight_loader = layer.weight_loader
        layer.register_parameter(name, parameter)
    return lambda path: load_layer(layer, path)


def packed(experts: Experts) -> Load:
    from fp8moe_plugin.layers.vllm.model_state import ModelState
    from fp8moe_plugin.layers.vllm.pack import PackedMoeMethod

    layer, quant = empty_layer(experts), QuantSpec(PACKED_MXFP4, recoded_from=MXFP4)
    layer.quant_method = PackedMoeMethod(layer.moe_config, quant, "experts", "warmup", ModelState())
    with DEVICE:
        layer.quant_method.create_weights(
            layer,
            experts.experts,
            experts.hidden,
            experts.intermediate,
            torch.bfloat16,
            weight_loader=layer.weight_loader,
        )

    def load(path: Path) -> None:
        load_layer(layer, path)
        layer.quant_method.loading.finish(layer)

    return load


WAYS = {"copies": copies, "vllm": by_vllm, "packed": packed}


def plain_parameters(experts: Experts) -> dict[str, torch.Tensor]:
    """Returns uint8 tensors for codes and exponents, as in the checkpoint."""
    with DEVICE:
        tensors = expert_tensors(MXFP4, experts.experts, experts.hidden, experts.intermediate, SCALE)
    return {name: tensor.view(torch.uint8) for name, tensor in tensors.items()}


def empty_layer(experts: Experts) -> Any:
    """Returns vLLM's layer of experts without parameters, and with all experts on this rank."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    class Layer(RoutedExperts):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.quant_config = self._fused_shared_expert_quantizer = None
            self.local_num_experts = experts.experts
            self.moe_config = vllm_layer(experts, tokens=1)

        def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
            return expert_id

    return Layer()


def load_layer(layer: Any, path: Path) -> None:
    for name, shard, expert, tensor in tensors_of(path):
        parameter = getattr(layer, name)
        assert parameter.weight_loader(
            parameter, tensor, f"experts.{name}", shard_id=shard, expert_id=expert, return_success=True
        )


def seconds_and_memory(load: Load, path: Path) -> tuple[float, int]:
    """Returns the seconds of a load, and the bytes of GPU memory that it took at most beyond what was allocated."""
    before = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    load(path)
    if not torch.cuda.is_available():
        return time.perf_counter() - start, 0
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before


def measure(experts: Experts, folder: Path, ways: list[str], rounds: int) -> list[dict[str, Any]]:
    path = folder / "layer.safetensors"
    write_checkpoint(path, experts)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            found[name].append(seconds_and_memory(WAYS[name](experts), path))
    rows = []
    for name, results in found.items():
        times, extra = zip(*results, strict=True)
        row = {"way": name, "s": round(min(times), 4), "median_s": round(statistics.median(times), 4)}
        rows.append(row | {"extra_mib": round(max(extra) / 2**20, 1)})
        print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    experts = Experts(1, options.experts, 1, options.hidden, options.intermediate)
    with set_up_vllm(), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rows = measure(experts, Path(folder), options.ways, options.rounds)
    shape = {"experts": experts.experts, "hidden": experts.hidden, "intermediate": experts.intermediate}
    write_report(options.out, {"vllm": installed("vllm"), "shape": shape, "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
