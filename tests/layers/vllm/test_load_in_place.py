"""Loads in place of any part, that end early or bring half of a pair: the model serves new or old weights, or none."""

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.v1.worker.worker_base import WorkerBase

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.layers.vllm import compat
from fp8moe_plugin.layers.vllm.loading import check_experts_not_moved
from tests.layers.experts import Checkpoint
from tests.layers.vllm.loaded_model import (
    INTERMEDIATE,
    KINDS,
    RESTART,
    Model,
    Tensors,
    assert_out_of_service,
    equal,
    first,
    no_engine,
    second,
)
from tests.layers.vllm.one_rank import make_mlp

pytestmark = [pytest.mark.seam, pytest.mark.usefixtures(no_engine.__name__)]

NORM = 2  # tensors before those of the experts


def breaks(weights: Tensors, after: int, error: BaseException) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the first tensors, and then an error: for example, the next file cannot be read."""
    for i, named in enumerate(weights):
        if i == after:
            raise error
        yield named


def with_unknown(weights: Tensors, after: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i, named in enumerate(weights):
        if i == after:
            yield "norm.other", torch.zeros(1)
        yield named


ENDS = {
    "unreadable": lambda weights, after: breaks(weights, after, OSError("the second file cannot be read")),
    "unknown name": with_unknown,
}


def calls_of(model: Model, way: str) -> Callable[[Tensors], None]:
    return model.load_weights if way == "load" else model.reload_weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("way", "after"), [("load", 1), ("load", NORM), ("load", 7), ("reload", NORM), ("reload", 7)])
def test_a_load_that_ends_in_the_middle_ends_the_service(kind, end, way, after):
    model = Model(kind).start(first(kind))
    tensors = ENDS[end](model.tensors(second(kind)), after)
    with pytest.raises(CheckpointError, match=f"(OSError|AttributeError): .*{RESTART}"):
        calls_of(model, way)(tensors)
    assert_out_of_service(model, kind, "Error: ")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("way", "after"), [("load", 0), ("reload", 0), ("reload", 1)])
def test_a_load_that_ends_before_it_changes_anything_leaves_what_served(kind, end, way, after):
    """A reload by layers buffers the tensors of a layer until all have come; the norm has two."""
    model = Model(kind).start(first(kind))
    served = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for _ in range(2):
        with pytest.raises((OSError, AttributeError)):
            calls_of(model, way)(ENDS[end](model.tensors(second(kind)), after))
        model.step()
        assert equal(model, Model(kind).start(first(kind)))
    model.reload(second(kind))
    model.step()
    assert equal(model, Model(kind).start(second(kind)))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == served


@pytest.mark.parametrize("way", ["load", "reload"])
def test_other_ranks_may_have_loaded_what_this_one_refuses(way):
    model = Model("fp8").start(first("fp8"))
    model.state.only_rank = False
    with pytest.raises(CheckpointError, match=f"OSError: .*{RESTART}"):
        calls_of(model, way)(breaks(model.tensors(second("fp8")), 0, OSError("it cannot be read")))
    assert_out_of_service(model, "fp8", "OSError")


def test_an_interrupted_load_ends_the_service():
    model = Model("fp8").start(first("fp8"))
    with pytest.raises(KeyboardInterrupt):
        model.load_weights(breaks(model.tensors(second("fp8")), 3, KeyboardInterrupt()))
    assert_out_of_service(model, "fp8", "KeyboardInterrupt")


def refused_before_writing(model: Model, kind: str) -> Iterable[tuple[str, torch.Tensor]]:
    weights = [named for named in model.tensors(second(kind)) if not named[0].startswith("norm")]
    return [(weights[0][0], weights[0][1].to(torch.int16)), *weights[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_is_refused_before_anything_was_written_changes_nothing(kind):
    model = Model(kind).start(first(kind))
    for load in (model.load_weights, model.reload_weights):
        with pytest.raises(CheckpointError, match="int16") as error:
            load(refused_before_writing(model, kind))
        assert "Restart" not in str(error.value)
        model.step()
        assert equal(model, Model(kind).start(first(kind)))
    weight = model.gate_up.weight  # vLLM's transfer engines may call the loaders themselves
    with pytest.raises(CheckpointError, match="int16"):
        weight.weight_loader(weight, weight.data[:INTERMEDIATE].to(torch.int16), 0)
    model.step()


def test_wrong_shape_changes_nothing_unless_copied_in_parts():
    model, weights = Model("fp8").start(first("fp8")), second("fp8")["w1_weight"]
    for layer, shard, wrong in ((model.gate_up, [1], weights[0][:128]), (model.down, [], weights[0][:128])):
        with pytest.raises(CheckpointError, match=r"of shape \[128, 256\] does not fit the layer: .*weights\.$"):
            layer.weight.weight_loader(layer.weight, wrong, *shard)
        model.step()
        assert equal(model, Model("fp8").start(first("fp8")))
    fused = torch.cat([weights[0], weights[1][:128]])  # the gate's part fits
    with pytest.raises(CheckpointError, match=RESTART):
        model.gate_up.weight.weight_loader(model.gate_up.weight, fused)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["experts.w1.1.weight", "experts.w2.1.weight", "mlp.w1.0.weight", "mlp.w2.0.weight"])
@pytest.mark.parametrize("change", [lambda w: w[:200], lambda w: w[:, :64], lambda w: torch.cat([w, w])])
def test_a_weight_of_another_shape_is_refused_and_changes_nothing(kind, name, change):
    """vLLM itself would load the first rows of one that has too many."""
    model = Model(kind).start(first(kind))
    weight = change(dict(model.tensors(second(kind)))[name])
    for loading in (model, Model(kind)):
        with pytest.raises(CheckpointError, match=r"shape \[.*config\.json belongs to the weights") as error:
            loading.load_weights([(name, weight)])
        assert "mixture" not in str(error.value)
    model.step()
    assert equal(model, Model(kind).start(first(kind)))


def test_a_refusal_after_an_earlier_call_of_the_same_update_ends_the_service():
    model = Model("fp8").start(first("fp8"))
    model.load_weights(list(model.tensors(second("fp8")))[:NORM])
    with pytest.raises(CheckpointError, match=RESTART):
        model.load_weights(refused_before_writing(model, "fp8"))


def test_moved_experts_are_refused_before_anything_is_written():
    moved = SimpleNamespace(logical_to_physical_map=torch.tensor([[0, 3], [2, 4], [1, -1]]))
    model = Model("fp8").start(first("fp8"))
    model.experts.quant_method.loading.check_reloadable = lambda: check_experts_not_moved("L", moved, 5)
    experts = [named for named in model.tensors(second("fp8")) if named[0].startswith("experts")]
    for load in (model.load_weights, model.reload_weights):
        with pytest.raises(CheckpointError, match="load balancing has moved experts") as error:
            load(experts)
        assert "mixture" not in str(error.value)
        model.step()
    assert equal(model, Model("fp8").start(first("fp8")))


def is_scale(named: tuple[str, torch.Tensor]) -> bool:
    return named[0].endswith("scale_inv")


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("part", ["experts", "mlp", "experts.w2.1.", "mlp.w3."])
def test_half_of_a_pair_is_refused_before_the_next_step(scales, part):
    model = Model("fp8").start(first("fp8"))
    tensors = model.tensors(second("fp8"))
    model.load_weights(t for t in tensors if not t[0].startswith(part) or is_scale(t) == scales)
    why = f"new {'scales' if scales else 'weight'} arrived without"
    with pytest.raises(CheckpointError, match=f"{why}.*{RESTART}"):
        model.step()
    assert_out_of_service(model, "fp8", why)


def test_partial_update_in_two_calls_is_accepted():
    model, wanted = Model("fp8").start(first("fp8")), Model("fp8").start(first("fp8"))
    names = ("experts.w1.1.", "mlp.w2.")
    part = [named for named in model.tensors(second("fp8")) if named[0].startswith(names)]
    assert len(part) == 4
    for half in (False, True):
        model.load_weights([named for named in part if is_scale(named) == half])
    model.step()
    wanted.load_weights(part)
    assert equal(model, wanted)
    model.load_weights([named for named in part if is_scale(named)])  # the weights came before the last step
    with pytest.raises(CheckpointError, match="new scales arrived without the weight"):
        model.step()


def test_a_reload_of_all_layers_brings_what_was_missing():
    model = Model("fp8").start(first("fp8"))
    model.load_weights([named for named in model.tensors(second("fp8")) if not is_scale(named)])
    model.reload(second("fp8"))
    model.step()
    assert equal(model, Model("fp8").start(second("fp8")))


@pytest.mark.parametrize("kind", ["fp8", "online"])
def test_scales_of_another_format_are_refused_by_name(kind):
    checkpoint, model = first("fp8"), Model(kind)
    other = "weight_scale" if kind == "fp8" else "weight_scale_inv"

    def renamed() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name.replace("weight_scale_inv", other), tensor) for name, tensor in model.tensors(checkpoint))

    with pytest.raises(CheckpointError, match=f"{other} is unexpected"):
        model.load_weights(t for t in renamed() if is_scale(t) or t[0].endswith("_scale"))
    model = Model(kind).start(first(kind))
    with pytest.raises(CheckpointError, match="is unexpected") as error:
        model.load_weights(t for t in renamed() if is_scale(t) or t[0].endswith("_scale"))
    assert "Restart" not in str(error.value)
    scale = model.down.weight_scale_inv
    if kind == "online":  # by a transfer engine that knows the model's names
        with pytest.raises(CheckpointError, match="unquantized checkpoint, which has no scales"):
            scale.weight_loader(scale, scale.data.clone())


@pytest.mark.parametrize(("kind", "name"), [("fp8", "w1_weight_scale_inv"), ("online", "w1_weight")])
def test_sparse_patches_of_quantized_layers_are_refused(kind, name):
    """vLLM's `sparse_nccl` marks by NaN which elements keep their values."""
    patches = pytest.importorskip("vllm.model_executor.model_loader.checkpoint_weight_patch", reason="a newer vLLM")
    model, weight = Model(kind).start(first(kind)), first(kind)[name][0]
    values, indices = torch.ones(2, dtype=weight.dtype), torch.tensor([1, 2])
    named = f"experts.w1.0.{name.removeprefix('w1_')}"
    patch = patches.CheckpointWeightPatch(named, tuple(weight.shape), weight.dtype, values, indices)
    with pytest.raises(CheckpointError, match=r"holds? NaN"):
        patches.load_checkpoint_weight_patches(model, [patch], validate_unique_indices=False)
    model.step()
    assert equal(model, Model(kind).start(first(kind)))


