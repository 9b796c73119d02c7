"""gpt-oss under SGLang; see `layers/gpt_oss.py`. SGLang cuts the result back to the width of the tokens."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import set_weight_attrs

from fp8moe_plugin.checkpoint.gpt_oss import ACTIVATION
from fp8moe_plugin.checkpoint.shapes import padded_hidden
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import SILU, Activation
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import WEIGHT
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.blocks import announce_padding
from fp8moe_plugin.layers.gpt_oss import copy_part, share_of, split
from fp8moe_plugin.layers.loading import as_kept, check_expert_shape, checked_bias
from fp8moe_plugin.layers.pack import Share, pack
from fp8moe_plugin.layers.parameters import bias_tensors, expert_tensors, is_bias, marked, role_of, unset
from fp8moe_plugin.layers.recode import block_fp8, targets
from fp8moe_plugin.layers.sglang import compat
from fp8moe_plugin.layers.sglang.moe import Fp8MoeMethod
from fp8moe_plugin.layers.sglang.refusals import check_experts

SCALE = "weight_scale"  # suffixes of the names of parameters in SGLang's model
BIASES = {"w13_bias": "w13_weight_bias", "w2_bias": "w2_weight_bias"}


class GptOssMethod(Fp8MoeMethod):
    """The experts of gpt-oss, in either form."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = SCALE
        weights = (f"{name}_{suffix}" for name in ("w13", "w2") for suffix in (WEIGHT, SCALE))
        self.parameters = (*weights, *BIASES.values())

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: MethodType,
        with_bias: bool = False,
        **_: Any,
    ) -> None:
        if not with_bias:
            raise UnsupportedError(
                f"{self.prefix}: quant_method 'mxfp4' is only supported for gpt-oss. Remove --quantization to let the "
                "engine choose the method."
            )
        args = get_server_args()
        if args.enable_eplb or args.ep_num_redundant_experts:
            raise UnsupportedError(f"{self.prefix}: gpt-oss is not supported with EPLB. Remove its options.")
        ranks, hidden = layer.moe_tp_size, padded_hidden(hidden_size)
        intermediate = intermediate_size_per_partition * ranks
        check_experts(self.prefix, num_experts, hidden, intermediate, ranks)
        width, share = share_of(intermediate, ranks, layer.moe_tp_rank)
        if share.intermediate * ranks != intermediate:
            announce_padding("expert", intermediate, ranks, "--ep-size")
        quant, sizes = self.quant_config.spec, (num_experts, hidden, share.intermediate)
        load = _loader(self, hidden_size, width, share)
        tensors = expert_tensors(quant.weights, *sizes, SCALE)
        tensors |= {BIASES[name]: bias for name, bias in bias_tensors(*sizes).items()}
        for name, tensor in tensors.items():
            parameter = torch.nn.Parameter(unset(tensor), requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": MethodType(_of_all_experts(load, name), layer)})
            if not is_bias(tensor):
                marked(parameter, quant.weights, role_of(tensor), quant.recoded_from)
            layer.register_parameter(name, parameter)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        config = moe_runner_config
        found = Activation("swigluoai_uninterleave", config.gemm1_clamp_limit, config.gemm1_alpha or 1.0, 1.0)
        if config.activation != SILU.kind or found != ACTIVATION:
            raise UnsupportedError(
                f"{self.prefix}: gpt-oss is only supported with alpha {ACTIVATION.alpha} and limit "
                f"{ACTIVATION.limit:g}, but the model has {config.gemm1_alpha} and {config.gemm1_clamp_limit}. Use "
                "SGLang's own method."
            )
        moe_runner_config.inplace = False
        self.config = moe_runner_config

    @property
    def activation(self) -> Activation:
        return ACTIVATION

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        x = dispatch_output.hidden_states
        padding = padded_hidden(x.shape[-1]) - x.shape[-1]
        return super().apply(layer, dispatch_output._replace(hidden_states=torch.nn.functional.pad(x, (0, padding))))


def _of_all_experts(load: Callable[..., None], name: str) -> Callable[..., None]:
    """Returns a loader for the tensor of a parameter for all experts of a rank; `load`: that for one expert."""

    def load_all(
        layer: Any,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None = None,
        expert_id: int | None = None,
    ) -> None:
        for expert, shard, tensor in split(weight_name, name, loaded_weight, layer.num_local_experts):
            load(layer, param, tensor, weight_name, shard, layer.moe_ep_rank * len(loaded_weight) + expert)

    return load_all


def _loader(method: GptOssMethod, hidden: int, width: int, share: Share) -> Callable[..., None]:
    """Returns a loader for w1, w2 and w3 of an expert: codes, exponents or a bias.

    The second of codes and exponents to arrive brings both in block FP8, or packs them. It raises `CheckpointError` for
    a tensor of another dtype or shape.
    """
    loads, quant = method.quant_config.loads, method.quant_config.spec

    def check_and_load(
        layer: Any, param: torch.Tensor, tensor: torch.Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        projection = f"{method.prefix} ({shard_id} of expert {expert_id})"
        what = f"{weight_name} ({shard_id} of expert {expert_id})"
        slots = compat.local_slots(layer, expert_id)
        if is_bias(param):
            bias = checked_bias(what, param, tensor, hidden if shard_id == "w2" else width)
            for slot in slots:
                copy_part(param.data[slot], shard_id, bias)
            loads.note(method, layer, f"{projection}, bias", *Role)
            return
        loads.check_tensor(what, param, tensor)
        tensor = as_kept(param, tensor)
        check_expert_shape(what, param, tensor, shard_id, hidden, width)
        if both := loads.halves.add(projection, role_of(param), tensor.view(torch.uint8), param.device):
            own = [parameter for parameter, _ in targets(layer, shard_id, weight_name, SCALE)]
            if quant.weights is PACKED_MXFP4:
                pack(projection, (own[0], own[1]), slots, shard_id, both, share, running=loads.serving, balanced=False)
            else:
                for parameter, part in zip(own, block_fp8(what, *both), strict=True):
                    for slot in slots:
                        copy_part(parameter.data[slot], shard_id, part)
        loads.note(method, layer, projection, role_of(param))

    return check_and_load
