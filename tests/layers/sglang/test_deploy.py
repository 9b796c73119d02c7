"""The options and the metrics of SGLang in deploy/ and docs/deploy.md."""

import argparse
import re
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.observability import metrics_collector
from sglang.srt.server_args import ServerArgs

from tests.deploy.manifests import objects

pytestmark = pytest.mark.seam
ROOT = Path(__file__).parents[3]


def args_of_one_node() -> list[str]:
    (container,) = objects("sglang.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python3", "-m", "sglang.launch_server"]
    return container["args"]


def args_of_several_nodes() -> list[str]:
    listed = re.findall(r"^    - (--\S+)$", (ROOT / "docs/deploy.md").read_text(), re.MULTILINE)
    return [arg.replace("$(LWS_GROUP_SIZE)", "2").replace("$(LWS_WORKER_INDEX)", "1") for arg in listed]


@pytest.mark.parametrize("args", [args_of_one_node, args_of_several_nodes])
def test_sglang_has_the_options(args) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    given = [arg for arg in args() if arg != "--quantization=fp8moe"]  # the plugin adds it to the choices
    options, unknown = parser.parse_known_args(given)
    assert unknown == []
    assert (options.port, options.host, options.enable_metrics) == (8000, "0.0.0.0", True)
    assert options.tp_size == 8 * options.nnodes


def test_sglang_exports_what_the_dashboard_shows() -> None:
    shown = set(re.findall(r"sglang:\w+", (ROOT / "deploy/grafana.json").read_text()))
    exported = set(re.findall(r"sglang:\w+", Path(metrics_collector.__file__).read_text()))
    assert len(shown) == 6
    assert {name.removesuffix("_bucket") for name in shown} <= exported
