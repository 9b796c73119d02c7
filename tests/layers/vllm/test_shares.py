"""How ranks share experts and MLPs of any size: in whole scale blocks, loaded by vLLM's loader; without an engine."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.model_loader.reload import layerwise

from fp8moe_plugin.errors import CheckpointError, InvalidInputError
from fp8moe_plugin.layers.vllm import blocks
from fp8moe_plugin.layers.vllm.config import Fp8MoeConfig
from fp8moe_plugin.layers.vllm.linear import Fp8MoeLinearMethod
from fp8moe_plugin.layers.vllm.loading import check_loaded
from fp8moe_plugin.layers.vllm.moe import Fp8MoeMethod
from fp8moe_plugin.layers.weights import per_block_cast_to_fp8
from fp8moe_plugin.ops.fused_moe import fused_moe
from fp8moe_plugin.ops.gemm import dequantize_blocks
from fp8moe_plugin.shapes import GROUP, ceil_div
from tests.test_shapes import SHARES

EXPERTS, HIDDEN, TOKENS, TOPK = 3, 256, 9, 2
Checkpoint = dict[str, list[torch.Tensor]]


def make_checkpoint(intermediate: int) -> Checkpoint:
    """Of each expert, as vLLM names them: weights and scales of w1 (gate), w3 (up) and w2 (down)."""
    gen = torch.Generator().manual_seed(intermediate)
    found: Checkpoint = {}
    for name, n, k in (("w1", intermediate, HIDDEN), ("w3", intermediate, HIDDEN), ("w2", HIDDEN, intermediate)):
        # Blocks differ in magnitude, so that a scale taken for another shows.
        magnitude = torch.rand(EXPERTS, ceil_div(n, GROUP), ceil_div(k, GROUP), generator=gen) + 0.1
        spread = magnitude.repeat_interleave(GROUP, 1).repeat_interleave(GROUP, 2)[:, :n, :k]
        q, scale = per_block_cast_to_fp8(torch.randn(EXPERTS, n, k, generator=gen) * spread / k**0.5)
        found[f"{name}_weight"], found[f"{name}_weight_scale_inv"] = list(q), list(scale)
    return found


class Layer(RoutedExperts):
    """A layer of experts on one rank, with vLLM's loader, our method and no engine around it."""

    def __init__(self, intermediate: int, ranks: int, rank: int) -> None:
        torch.nn.Module.__init__(self)
        self.quant_config = self._fused_shared_expert_quantizer = None
        parallel = FusedMoEParallelConfig.make_no_parallel()
        parallel = dataclasses.replace(parallel, tp_size=ranks, tp_rank=rank)
        self.moe_config = FusedMoEConfig(
            num_experts=EXPERTS,
            experts_per_token=TOPK,
            hidden_dim=HIDDEN,
            intermediate_size=intermediate,
            num_local_experts=EXPERTS,
            num_logical_experts=EXPERTS,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=parallel,
            in_dtype=torch.bfloat16,
        )
        self.quant_method = Fp8MoeMethod(self.moe_config, False, "L", "warmup")
        part = self.moe_config.intermediate_size_per_partition
        sizes = self.quant_method.maybe_roundup_sizes(HIDDEN, part, torch.bfloat16, parallel)
        self.quant_method.create_weights(self, EXPERTS, *sizes, torch.bfloat16, weight_loader=self.weight_loader)

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert

    def load(self, checkpoint: Checkpoint) -> "Layer":
        for name, tensors in checkpoint.items():
            shard, _, kind = name.partition("_")
            param = getattr(self, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
            for i, tensor in enumerate(tensors):
                assert param.weight_loader(param, tensor, f"L.{kind}", shard_id=shard, expert_id=i, return_success=True)
        return self

    def parts(self) -> dict[str, torch.Tensor]:
        """Like a checkpoint, of this rank's channels."""
        found = {}
        for kind in ("weight", "weight_scale_inv"):
            gate_up = getattr(self, f"w13_{kind}").data
            found[f"w1_{kind}"], found[f"w3_{kind}"] = gate_up.chunk(2, 1)
            found[f"w2_{kind}"] = getattr(self, f"w2_{kind}").data
        return found


def loaded(intermediate: int, ranks: int, checkpoint: Checkpoint) -> Iterator[Layer]:
    return (Layer(intermediate, ranks, rank).load(checkpoint) for rank in range(ranks))


@pytest.mark.parametrize(("intermediate", "ranks"), [(2048, 8), (1536, 4), (256, 1)])
def test_shares_that_are_whole_blocks_are_loaded_by_vllm_alone(intermediate, ranks):
    layer = Layer(intermediate, ranks, 0)
    assert layer.w13_weight.shape == (EXPERTS, 2 * intermediate // ranks, HIDDEN)
    assert layer.w13_weight.weight_loader == layer.weight_loader


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_the_ranks_parts_are_the_checkpoint_bit_by_bit_and_zeros_after_it(intermediate, ranks, channels):
    checkpoint = make_checkpoint(intermediate)
    parts = [layer.parts() for layer in loaded(intermediate, ranks, checkpoint)]
    for name, tensors in checkpoint.items():
        dim = 2 if name.startswith("w2") else 1
        whole, assembled = torch.stack(tensors), torch.cat([part[name] for part in parts], dim)
        size = whole.shape[dim]
        assert assembled.shape[dim] == ranks * channels // (GROUP if "scale" in name else 1)
        assert torch.equal(assembled.narrow(dim, 0, size).float(), whole.float())
        assert not assembled.narrow(dim, size, assembled.shape[dim] - size).float().any()


def experts_in_float64(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[E, T, H]`: every expert of every token, on dequantized weights."""
    w1, w3, w2 = (dequantize_blocks(w[f"{n}_weight"], w[f"{n}_weight_scale_inv"]).double() for n in ("w1", "w3", "w2"))
    gate, up = x @ w1.mT, x @ w3.mT
    return (torch.nn.functional.silu(gate) * up) @ w2.mT


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_the_ranks_together_compute_what_one_does(intermediate, ranks, channels):
    checkpoint = make_checkpoint(intermediate)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = experts_in_float64(x, {name: torch.stack(tensors) for name, tensors in checkpoint.items()})
    shared = sum(experts_in_float64(x, layer.parts()) for layer in loaded(intermediate, ranks, checkpoint))
    torch.testing.assert_close(shared, whole, rtol=1e-12, atol=1e-12)


def run(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    w13 = layer.w13_weight.data, layer.w13_weight_scale_inv.data
    return fused_moe(x, *w13, layer.w2_weight.data, layer.w2_weight_scale_inv.data, weights, ids).double()


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_ranks_quantize_activations_as_one_does(intermediate, ranks, channels):
    """In the same groups: sums differ by the bfloat16 of each rank's. Other groups would differ by 0.03."""
    checkpoint = make_checkpoint(intermediate)
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=gen).bfloat16()
    weights, ids = torch.rand(TOKENS, EXPERTS, generator=gen).topk(TOPK)
    (alone,) = loaded(intermediate, 1, checkpoint)
    whole = run(alone, x, weights, ids)
    parts = [run(layer, x, weights, ids) for layer in loaded(intermediate, ranks, checkpoint)]
    assert (sum(parts) - whole).norm() < 0.005 * whole.norm()


@pytest.mark.parametrize("rank", [1, 6])
def test_vllm_reloads_a_layer_in_place(monkeypatch, rank):
    """As in reinforcement learning; rank 6 holds padding alone."""
    first, second = make_checkpoint(1536), {name: tensors[::-1] for name, tensors in make_checkpoint(1536).items()}
    monkeypatch.setattr(Fp8MoeMethod, "_make_kernel", lambda *_: None)
    layer, fresh = Layer(1536, 8, rank), Layer(1536, 8, rank).load(second)
    layerwise.record_metadata_for_reloading(layer)
    layer.load(first)
    served = dict(layer.named_parameters())
    layerwise.initialize_layerwise_reload(layer)
    assert layer.load(second).w2_weight is served["w2_weight"]  # it was complete, and put where graphs look for it
    for name, wanted in fresh.named_parameters():
        assert torch.equal(served[name].float(), wanted.float())
        assert getattr(layer, name).weight_loader.supports_moe_loading


@pytest.mark.parametrize("name", ["w1_weight", "w3_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"])
@pytest.mark.parametrize("rank", [0, 7])
def test_a_missing_tensor_is_noticed_on_ranks_of_padding_too(name, rank):
    checkpoint = make_checkpoint(1536)
    checkpoint[name].pop()
    layer = Layer(1536, 8, rank).load(checkpoint)
    shard, _, kind = name.partition("_")
    param = f"{'w2' if shard == 'w2' else 'w13'}_{kind}"
    with pytest.raises(CheckpointError, match=f"L.{param} of local expert 2: a tensor is missing"):
        check_loaded("L", param, getattr(layer, param))


@pytest.mark.parametrize("name", ["w1_weight", "w3_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"])
def test_a_tensor_of_another_size_is_refused(name):
    other = {name: make_checkpoint(768)[name]}
    with pytest.raises(
        CheckpointError, match=r"\(w. of expert 0\) has shape .*, 1536 intermediate channels make .*Check that config"
    ):
        Layer(1536, 8, 0).load(other)


@pytest.mark.parametrize(
    ("intermediate", "ranks", "line"),
    [
        (
            1536,
            8,
            r"1/8 is 256 channels instead of 192, .* 33\.3% more memory and work\. With --en.* is 0\.0%\.$",
        ),
        (
            320,
            2,
            r"1/2 is 256 channels instead of 160, .* 60\.0% more memory and work\. With --en.* is 20\.0%\.$",
        ),
        (320, 1, r"1/1 is 384 channels instead of 320, .* 20\.0% more memory and work\.$"),
    ],
)
def test_one_line_says_what_padding_costs(monkeypatch, caplog, intermediate, ranks, line):
    monkeypatch.setattr(logging.getLogger("fp8moe"), "parent", logging.getLogger())  # where caplog listens
    blocks.announce_padding.cache_clear()
    for rank in range(ranks):
        Layer(intermediate, ranks, rank)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(line, record.getMessage())


@pytest.fixture
def on_rank(monkeypatch) -> Callable[[int, int], None]:
    """Makes vLLM's dense layers those of one rank of several."""

    def set_rank(ranks: int, rank: int) -> None:
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)

    return set_rank


class Quantized(Fp8MoeConfig):
    """A checkpoint's configuration, for layers outside of a model."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Fp8MoeLinearMethod:
        return Fp8MoeLinearMethod(self.ue8m0, prefix, "warmup")


def make_mlp(intermediate: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    quantized = {"quant_config": Quantized(None, ue8m0=False), "bias": False}
    sizes = [intermediate, intermediate]
    with set_current_vllm_config(VllmConfig()):
        gate_up = linear.MergedColumnParallelLinear(HIDDEN, sizes, prefix="mlp.gate_up_proj", **quantized)
        return gate_up, linear.RowParallelLinear(intermediate, HIDDEN, prefix="mlp.down_proj", **quantized)


def load_mlp(mlp: tuple[torch.nn.Module, torch.nn.Module], checkpoint: Checkpoint) -> None:
    """Expert 0 of a checkpoint, as the MLP."""
    for kind in ("weight", "weight_scale_inv"):
        up, down = (getattr(half, kind) for half in mlp)
        up.weight_loader(up, checkpoint[f"w1_{kind}"][0], 0)
        up.weight_loader(up, checkpoint[f"w3_{kind}"][0], 1)
        down.weight_loader(down, checkpoint[f"w2_{kind}"][0])


@pytest.mark.parametrize(("intermediate", "ranks", "channels"), SHARES)
def test_the_ranks_of_an_mlp_hold_the_checkpoint_bit_by_bit_and_zeros_after_it(on_rank, intermediate, ranks, channels):
    checkpoint, parts = make_checkpoint(intermediate), {name: [] for name in make_checkpoint(128)}
    for rank in range(ranks):
        on_rank(ranks, rank)
        mlp = make_mlp(intermediate)
        for source in (make_checkpoint(intermediate), checkpoint):  # the second time it is loaded again
            load_mlp(mlp, source)
        for half, kind in itertools.product(mlp, ("weight", "weight_scale_inv")):
            check_loaded("mlp", kind, getattr(half, kind))
        assert mlp[0].output_size_per_partition == 2 * channels
        assert mlp[1].input_size_per_partition == channels
        for kind in ("weight", "weight_scale_inv"):
            gate, up = getattr(mlp[0], kind).data.chunk(2)
            for name, part in (("w1", gate), ("w3", up), ("w2", getattr(mlp[1], kind).data)):
                parts[f"{name}_{kind}"].append(part)
    for name, found in parts.items():
        dim = 1 if name.startswith("w2") else 0
        whole, assembled = checkpoint[name][0], torch.cat(found, dim)
        size = whole.shape[dim]
        assert torch.equal(assembled.narrow(dim, 0, size).float(), whole.float())
        assert not assembled.narrow(dim, size, assembled.shape[dim] - size).float().any()


def test_an_mlp_of_whole_blocks_is_loaded_by_vllm_alone(on_rank):
    on_rank(4, 1)
    for half in make_mlp(1536):
        assert half.weight.weight_loader == half.weight_loader_v2


def test_the_ranks_of_an_mlp_together_compute_what_one_does(on_rank):
    checkpoint, outputs = make_checkpoint(576), []
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    for ranks in (1, 2):
        for rank in range(ranks):
            on_rank(ranks, rank)
            gate_up, down = make_mlp(576)
            load_mlp((gate_up, down), checkpoint)
            gate, up = gate_up.quant_method.apply(gate_up, x).chunk(2, -1)
            outputs.append(down.quant_method.apply(down, torch.nn.functional.silu(gate) * up).double())
    whole, *parts = outputs
    assert (sum(parts) - whole).norm() < 0.005 * whole.norm()


@pytest.mark.parametrize("shard", [0, None])
def test_an_mlp_of_another_size_or_stored_as_one_tensor_is_refused(on_rank, shard):
    on_rank(8, 0)
    gate_up, _ = make_mlp(1536)
    other = torch.zeros(2 * 1536, HIDDEN, dtype=torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_up_proj has shape \[3072, 256\], 1536 intermediate channels"):
        gate_up.weight.weight_loader(gate_up.weight, other, shard)


def test_an_mlp_of_which_one_half_is_quantized_fails_at_its_first_step(on_rank):
    on_rank(8, 0)
    _, down = make_mlp(1536)
    with pytest.raises(InvalidInputError, match="192"):
        down.quant_method.apply(down, torch.zeros(1, 192, dtype=torch.bfloat16))
