"""Verdicts of benchmarks.engine.splits on answers and on placements of experts; no engine is started."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.checkpoints.synthetic import PRESETS, write_checkpoint
from benchmarks.engine.placement import CheckpointExperts, Placement
from benchmarks.engine.split_cases import CASES, ENGINES, shapes
from benchmarks.engine.splits import check, joined

PROMPTS, PROMPT, ANSWER, VOCAB = 4, 20, 5, 64


def answers(noise: float = 0, seed: int = 0) -> dict:
    """Random log-probabilities with some noise, and the best tokens."""
    gen = torch.Generator().manual_seed(0)
    other = torch.Generator().manual_seed(seed)
    found = {}
    for key, length in (("prompts", PROMPT), ("generated", ANSWER)):
        logits = 3 * torch.randn(PROMPTS, length, VOCAB, generator=gen)
        found[key] = (logits + noise * torch.randn(logits.shape, generator=other)).log_softmax(-1)
    tokens = found["generated"].argmax(-1)
    return {key: value.tolist() for key, value in found.items()} | {"tokens": tokens.tolist()}


def found(case, **of_engines):
    """`answers()` for all engines that are not given here, with some noise for the unquantized twin."""
    default = {name: {"answers": answers(0.03 if name == case.twin else 0, seed=9)} for name in case.engines()}
    return default | {name.replace("_", " "): answer for name, answer in of_engines.items()}


def test_equal_answers_pass_every_check():
    for case in CASES.values():
        assert check(case, found(case)).state == "passed"


def test_a_last_bit_fails_where_bits_must_be_equal():
    changed = answers()
    changed["prompts"][2][3][7] += 1e-7
    report = check(CASES["online"], found(CASES["online"], online={"answers": changed}))
    assert report.state == "failed"
    assert report.problems == ["not all bits are equal"]
    assert report.positions - report.equal_positions == 1


def test_answers_with_a_little_noise_are_the_same_and_with_much_are_not():
    case = CASES["tp2"]
    little = check(case, found(case, tp2={"answers": answers(0.02, seed=1)}))
    much = check(case, found(case, tp2={"answers": answers(1.0, seed=1)}))
    assert (little.state, much.state) == ("passed", "failed")
    assert little.equal_positions == 0
    assert much.equal_tokens < much.tokens


def test_ranks_may_not_be_further_from_the_unquantized_model_than_one_gpu():
    case = CASES["odd-qwen"]
    ours, alone = {"answers": answers(0.06, seed=1)}, {"answers": answers(0.02, seed=2)}
    report = check(case, found(case, qwen_odd_tp2=ours, qwen_odd=alone))
    assert report.from_twin > 1.5 * report.reference_from_twin
    assert [p for p in report.problems if "further from the unquantized model" in p]


@pytest.mark.parametrize(
    ("error", "state"),
    [("Pipeline parallelism is not supported for this model", "refused"), ("out of memory", "failed")],
)
def test_what_an_engine_could_not_do_is_said(error, state):
    case = CASES["pp2-mtp"]
    report = check(case, found(case, pp2_mtp={"error": f"ValueError: {error}"}))
    assert report.state == state
    assert report.problems == [f"pp2 mtp: ValueError: {error}"]


def test_experts_in_the_wrong_place_fail_the_case():
    case = CASES["eplb"]
    moved = {"answers": answers(), "misplaced": ["w2_weight of expert 3 in place 1"]}
    assert check(case, found(case, moved=moved)).state == "failed"


def test_replicas_answer_every_other_prompt():
    whole = answers()

    def start(environment):
        rank = int(environment["VLLM_DP_RANK"])
        assert (environment["VLLM_DP_SIZE"], environment["KEPT"]) == ("2", "1")
        return {"ready_s": 1.0, "answers": {key: value[rank::2] for key, value in whole.items()}}

    assert joined(2, {"KEPT": "1"}, start)["answers"] == whole
    assert joined(2, {}, lambda _: {"error": "none"}) == {"error": "none; none"}


def test_each_case_has_its_engines_and_each_engine_a_case():
    used = {name for case in CASES.values() for name in case.engines()}
    assert used == set(ENGINES)
    for case in CASES.values():
        names = case.engines()
        assert all(names.index(ENGINES[name].placed_as or name) <= names.index(name) for name in names)
    assert {engine.checkpoint.rpartition("-")[0] for engine in ENGINES.values()} == set(shapes())


def test_tensors_that_are_not_those_of_the_expert_in_a_place_are_named(tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="needs vLLM")
    import vllm.distributed

    shape = PRESETS["qwen3_moe", "tiny"]
    write_checkpoint(tmp_path, shape)
    here = [5, 0, 7]
    prefix = "model.layers.0.mlp.experts"
    layer = torch.nn.Module()
    with CheckpointExperts(tmp_path, prefix) as checkpoint:
        tensors = [dict(checkpoint.tensors(expert)) for expert in here]
    for name in tensors[0]:
        stacked = torch.stack([t[name] for t in tensors])
        layer.register_parameter(name, torch.nn.Parameter(stacked, requires_grad=False))
    assert layer.w13_weight.shape == (3, 2 * shape.moe_intermediate, shape.hidden)
    assert layer.w2_weight_scale_inv.shape == (3, shape.hidden // 128, shape.moe_intermediate // 128)
    monkeypatch.setattr(vllm.distributed, "get_ep_group", lambda: SimpleNamespace(rank_in_group=1))
    worker = Placement()
    maps = SimpleNamespace(physical_to_logical_map=torch.tensor([[1, 2, 3, *here]]))
    worker.model_runner = SimpleNamespace(
        model=SimpleNamespace(named_modules=lambda: [("lm_head", object()), (f"{prefix}.routed_experts", layer)]),
        model_config=SimpleNamespace(model=str(tmp_path)),
        eplb_state=SimpleNamespace(model_states={"hash": maps}),
    )
    assert worker.stop_moving() == [1, 2, 3, *here]
    assert worker.model_runner.eep_eplb_suppressed
    assert worker.misplaced() == []
    layer.w2_weight_scale_inv[1, 0, 0] *= 2
    assert worker.misplaced() == ["w2_weight_scale_inv of expert 0 in place 4"]