def test_a_nested_module_may_be_loaded_by_itself():
    """As some trainers do with the language model of a multimodal one."""
    outer, inner = torch.nn.Module(), Model("fp8").start(first("fp8"))
    outer.inner, outer.load_weights = inner, inner.load_weights
    inner.state.watch(outer)
    outer.load_weights(inner.tensors(second("fp8")))
    inner.step()
    assert equal(inner, Model("fp8").start(second("fp8")))
    with pytest.raises(CheckpointError, match=f"OSError: .*{RESTART}"):
        outer.load_weights(breaks(inner.tensors(first("fp8")), 5, OSError("it cannot be read")))


class Attention(torch.nn.Module):
    """Like vLLM's MLA: derived tensors are allocated anew, as plain attributes or as parameters."""

    def __init__(self, kv_b_proj: torch.nn.Module, parameters: bool) -> None:
        super().__init__()
        self.kv_b_proj = kv_b_proj
        self.make = torch.nn.Parameter if parameters else lambda tensor, requires_grad: tensor

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        weight = self.kv_b_proj.weight.to(dtype)
        if hasattr(self, "W_UV"):
            del self.W_UV
        self.W_UV = self.make(weight[:128].clone(), requires_grad=False)
        self.W_UK_T = self.make(weight[128:].T.clone(), requires_grad=False)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Attention:
    """In the engine's configuration, next to one that keeps its weights in another way, as on CPUs with AMX tiles."""
    attention = Attention(make_mlp(INTERMEDIATE).down, request.param)
    attention.kv_b_proj.weight.data.fill_(0.0)
    packed = Attention(make_mlp(INTERMEDIATE).down, request.param)
    attention.process_weights_after_loading(torch.bfloat16)
    context = {"attention": attention, "packed": packed, "experts": torch.nn.Module()}
    engine = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )
    monkeypatch.setattr(compat, "set_current_vllm_config", lambda _: torch.inference_mode())
    attention.engine = engine
    return attention


