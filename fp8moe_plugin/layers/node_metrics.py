"""Exports the metrics of all workers on a machine whose engine has no server, such as one of vLLM with --headless.

    python -m fp8moe_plugin.layers.node_metrics --port 9400

Run it as the user of the workers, with the same folder for temporary files. It imports neither torch nor an engine.
"""

import argparse
import contextlib
import signal
import socket
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fp8moe_plugin.layers.metrics_folder import PREFIX, worker_files

ENDING = {signal.SIGTERM, signal.SIGINT}
SECONDS = 1  # between looks for workers


def added_up(files: Iterable[Path]) -> Iterable[Metric]:
    """Returns the sums of the metrics in workers' files."""
    families: dict[str, Metric] = {}
    totals: defaultdict[tuple[str, str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    texts = []
    for file in sorted(files):
        with contextlib.suppress(FileNotFoundError):  # its server has just ended
            texts.append(file.read_text())
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):  # timestamps cannot be added up
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                totals[family.name, sample.name, tuple(sample.labels.items())] += sample.value
    for (name, sample_name, labels), value in totals.items():
        families[name].add_sample(sample_name, dict(labels), value)
    return families.values()


class Node(Collector):
    """The sums of all workers on this machine."""

    def collect(self) -> Iterable[Metric]:
        return added_up(worker_files())


def main(arguments: list[str] | None = None) -> None:
    """Serve /metrics until SIGTERM or SIGINT.

    It answers as soon as a worker has loaded a layer, like a server that is ready, so that alerts ignore a start.
    """
    parser = argparse.ArgumentParser(prog="python -m fp8moe_plugin.layers.node_metrics", description=__doc__)
    parser.add_argument("--port", type=_free_port, required=True, help="port of /metrics, on all addresses")
    port = parser.parse_args(arguments).port
    print(f"port {port} will answer once a worker has written into {tempfile.gettempdir()}/{PREFIX}*", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    while not any(worker_files()):
        if signal.sigtimedwait(ENDING, SECONDS):
            return
    registry = CollectorRegistry()
    registry.register(Node())
    prometheus_client.start_http_server(port, registry=registry)
    signal.sigwait(ENDING)


def _free_port(text: str) -> int:
    try:
        socket.create_server(("", int(text))).close()
    except (ValueError, OverflowError, OSError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    return int(text)


if __name__ == "__main__":
    main()
