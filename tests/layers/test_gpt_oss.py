"""gpt-oss's experts, loaded without an engine: what the host does, and batches of experts."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers import gpt_oss
from fp8moe_plugin.layers.gpt_oss import Target, check_in_order, share_of
from fp8moe_plugin.layers.parameters import expert_tensors
from fp8moe_plugin.layers.recode import Halves
from fp8moe_plugin.ops.mxfp4 import dequantize, further_steps
from fp8moe_plugin.ops.reference import dequantize_blocks
from tests.layers.experts import EXPERTS
from tests.layers.gpt_oss import CHECKPOINT, HIDDEN, INTERMEDIATE, PADDED, Tensors, part_of, wanted_of

FORMS = {"mxfp4": PACKED_MXFP4, "fp8": FP8_BLOCK}
ROLES = {"weight": Role.WEIGHT, "weight_scale": Role.SCALES}


def targets(form: str, ranks: int = 1, rank: int = 0) -> dict[str, Target]:
    _, share = share_of(INTERMEDIATE, ranks, rank)
    tensors = expert_tensors(FORMS[form], EXPERTS, PADDED, share.intermediate, "scale")
    own = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    states = {"packed": form == "mxfp4", "running": False, "balanced": False}
    return {
        part: Target("L", part, own[f"{part}_weight"], own[f"{part}_scale"], share, **states) for part in ("w13", "w2")
    }


def load(into: dict[str, Target], tensors: Tensors, *kinds: str) -> dict[str, Target]:
    halves = Halves()
    for (part, target), kind in itertools.product(into.items(), kinds):
        target.load(halves, ROLES[kind], tensors[f"{part}_{kind}"])
    halves.check()
    return into


def held_by(into: dict[str, Target], expert: int) -> Tensors:
    w13, w2 = (
        dequantize(target.weight[expert], target.scales[expert], part == "w13")
        if target.packed
        else dequantize_blocks(target.weight[expert], target.scales[expert])
        for part, target in into.items()
    )
    return {"w1": w13.chunk(2)[0], "w3": w13.chunk(2)[1], "w2": w2}


def assert_holds(into: dict[str, Target], tensors: Tensors) -> None:
    for expert in range(EXPERTS):
        found, wanted = held_by(into, expert), wanted_of(tensors, expert)
        for name, weight in found.items():
            rows, columns = wanted[name].shape
            assert torch.equal(weight[:rows, :columns], wanted[name].float()), name
            assert not weight[rows:].any()
            assert not weight[:, columns:].any()


ORDERS = [("weight", "weight_scale"), ("weight_scale", "weight")]


@pytest.mark.parametrize("kinds", ORDERS)
@pytest.mark.parametrize("at_once", [1, 2, EXPERTS])
@pytest.mark.parametrize("form", FORMS)
def test_experts_are_loaded_in_batches(monkeypatch, form, at_once, kinds):
    monkeypatch.setattr(gpt_oss, "BATCH_BYTES", at_once * CHECKPOINT["w13_weight"][0].numel())
    for rank in range(4):  # the last one has no channels
        assert_holds(load(targets(form, 4, rank), part_of(CHECKPOINT, 4, rank), *kinds), part_of(CHECKPOINT, 4, rank))


@pytest.mark.parametrize("kinds", ORDERS)
@pytest.mark.parametrize("row", [4, 5])  # of a gate and of an up projection
@pytest.mark.parametrize("wide", range(EXPERTS))
def test_parameters_grow_while_codes_wait_in_them(monkeypatch, wide, row, kinds):
    monkeypatch.setattr(gpt_oss, "BATCH_BYTES", 1)
    tensors = {name: tensor.clone() for name, tensor in CHECKPOINT.items()}
    for part in ("w13", "w2"):
        tensors[f"{part}_weight_scale"][wide, row, 1] = 80
    into = load(targets("mxfp4"), tensors, *kinds)
    assert_holds(into, tensors)
    assert [further_steps(target.weight, target.scales) for target in into.values()] == [2, 1]
    assert_holds(load(into, CHECKPOINT, *kinds), CHECKPOINT)  # which need no further steps


@pytest.mark.parametrize("slots", [(0, 2, 1), (2, 1, 0), (1, 2, 3), (0, 2, 4), (0, None, None)])
def test_experts_in_another_order_are_refused(slots):
    check_in_order("w", 3, (0, 1, 2).__getitem__)
    with pytest.raises(CheckpointError, match="does not hold 3 experts in their order"):
        check_in_order("w", 3, slots.__getitem__)


# ---- the host ------------------------------------------------------------------------------------------------------


@dataclass
class Host:
    """What a load does with memory of the host."""

    written: int = 0  # bytes
    sent: int = 0  # bytes
    strided: int = 0  # likewise, of tensors that are not contiguous, which the host copies first
    launches: int = 0  # on the device


@contextmanager
def watched() -> Iterator[Host]:
    """The device is the meta device."""
    found = Host()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            if op.is_view or op.overloadpacket.__name__ in ("empty", "is_pinned", "detach"):
                return result
            given, made = ([t for t in tree_leaves(each) if isinstance(t, torch.Tensor)] for each in (args, result))
            if all(tensor.is_cpu for tensor in made):
                found.written += sum(tensor.nbytes for tensor in made)
            else:
                found.launches += 1
                sent = [tensor for tensor in given if tensor.is_cpu]
                found.sent += sum(tensor.nbytes for tensor in sent)
                found.strided += sum(tensor.nbytes for tensor in sent if not tensor.is_contiguous())
            return result

    with Watch():
        yield found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_the_host_hands_over_contiguous_memory(form, ranks):
    """Except a rank's columns of w2, which other ranks' are between, and its exponents, which are few."""
    with torch.device("meta"):
        into = targets(form, ranks)
    part = {name: tensor for name, tensor in part_of(CHECKPOINT, ranks, 0).items() if not name.endswith("bias")}
    load(into, part, *ORDERS[0])  # makes the tables
    with watched() as host:
        load(into, part, *ORDERS[0])
    assert host.written == 8  # w13's and w2's least and largest exponents
    assert host.sent == sum(tensor.nbytes for tensor in part.values())
    strided = sum(part[name].nbytes for name in ("w13_weight_scale", "w2_weight", "w2_weight_scale"))
    assert host.strided == (0 if ranks == 1 else strided)


@pytest.mark.parametrize(("form", "launches"), [("mxfp4", 50), ("fp8", 44)])
def test_a_batch_takes_few_launches(form, launches):
    """However many experts it has."""
    with torch.device("meta"):
        into = targets(form)
    load(into, CHECKPOINT, *ORDERS[0])  # makes the tables
    with watched() as host:
        load(into, CHECKPOINT, *ORDERS[0])
    assert host.launches - 2 * EXPERTS <= launches  # w13 and w2 of an expert each have a copy of their own
    assert HIDDEN < PADDED  # so they are padded, too