@pytest.mark.parametrize("attention", [False, True], indirect=True)
def test_what_mla_derives_is_derived_again_where_graphs_read_it(attention):
    model = Model("fp8").start(first("fp8"))
    model.state.engine = attention.engine
    addresses = {(attention.W_UV.data_ptr(), attention.W_UK_T.data_ptr())}
    for value in (1.0, 2.0):
        old = attention.W_UV.clone()
        attention.kv_b_proj.weight.data.fill_(value)
        model.step()
        assert torch.equal(attention.W_UV, old)  # nothing was loaded
        model.load(second("fp8"))
        model.step()
        assert (value == attention.W_UV).all()
        assert (value == attention.W_UK_T).all()
        addresses.add((attention.W_UV.data_ptr(), attention.W_UK_T.data_ptr()))
    attention.kv_b_proj.weight.data.fill_(3.0)
    model.reload(first("fp8"))
    attention.process_weights_after_loading(torch.bfloat16)  # as vLLM does at the end of a reload
    assert (attention.W_UV == 3.0).all()
    addresses.add((attention.W_UV.data_ptr(), attention.W_UK_T.data_ptr()))
    assert len(addresses) == 1
    assert not hasattr(attention.engine.compilation_config.static_forward_context["packed"], "W_UV")


@pytest.mark.parametrize("attention", [True], indirect=True)
def test_what_cannot_be_derived_again_ends_the_service(attention):
    model = Model("fp8").start(first("fp8"))
    model.state.engine = attention.engine
    model.load(second("fp8"))
    attention.kv_b_proj = None
    with pytest.raises(CheckpointError, match=f"AttributeError: .*{RESTART}"):
        model.step()


