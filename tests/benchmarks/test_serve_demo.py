"""`make serve` leaves no process behind and says why it failed; a stand-in for the engine plays the server."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Starts a worker that ignores SIGINT, as a stuck engine would, then acts as HOW says.
SERVER = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path



def refuse():  # as vLLM does when a quantization method raises: in a validator; the traceback logged, then printed
    import traceback
    from pydantic import model_validator
    from pydantic.dataclasses import dataclass
    from fp8moe_plugin.errors import UnsupportedError

    @dataclass
    class VllmConfig:
        @model_validator(mode="after")
        def check(self):
            raise UnsupportedError("the checkpoint's activation_scheme is 'static'. Use --quantization fp8.")

    try:
        VllmConfig()
    except ValueError:
        for line in traceback.format_exc().splitlines():
            print("(EngineCore pid=1) ERROR 10-04 12:00:00 [core.py:1] " + line.replace("activation", "logged"))
        raise


stuck = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
Path("worker").write_text(str(subprocess.Popen([sys.executable, "-c", stuck]).pid))
if os.environ["HOW"] == "dies":
    raise SystemExit("the cause")
if os.environ["HOW"] == "refuses":
    refuse()
if os.environ["HOW"] == "works":
    while time.process_time() < 2.5:
        pass
    raise SystemExit("done")
if os.environ["HOW"] == "hangs":
    time.sleep(600)
print("(Worker pid=1) INFO fp8moe serves the experts: backend reference", flush=True)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(os.environ.get("METRICS", 'fp8moe_layers{backend="reference"} 2.0').encode())

    def do_POST(self):
        self.do_GET()
        self.wfile.write(json.dumps({"choices": [{"text": os.environ["ANSWER"]}]}).encode())


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""

DEMO = """
from benchmarks.engine import serve_demo
serve_demo.STOP_TIMEOUT_S = serve_demo.SHOWN_EVERY_S = 1
serve_demo.main()
"""


SERVERS = {"vllm": "vllm/entrypoints/openai/api_server.py", "sglang": "sglang/launch_server.py"}


def start(
    folder: Path, how: str, answer: str = "an answer", engine: str = "vllm", options: tuple[str, ...] = (), **more: str
) -> subprocess.Popen[str]:
    server = folder / SERVERS[engine]
    server.parent.mkdir(parents=True)
    for level in server.relative_to(folder).parents[:-1]:  # so that an installed engine does not come first
        (folder / level / "__init__.py").touch()
    server.write_text(SERVER)
    return subprocess.Popen(
        [sys.executable, "-c", DEMO, "checkpoint", "--engine", engine, *options],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PATH": "", "HOW": how, "ANSWER": answer}
        | {name.upper(): value for name, value in more.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def worker_runs(folder: Path) -> bool:
    status = Path("/proc", (folder / "worker").read_text(), "status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.parametrize("engine", SERVERS)
def test_shows_the_answer_and_stops_every_process(tmp_path: Path, engine: str) -> None:
    demo = start(tmp_path, "answers", engine=engine)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, output
    assert "an answer" in output
    assert "fp8moe serves the experts: backend reference" in output
    assert 'metric: fp8moe_layers{backend="reference"} 2.0' in output
    assert not worker_runs(tmp_path)


@pytest.mark.parametrize("engine", SERVERS)
def test_the_commands_to_type_are_those_that_were_run(tmp_path: Path, engine: str) -> None:
    demo = start(tmp_path, "answers", "Paris, Japan", engine, ("--check",))
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, output
    run = next(line for line in output.splitlines() if line.startswith("$ ")).removeprefix("$ ")
    serve, curl = re.findall(r"^    (.*--port 8000)$\n\n    (curl(?:.*\\\n)+.*)$", output, re.MULTILINE)[0]
    assert shlex.split(serve)[-2:] == ["--port", "8000"]
    assert run.partition(" --host")[0] in serve
    *_, flag, body = shlex.split(curl.replace("\\\n", " "))
    assert flag == "-d"
    assert json.loads(body)["prompt"] == "The capital of France is"


def test_a_wrong_answer_is_a_failure_where_it_is_checked(tmp_path: Path) -> None:
    demo = start(tmp_path, "answers", "Paris", options=("--check",))
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "the answer to 'Tokyo is the capital of' should be Japan, but it is 'Paris'" in output
    assert not worker_runs(tmp_path)


def test_a_server_that_does_not_count_the_layers_is_a_failure(tmp_path: Path) -> None:
    demo = start(tmp_path, "answers", metrics="vllm:num_requests_running 0.0")
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "none of its metrics begins with 'fp8moe_'" in output


def test_an_answer_without_text_is_a_failure(tmp_path: Path) -> None:
    demo = start(tmp_path, "answers", answer="")
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "the server answered the completion request with no text" in output
    assert str(tmp_path / "demo/serve.log") in output
    assert not worker_runs(tmp_path)


def test_a_server_that_dies_at_start_is_explained(tmp_path: Path) -> None:
    demo = start(tmp_path, "dies")
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "the cause" in output
    assert "exit status 1 before it was ready" in output
    assert str(tmp_path / "demo/serve.log") in output
    assert not worker_runs(tmp_path)


def test_a_server_that_logs_nothing_shows_its_cpu_time(tmp_path: Path) -> None:
    output, _ = start(tmp_path, "works").communicate(timeout=60)
    used = re.findall(r"^  starting, +\d+ s, (\d+) s of CPU time: \(no log yet\)$", output, re.MULTILINE)
    assert len(set(used)) >= 2


def test_refusal_is_shown_without_traceback(tmp_path: Path) -> None:
    output, _ = start(tmp_path, "refuses").communicate(timeout=60)
    assert "  Value error, the checkpoint's activation_scheme is 'static'. Use --quantization fp8." in output
    assert "[core.py:1]   Value error, the checkpoint's logged_scheme is 'static'." in output
    assert 'File "' not in output
    assert "VllmConfig()" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_stops_every_process(tmp_path: Path, number: signal.Signals) -> None:
    demo = start(tmp_path, "hangs")
    deadline = time.monotonic() + 30
    while not (tmp_path / "worker").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "the server is stopped" in output
    assert not worker_runs(tmp_path)
