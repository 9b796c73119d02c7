"""The files of deploy/, each checked by a program that knows its format, and against the package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from fp8moe_plugin.launches.backends import BACKENDS
from fp8moe_plugin.layers import node_metrics
from fp8moe_plugin.layers.fallback import BACKEND as ENGINE
from fp8moe_plugin.layers.metrics import REGISTRY
from fp8moe_plugin.plan.keys import SM90
from fp8moe_plugin.settings import Settings, variable
from tests.deploy.manifests import DEPLOY, objects
from warmup.options import parse

ROOT = Path(__file__).parents[2]
METRICS = set(re.findall(r"^\| `(fp8moe_\w+)", (ROOT / "docs" / "operation.md").read_text(), re.MULTILINE))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "--failure-threshold", "warning", "Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
        ["kubernetes-validate", "--strict", "kubernetes.yaml"],
        ["kubernetes-validate", "--strict", "sglang.yaml"],
        ["kubernetes-validate", "--strict", "leaderworkerset.yaml"],
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


def test_a_third_node_is_refused() -> None:
    command = ["bash", DEPLOY / "two-nodes.sh", "2", "10.0.0.1", "org/model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "the rank of this node is 0 or 1, not 2\n")


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
    for one in dashboard["templating"]["list"][1:]:
        selector = one["query"].removeprefix("label_values(").rpartition(",")[0]
        promql_parser.parse(selector)
        assert '"vllm:num_requests_running|sglang:num_running_reqs"' in selector
    for expression in (target["expr"] for panel in dashboard["panels"] for target in panel["targets"]):
        wanted = {"$namespace", "$pod"} | ({"$model"} if "vllm:" in expression else set())
        assert set(re.findall(r"\$\w+", expression)) == wanted, expression
        assert ("($pod)(-[0-9]+)?" in expression) == ("fp8moe_" in expression)  # a leader and its nodes


def test_alerts_name_the_pod_and_the_labels_that_metrics_have() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]:
        assert "{{ $labels.namespace }}/{{ $labels.pod }} " in rule["annotations"]["summary"]
        assert re.search(r"\b(by|on) \(namespace, pod\b", rule["expr"])
    window, minutes, served = re.search(
        r"\[(\d+)m\].*\[(\d+)m:1m\]\) >= (\d+)", " ".join(rule["expr"] for rule in group["rules"])
    ).groups()
    assert int(minutes) > int(window)  # a node is scraped from its first layer on, and may compile more for the others
    assert served == minutes
    backends = set(re.findall(r'backend(?:=|!=|!~)"([^"]+)"', " ".join(rule["expr"] for rule in group["rules"])))
    assert backends == {ENGINE, f"{BACKENDS[SM90].name}|{ENGINE}"}


def pod_specs() -> dict[str, dict[str, Any]]:
    """Returns the specs of all pods, by a name."""
    group = objects("leaderworkerset.yaml")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return {
        "deployment": objects("kubernetes.yaml")["Deployment"]["spec"]["template"]["spec"],
        "leader": group["leaderTemplate"]["spec"],
        "worker": group["workerTemplate"]["spec"],
    }


@pytest.mark.parametrize("spec", pod_specs().values(), ids=pod_specs())
def test_a_pod_is_restricted_and_has_time_to_end(spec: dict[str, Any]) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    (container,), beside = spec["containers"], spec.get("initContainers", [])
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    context = spec["securityContext"]
    assert user == [(str(context["runAsUser"]), str(context["runAsGroup"]))]
    assert context["runAsNonRoot"]
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in (container, *beside):
        assert each["image"] == container["image"]
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert {one["name"] for one in spec["volumes"]} == {one["name"] for one in container["volumeMounts"]}
    arguments = " ".join(container["args"]).replace("=", " ")
    drain = re.search(r"--shutdown-timeout (\d+)", arguments)
    needed = container["lifecycle"]["preStop"]["sleep"]["seconds"] + (int(drain[1]) if drain else 0)
    assert needed + 30 <= spec["terminationGracePeriodSeconds"]


def test_both_nodes_of_a_group_run_the_command_of_the_script() -> None:
    specs = pod_specs()
    leader, worker = ([*specs[name]["containers"][0]["args"]] for name in ("leader", "worker"))
    assert [*leader[:-1], "--headless"] == worker
    options = set(re.findall(r"--[a-z-]+", (DEPLOY / "two-nodes.sh").read_text().partition("set -euo")[2]))
    assert {option.partition("=")[0] for option in worker} >= options


def test_the_controller_can_make_its_headless_service() -> None:
    """Nodes find the leader by a service with the name of the set. The controller takes any that exists for its own."""
    found = objects("leaderworkerset.yaml")
    assert found["Service"]["metadata"]["name"] != found["LeaderWorkerSet"]["metadata"]["name"]


def test_a_node_without_a_server_exports_its_metrics() -> None:
    spec = pod_specs()["worker"]
    (exporter,), (engine,) = spec["initContainers"], spec["containers"]
    assert exporter["restartPolicy"] == "Always"
    (port,) = [port["containerPort"] for port in exporter["ports"]]
    assert exporter["command"][1:] == ["-m", node_metrics.__name__]
    assert exporter["args"] == ["--port", str(port)]
    assert exporter["volumeMounts"] == [mount for mount in engine["volumeMounts"] if mount["mountPath"] == "/tmp"]
    template = (DEPLOY / "leaderworkerset.yaml").read_text().partition("workerTemplate:")[2]
    assert f'prometheus.io/port: "{port}"' in template


def test_a_rollout_waits_for_the_slowest_start() -> None:
    deployment = objects("kubernetes.yaml")["Deployment"]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    start = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    assert start + deployment["minReadySeconds"] < deployment["progressDeadlineSeconds"]


def test_drained_nodes_leave_a_replica() -> None:
    for name in ("kubernetes.yaml", "sglang.yaml"):
        found = objects(name)
        kubernetes_validate.validate(found["PodDisruptionBudget"], kubernetes_validate.latest_version(), strict=True)
        budget, deployment = found["PodDisruptionBudget"]["spec"], found["Deployment"]["spec"]
        assert budget["selector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()
        assert 0 < budget["maxUnavailable"] < deployment["replicas"]


def test_the_manifest_of_sglang_has_another_command_and_no_other_difference() -> None:
    manifests = [objects(name) for name in ("kubernetes.yaml", "sglang.yaml")]
    for found in manifests:
        (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
        for field in ("name", "command", "args"):
            container.pop(field, None)
        container["env"] = [one for one in container["env"] if one["name"] not in ("HOME", "USER")]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "sglang.yaml"])
def test_the_variable_chooses_the_kernels(name: str) -> None:
    """With the option of the recipes, FP8MOE_TAKE_FP8=0 would not roll back."""
    (container,) = objects(name)["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "FP8MOE_TAKE_FP8", "value": "1"} in container["env"]
    assert not any(argument.startswith("--quantization") for argument in container["args"])
    assert re.search(r"^ +# Without --quantization fp8moe, .*\n +args:", (DEPLOY / name).read_text(), re.MULTILINE)
    text = (ROOT / "docs" / "deploy.md").read_text()
    before_the_start = " ".join(text.partition("kubectl apply -f deploy/kubernetes.yaml")[0].split())
    assert "Leave `--quantization fp8moe` of the recipes out" in before_the_start


def test_settings_and_warm_up_commands_exist() -> None:
    files = " ".join(path.read_text() for path in DEPLOY.iterdir())
    assert set(re.findall(r"\bFP8MOE_\w+", files)) <= {variable(field) for field in Settings.model_fields}
    *_, last = [line for line in DOCKERFILE.splitlines() if not line.startswith("#")]
    assert last == "RUN fp8moe-warmup verify"
    assert parse(last.split()[2:]).command == "verify"


def test_the_image_has_what_its_wheel_is_built_from() -> None:
    context = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert [name for name in context if not (ROOT / name).exists()] == []
    (script,) = re.findall(r"\.ci/\w+\.py", DOCKERFILE)
    imported = re.findall(r"^(?:from|import) (\w+)", (ROOT / script).read_text(), re.MULTILINE)
    scripts = {script, *(f".ci/{name}.py" for name in imported if (ROOT / f".ci/{name}.py").exists())}
    read = {name for script in scripts for name in re.findall(r"requirements/\w+\.txt", (ROOT / script).read_text())}
    assert scripts | read <= set(context)


def built(path: Path, version: str) -> tuple[int, str, str]:
    """Run the command of the stage `build` with programs that print what they get. Returns status, output, errors."""
    for program in ("pip", "python"):
        (path / program).write_text(f'#!/bin/sh\necho "{program} $SETUPTOOLS_SCM_PRETEND_VERSION_FOR_FP8MOE_PLUGIN"\n')
        (path / program).chmod(0o755)
    (command,) = re.findall(r"^WORKDIR /src\nRUN ((?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    environment = {"PATH": f"{path}:{os.environ['PATH']}", "VERSION": version}
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_the_wheel_of_an_image_has_the_version_given(tmp_path: Path) -> None:
    assert built(tmp_path, "0.1.0") == (0, "pip 0.1.0\npython 0.1.0\n", "")
    status, output, errors = built(tmp_path, "")
    assert (bool(status), output) == (True, "")
    assert "VERSION: is empty, see Image in docs/deploy.md" in errors


def test_every_documented_build_passes_the_version() -> None:
    text = DOCKERFILE + re.sub(r"\\\n *", "", (ROOT / "docs" / "deploy.md").read_text())
    builds = [line for line in re.findall(r"docker build -f .*", text) if "--build-context wheel=" not in line]
    assert len(builds) == 3
    assert [line for line in builds if "--build-arg VERSION" not in line] == []
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose["services"]["vllm"]["build"]["args"] == ["VERSION"]


def test_a_new_volume_belongs_to_the_user() -> None:
    (volume,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["vllm"]["volumes"]
    folder = volume.partition(":")[2]
    assert f"-v {volume} " in DOCKERFILE
    before, user, group = re.search(r"^(.*)^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE | re.DOTALL).groups()
    assert f"\nRUN install -d -o {user} -g {group} -m 775 {folder}\n" in before


def test_base_images_have_a_version_and_a_digest() -> None:
    images = [
        *re.findall(r"^ARG \w+_IMAGE=(\S+)", DOCKERFILE, re.MULTILINE),
        *re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE),
        *re.findall(r"ENGINE_IMAGE=(lmsysorg\S+)", (ROOT / "docs" / "deploy.md").read_text()),
    ]
    pinned = [image for image in images if re.search(r":v?\d+\.\d+\.\d+[\w-]*@sha256:[0-9a-f]{64}$", image)]
    assert len(pinned) == 3
    assert set(images) - set(pinned) == {"scratch", "${ENGINE_IMAGE}"}
