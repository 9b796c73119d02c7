"""The files of deploy/, each checked by a program that knows its format, and against the package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import promql_parser
import pytest
import yaml

from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.layers.fallback import BACKEND as ENGINE
from fp8moe_plugin.layers.metrics import REGISTRY
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.settings import Settings, variable
from warmup.options import parse

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
METRICS = set(re.findall(r"^\| `(fp8moe_\w+)", (ROOT / "docs" / "operation.md").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "--failure-threshold", "warning", "Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
        ["kubernetes-validate", "--strict", "kubernetes.yaml"],
        ["bash", "-n", "two-nodes.sh"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", "../.github/workflows/ci.yml"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", "../.github/workflows/release.yml"],
    ],
    ids=lambda command: command[-1],
)
def test_a_file_is_valid(command: list[str]) -> None:
    installed = Path(sys.executable).with_name(command[0])
    program = str(installed) if installed.exists() else command[0]
    done = subprocess.run([program, *command[1:]], cwd=DEPLOY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_both_nodes_get_the_options_that_follow_the_model(tmp_path: Path, rank: str) -> None:
    (tmp_path / "vllm").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    command = ["bash", DEPLOY / "two-nodes.sh", rank, "10.0.0.1", "org/model", "--max-model-len", "4096"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True)
    headless = " --headless" * (rank == "1")
    assert done.stdout == (
        "serve org/model --quantization fp8moe --tensor-parallel-size 16 --nnodes 2 "
        f"--node-rank {rank} --master-addr 10.0.0.1{headless} --max-model-len 4096\n"
    )


def expressions() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    alerts = [rule["expr"] for group in rules for rule in group["rules"]]
    return [*alerts, *(target["expr"] for panel in panels for target in panel["targets"])]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_parses_and_asks_for_metrics_that_exist(expression: str) -> None:
    promql_parser.parse(expression)
    ours = set(re.findall(r"\bfp8moe_\w+", expression))
    assert ours <= METRICS
    assert ours or "vllm:" in expression


def test_each_metric_is_shown() -> None:
    assert set(re.findall(r"\bfp8moe_\w+", " ".join(expressions()))) == METRICS


def test_the_documented_metrics_are_exported() -> None:
    families = {f"{family.name}_total" if family.type == "counter" else family.name for family in REGISTRY.collect()}
    assert families == METRICS


def test_each_panel_shows_the_chosen_model_and_pods() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource", "namespace", "model", "pod"]
    for expression in (target["expr"] for panel in dashboard["panels"] for target in panel["targets"]):
        wanted = {"$namespace", "$pod"} | ({"$model"} if "vllm:" in expression else set())
        assert set(re.findall(r"\$\w+", expression)) == wanted, expression


def test_alerts_name_the_pod_and_the_labels_that_metrics_have() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert "{{ $labels.namespace }}/{{ $labels.pod }} " in rule["annotations"]["summary"]
        assert re.search(r"\b(by|on) \(namespace, pod\b", rule["expr"])
    backends = set(re.findall(r'backend(?:=|!=|!~)"([^"]+)"', " ".join(rule["expr"] for rule in group["rules"])))
    assert backends == {ENGINE, f"{BACKENDS[SM90].name}|{ENGINE}"}


def test_settings_and_warm_up_commands_exist() -> None:
    files = " ".join(path.read_text() for path in DEPLOY.iterdir())
    assert set(re.findall(r"\bFP8MOE_\w+", files)) <= {variable(field) for field in Settings.model_fields}
    (pod,) = [
        one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one["kind"] == "Deployment"
    ]
    program, *arguments = pod["spec"]["template"]["spec"]["initContainers"][0]["command"]
    assert program == "fp8moe-warmup"
    assert parse(arguments).command == "verify"


def test_the_image_compiles_with_the_compiler_that_was_measured() -> None:
    """`requirements/cpu.txt` has the NVRTC of the machines that measure."""
    docker = (DEPLOY / "Dockerfile").read_text()
    (version,) = re.findall(r"^nvidia-cuda-nvrtc==(\S+)$", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    assert f"\nARG NVRTC={version}\n" in docker
    (install,) = re.findall(r"FROM \S+ AS kernels\n.*?(RUN pip install .*?)\n", docker, re.DOTALL)
    assert '"nvidia-cuda-nvrtc==$NVRTC"' in install


def test_a_pod_reads_the_bundle_that_its_image_has() -> None:
    bundle = re.findall(r"FP8MOE_BUNDLE=(\S+)", (DEPLOY / "Dockerfile").read_text())
    assert bundle == ["/opt/fp8moe/kernels.tar"]
    assert f"--bundle, {bundle[0]}]" in (DEPLOY / "kubernetes.yaml").read_text()