class Worker(WorkerBase):
    """Makes a model of two layers, as vLLM's loader does."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def make(self, see: Callable[[], None]) -> "Outer":
        return Outer(see)

    def execute_model(self, scheduler_output: object) -> None:
        self.steps.append("model")

    def execute_dummy_batch(self) -> None:
        self.steps.append("dummy")


class Inner(torch.nn.Module):
    def __init__(self, see: Callable[[], None]) -> None:
        super().__init__()
        see()

    def load_weights(self, weights: Tensors) -> Iterator[str]:
        yield from (name for name, _ in weights)


class Middle(torch.nn.Module):
    def __init__(self, see: Callable[[], None]) -> None:
        super().__init__()
        self.layers = [Inner(see) for _ in range(2)]

    def load_weights(self, weights: Tensors) -> None:
        list(weights)


class Compiled(Middle):
    def __init__(self, see: Callable[[], None]) -> None:
        super().__init__(see)


class Outer(Middle):
    def __init__(self, see: Callable[[], None]) -> None:
        torch.nn.Module.__init__(self)
        self.model = Compiled(see)


def test_modules_that_load_weights_are_watched_once():
    seen: list[torch.nn.Module] = []

    def watch(module: torch.nn.Module) -> None:
        module.load_weights = lambda weights: None
        seen.append(module)

    outer = Worker().make(lambda: compat.watch_loads(watch))
    assert seen == [outer.model, outer]


@pytest.mark.parametrize(("launcher", "checked"), [("mp", [0, 2]), ("external_launcher", [0, 1, 2])])
def test_each_step_that_computes_is_checked_first(launcher, checked):
    """In a step without tokens, one of an external launcher computes experts for other ranks' tokens."""
    worker, checks = Worker(), []
    ranks = SimpleNamespace(distributed_executor_backend=launcher, data_parallel_size=2)
    calls = iter([lambda: compat.check_steps(lambda: checks.append(len(worker.steps)), idle)])
    idle = compat.computes_without_tokens(ranks)
    worker.make(lambda: next(calls, lambda: None)())
    for tokens in (5, 0):
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens))
    worker.execute_dummy_batch()
    assert worker.steps == ["model", "model", "dummy"]
    assert checks == checked


HALF = "experts.w1.0.weight"


def named(model: Model, checkpoint: Checkpoint, name: str) -> tuple[str, torch.Tensor]:
    return next(found for found in model.tensors(checkpoint) if found[0] == name)


def test_a_half_of_a_failed_reload_is_not_combined_with_the_next_load():
    model, wanted = Model("mxfp4").start(first("mxfp4")), Model("mxfp4").start(second("mxfp4"))
    other = {name: [tensor.roll(3, 0) for tensor in tensors] for name, tensors in second("mxfp4").items()}
    with pytest.raises(OSError, match="disk"):
        model.reload_weights(breaks([named(model, other, HALF)] * 2, 1, OSError("disk")))
    model.step()
    model.load_weights(sorted(model.tensors(second("mxfp4")), key=lambda tensor: "scale" not in tensor[0]))
    model.step()
    assert equal(model, wanted)


@pytest.mark.parametrize("name", [HALF, f"{HALF}_scale"])
def test_a_half_that_comes_once_more_is_refused(name):
    checkpoint = first("mxfp4")
    starting = Model("mxfp4")
    starting.load_weights([*starting.tensors(checkpoint), named(starting, checkpoint, name)])
    with pytest.raises(CheckpointError, match=r"w1 of expert 0\): .* in MXFP4 arrived without .*once more after both"):
        starting.experts.quant_method.process_weights_after_loading(starting.experts)
    model = Model("mxfp4").start(checkpoint)
    model.load(second("mxfp4"))
    model.load_weights([named(model, checkpoint, name)])
    with pytest.raises(CheckpointError, match="once more after both"):
        model.step()
