"""The kernels that the warm-up compiles: the kernels of a model, or all kernels of a target."""

import itertools
from dataclasses import replace

from fp8moe_plugin.checkpoint.placement import dense_kind_refusal
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.activation import VARIANTS
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.spec import FORMATS
from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.plan.keys import SM90, KernelKey, KernelSet
from fp8moe_plugin.plan.model_specs import model_specs
from fp8moe_plugin.plan.sm90.catalog import MQA_HEADS
from fp8moe_plugin.plan.sm90.indexer import HEAD_DIMS
from fp8moe_plugin.plan.spec import Arrival, LayerSpec, MoeShape
from fp8moe_plugin.settings import NAME

EXAMPLE = MoeShape(topk=8, hidden=7168, intermediate=2048, local_experts=256, global_experts=256)


def model_kernels(model: Model, target: str = SM90) -> KernelSet:
    """Returns every kernel that serving a checkpoint may launch, for any split and any number of tokens.

    Raises:
        UnsupportedError: the target's kernels cannot compute the experts. Rows that arrive in another way than the
            standard one have no kernels then, and a layer refuses them.
    """
    backend, experts, indexer = BACKENDS[target], model.experts, model.indexer
    ours = not dense_kind_refusal(model.dense_weights)
    found = backend.dense_kernels(model.ue8m0, model.dense_weights, model.dense_bias) if ours else {}
    if ours and any(layer.groups > 1 for layer in model.dense):
        found = backend.batched_dense_kernels() | found
    forms = [model, replace(model, weights=FP8_BLOCK)] if model.unknown_format else [model]
    if experts.layers:  # else all experts are unquantized
        for spec in itertools.chain(*(model_specs(form, MoeShape.of(experts, experts.experts)) for form in forms)):
            for arrival in Arrival:
                if not (refusal := backend.refusal(spec, arrival)):
                    found |= backend.layer_kernels(spec, arrival)
                elif arrival is Arrival.STANDARD:
                    raise UnsupportedError(
                        f"The checkpoint's experts have {refusal}, which the {backend.name} kernels do not support. "
                        f"Serve it without --quantization {NAME}."
                    )
    return found | (backend.indexer_kernels(indexer.heads, indexer.dim) if indexer else {})


def all_kernels(target: str = SM90) -> list[KernelKey]:
    """Returns every kernel of a target: those of the layers, and those that only direct calls of the ops launch.

    Except those of biased experts in variants that gpt-oss, the only published model with biases, does not have.
    """
    backend, scales = BACKENDS[target], (False, True)
    specs = [LayerSpec(EXAMPLE, *kind) for kind in itertools.product(FORMATS, scales, VARIANTS)]
    specs += [LayerSpec(EXAMPLE, weights, activation=VARIANTS[1], bias=True) for weights in (FP8_BLOCK, PACKED_MXFP4)]
    computed = [pair for pair in itertools.product(specs, Arrival) if not backend.refusal(*pair)]
    layers = [backend.layer_kernels(*pair) for pair in computed]
    formats = [weights for weights in FORMATS if not dense_kind_refusal(weights)]
    dense = [backend.dense_kernels(*kind, biased=True) for kind in itertools.product(scales, formats)]
    indexers = [backend.indexer_kernels(heads, HEAD_DIMS[0]) for heads in MQA_HEADS]
    return list(dict.fromkeys(itertools.chain(*layers, *dense, backend.op_kernels(), *indexers)))
