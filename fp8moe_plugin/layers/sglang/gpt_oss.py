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
from fp8moe_plugin.layers.gpt_oss import (
    Target,
    bias_on_device,
    check_in_order,
    check_shape,
    copy_bias,
    part_of,
    share_of,
)
from fp8moe_plugin.layers.loading import as_kept
from fp8moe_plugin.layers.pack import Share
from fp8moe_plugin.layers.parameters import bias_tensors, expert_tensors, is_bias, marked, role_of, unset
from fp8moe_plugin.layers.recode import targets
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
        load = _loader(self, num_experts, hidden_size, width, share)
        tensors = expert_tensors(quant.weights, *sizes, SCALE)
        tensors |= {BIASES[name]: bias for name, bias in bias_tensors(*sizes).items()}
        for name, tensor in tensors.items():
            parameter = torch.nn.Parameter(unset(tensor), requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": MethodType(load, layer)})
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


def _loader(method: GptOssMethod, experts: int, hidden: int, width: int, share: Share) -> Callable[..., None]:
    """Returns a loader for the codes, exponents or biases of all experts of a rank.

    It raises `CheckpointError` for a tensor of another dtype or shape.
    """
    loads, packed = method.quant_config.loads, method.quant_config.spec.weights is PACKED_MXFP4

    def check_and_load(
        layer: Any,
        param: torch.Tensor,
        tensor: torch.Tensor,
        weight_name: str,
        shard_id: None = None,
        expert_id: None = None,
    ) -> None:
        part = part_of(weight_name)
        check_shape(weight_name, param, tensor, experts, hidden, width)
        first = layer.moe_ep_rank * experts
        check_in_order(weight_name, experts, lambda expert: next(iter(compat.local_slots(layer, first + expert)), None))
        if is_bias(param):
            copy_bias(param, part, bias_on_device(weight_name, param, tensor))
            loads.note(method, layer, f"{method.prefix} ({part}), bias", *Role)
            return
        loads.check_tensor(weight_name, param, tensor)
        loads.written = True  # also by codes that wait for their exponents
        (weight, _), (scales, _) = targets(layer, part, weight_name, SCALE)
        target = Target(
            method.prefix, part, weight, scales, share, packed=packed, running=loads.serving, balanced=False
        )
        target.load(loads.halves, role_of(param), as_kept(param, tensor))
        loads.note(method, layer, f"{method.prefix} ({part})", role_of(param))

    return check_and_load
