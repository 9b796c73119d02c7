"""A model of two kinds of layers, started and then loaded again in the ways of vLLM, without an engine."""

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.model_loader.reload import layerwise

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.spec import ONLINE
from fp8moe_plugin.layers.vllm.config import scale_names
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from tests.helpers import same_bits
from tests.layers.experts import Checkpoint, make_checkpoint, make_mxfp4, make_unquantized, recoded
from tests.layers.vllm.one_rank import FP8, PACKED, RECODED, Layer, make_mlp

INTERMEDIATE = 256
RESTART = "The failed reload left a mixture .* Restart the engine in a new process"
QUANT = {"fp8": FP8, "online": ONLINE, "mxfp4": RECODED, "packed": PACKED}
KINDS = tuple(QUANT)
MLP = {"w1": ("gate_up", [0]), "w3": ("gate_up", [1]), "w2": ("down", [])}

Tensors = Iterable[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    """Experts and an MLP, filled and prepared as by vLLM's loader, and a norm that is not ours."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.experts = Layer(INTERMEDIATE, 1, 0, QUANT[kind])
        self.gate_up, self.down = make_mlp(INTERMEDIATE, kind == "online")
        self.state = self.experts.quant_method.loading.model
        self.state.scales = scale_names(QUANT[kind])
        for layer in self.layers():  # layers of one model share its state
            layer.quant_method.loading.model = self.state
        self.lacking: tuple[str, ...] = ()  # layers for which the next checkpoints have no tensors
        self.state.watch(self)
        layerwise.record_metadata_for_reloading(self)

    def layers(self) -> tuple[torch.nn.Module, ...]:
        return self.experts, self.gate_up, self.down

    def start(self, checkpoint: Checkpoint) -> "Model":
        self.load(checkpoint)
        for layer in self.layers():
            layer.quant_method.process_weights_after_loading(layer)
        return self

    def load_weights(self, weights: Tensors) -> None:
        for name, tensor in weights:
            layer, _, rest = name.partition(".")
            if layer == "norm":
                parameter = getattr(self.norm, rest)
                getattr(parameter, "weight_loader", lambda own, new: own.data.copy_(new))(parameter, tensor)
                continue
            shard, expert, kind = rest.split(".")
            if layer == "experts":
                parameter = getattr(self.experts, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
                named = {"shard_id": shard, "expert_id": int(expert), "return_success": True}
                assert parameter.weight_loader(parameter, tensor, f"L.{kind}", **named)
            else:
                own, part = MLP[shard]
                parameter = getattr(getattr(self, own), kind)
                parameter.weight_loader(parameter, tensor, *part)

    def tensors(self, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
        """By names, those of the norm first, then those of the experts. The MLP has the weights of the first expert."""
        if checkpoint:
            yield from (("norm.weight", torch.ones(8)), ("norm.bias", torch.zeros(8)))
        names = [(name.partition("_"), tensors) for name, tensors in checkpoint.items()]
        for (shard, _, kind), tensors in names:
            there = () if "experts" in self.lacking else enumerate(tensors)
            yield from ((f"experts.{shard}.{i}.{kind}", tensor) for i, tensor in there if tensor is not None)
        for name, tensor in as_mlp(checkpoint).items():
            shard, _, kind = name.partition("_")
            if MLP[shard][0] not in self.lacking:
                yield f"mlp.{shard}.0.{kind}", tensor

    def load(self, checkpoint: Checkpoint) -> None:
        self.load_weights(self.tensors(checkpoint))

    def reload(self, checkpoint: Checkpoint) -> None:
        self.reload_weights(self.tensors(checkpoint))

    def reload_weights(self, weights: Tensors) -> None:
        layerwise.initialize_layerwise_reload(self)
        self.load_weights(weights)
        layerwise.finalize_layerwise_reload(self, None)

    def step(self) -> None:
        """What the plugin does before a step."""
        self.state.prepare_step()


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, on_rank: Callable[[int, int], None]) -> None:
    """One rank, without the modular kernel, which needs an engine; its configuration shows which scales it reads."""
    monkeypatch.setattr(Fp8MoeMethod, "_make_kernel", lambda *_: SimpleNamespace())
    on_rank(1, 0)


MAKE = {"fp8": make_checkpoint, "online": make_unquantized, "mxfp4": make_mxfp4, "packed": make_mxfp4}


def first(kind: str) -> Checkpoint:
    return MAKE[kind](INTERMEDIATE)


def as_mlp(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Returns the tensors of the first expert as those of an MLP, which is not in MXFP4."""
    first_expert = {name: tensors[:1] for name, tensors in checkpoint.items()}
    found = {name: tensors[0] for name, tensors in recoded(first_expert).items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def second(kind: str) -> Checkpoint:
    """Other weights with other scales, because blocks differ in magnitude."""
    return {name: [tensor.roll(1, 0) for tensor in tensors[::-1]] for name, tensors in first(kind).items()}


def equal(model: Model, other: Model) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(same_bits(mine.data, its.data) for mine, its in pairs)


def assert_out_of_service(model: Model, kind: str, why: str) -> None:
    """Check that every later use of the model raises."""
    for use in (model.reload, model.load):
        with pytest.raises(CheckpointError, match=f"{why}.*{RESTART}"):
            use(first(kind))
    with pytest.raises(CheckpointError, match=f"{why}.*{RESTART}"):
        model.step()
    with pytest.raises(CheckpointError, match=f"{why}.*{RESTART}"):
        model.experts.quant_method.apply(model.experts, *[None] * 5)
