import pytest
import torch

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.formats.spec import COMPRESSED_SCALE, SCALE
from fp8moe_plugin.formats.weight_format import Role
from fp8moe_plugin.layers.arrivals import Arrivals, check_scale_name
from fp8moe_plugin.layers.recode import Halves

WEIGHT, SCALES = Role


def test_a_weight_and_its_scales_may_arrive_in_any_order():
    arrivals = Arrivals()
    for projection, role in (("a", WEIGHT), ("b", SCALES), ("b", WEIGHT), ("a", WEIGHT), ("a", SCALES)):
        arrivals.note(projection, role)
    arrivals.note("c", WEIGHT, SCALES)
    arrivals.check()


@pytest.mark.parametrize(("kind", "missing"), [(WEIGHT, SCALES), (SCALES, WEIGHT)])
def test_one_without_the_other_is_refused_once(kind, missing):
    arrivals = Arrivals()
    arrivals.note("whole", WEIGHT, SCALES)
    for projection in ("half", "another", "a third"):
        arrivals.note(projection, kind)
    with pytest.raises(CheckpointError, match=f"half: new {kind} arrived without the {missing}.* 2 more projections"):
        arrivals.check()
    arrivals.note("half", missing)
    arrivals.clear()
    arrivals.check()


@pytest.mark.parametrize(("kind", "missing"), [(WEIGHT, SCALES), (SCALES, WEIGHT)])
def test_half_of_a_second_update_is_refused(kind, missing):
    """Without a step between them; the first one has brought both."""
    arrivals = Arrivals()
    for role in (WEIGHT, SCALES, kind):
        arrivals.note("a", role)
    with pytest.raises(CheckpointError, match=f"a: new {kind} arrived without the {missing}"):
        arrivals.check()


@pytest.mark.parametrize(
    ("alone", "others"), [(1, ""), (2, " .and so for 1 more projection."), (3, " .and so for 2 more projections.")]
)
def test_other_projections_are_counted_if_there_are_any(alone, others):
    arrivals, halves = Arrivals(), Halves()
    for projection in range(alone):
        arrivals.note(f"w{projection}", WEIGHT)
        halves.add(f"w{projection}", WEIGHT, torch.zeros(1, 16, dtype=torch.uint8), torch.device("cpu"))
    with pytest.raises(CheckpointError, match=f"w0: new weight arrived without the scales{others}. An FP8"):
        arrivals.check()
    with pytest.raises(CheckpointError, match=f"w0: weight .* after both{others}. A load"):
        halves.check()


@pytest.mark.parametrize(
    "accepted",
    [(SCALE,), (COMPRESSED_SCALE,), (SCALE, COMPRESSED_SCALE), ()],
)
def test_scales_have_the_name_that_the_format_gives_them(accepted):
    for name in ("weight", "bias", "input_scale", "self_attn.k_scale", *accepted):
        check_scale_name(f"model.layers.0.o_proj.{name}", accepted)
    for name in {SCALE, COMPRESSED_SCALE} - set(accepted):
        with pytest.raises(
            CheckpointError, match=f"layers.0.o_proj.{name} is unexpected.*{' or '.join(accepted) or 'no scales'}"
        ):
            check_scale_name(f"layers.0.o_proj.{name}", accepted)
