"""What workers have loaded, as Prometheus metrics beside vLLM's at the server's /metrics.

Each worker counts for itself, in another process than the server. With several API servers vLLM sets up the way in
which prometheus_client adds up processes (PROMETHEUS_MULTIPROC_DIR), and these counters take part in it. With one, the
default, it does not; to do it in its place would change vLLM's own metrics. There each worker writes a text file into a
folder of the server, which adds them up when it is asked.
"""

import functools
import logging
import multiprocessing
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fp8moe_plugin.jit.launcher import LoadCounts
from fp8moe_plugin.jit.lookup import Origin, compile_times
from fp8moe_plugin.layers.vllm.metrics_folder import PREFIX, hold_lock, remove_stale_folders
from fp8moe_plugin.logs import log_once

FOLDER = "_FP8MOE_METRICS"  # names the folder to the processes that the server starts; no setting
BY_PROMETHEUS = "PROMETHEUS_MULTIPROC_DIR"

REGISTRY = CollectorRegistry()  # of this process alone
HITS = Counter("fp8moe_kernel_hits", "Kernels that workers did not have to compile", ["source"], registry=REGISTRY)
MISSES = Counter("fp8moe_kernel_misses", "Kernels that workers compiled", registry=REGISTRY)
SECONDS = Counter("fp8moe_compile_seconds", "Seconds that workers took to compile kernels", registry=REGISTRY)
LAYERS = Gauge(
    "fp8moe_layers",
    "Mixture-of-experts layers that workers serve",
    ["backend", "layout"],
    registry=REGISTRY,
    multiprocess_mode="sum",
)
for _source in (Origin.BUNDLE, Origin.CACHE):
    HITS.labels(_source.value)  # is 0 before it is anything else

_told = LoadCounts()  # what the counters hold; the seconds are those of the compiler
_layers: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # a layer loaded again is no other layer


def count_layer(name: str, backend: str, layout: str) -> None:
    """A layer of experts of this process is ready; to be told by `tell`."""
    layers = _layers[backend, layout]
    layers.add(name)
    LAYERS.labels(backend, layout).set(len(layers))


def tell(kernels: LoadCounts) -> None:
    """Bring the counters up to what this process has loaded, and show them to the server."""
    for source in (Origin.BUNDLE, Origin.CACHE):
        HITS.labels(source.value).inc(kernels.origins[source] - _told.origins[source])
    MISSES.inc(kernels.origins[Origin.COMPILER] - _told.origins[Origin.COMPILER])
    SECONDS.inc(sum(compile_times) - _told.seconds)
    _told.origins, _told.seconds = kernels.origins.copy(), sum(compile_times)
    if BY_PROMETHEUS in os.environ:
        return
    folder = os.environ.get(FOLDER)
    if folder is None:
        log_once(logging.INFO, "the kernels of this process are not counted at /metrics: no server here shows them")
        return
    try:
        prometheus_client.write_to_textfile(str(Path(folder, f"{os.getpid()}.prom")), REGISTRY)
    except OSError as error:
        log_once(logging.WARNING, f"the kernels of this process are not counted at /metrics: {error}")


@functools.cache  # once is enough
def expose() -> None:
    """Show, beside the metrics of this process, those of the workers that it will start.

    Called wherever a config is made, which workers do too, of a draft model. vLLM starts them by `multiprocessing`; a
    process started in another way is a server of its own, also below one that has a folder.
    """
    if BY_PROMETHEUS in os.environ or (FOLDER in os.environ and multiprocessing.parent_process()):
        return
    try:
        remove_stale_folders()
        folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        lock = hold_lock(Path(folder.name))
    except OSError as error:
        log_once(logging.WARNING, f"kernels are not counted at /metrics: {error}")
        return
    os.environ[FOLDER] = folder.name
    prometheus_client.REGISTRY.register(Workers(folder, lock))


class Workers(Collector):
    """The metrics in a folder's files, added up; the folder goes with the process."""

    def __init__(self, folder: tempfile.TemporaryDirectory[str], lock: int) -> None:
        self.folder = folder
        self.lock = lock  # open until the process ends, which is how other servers know that it runs

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        totals: defaultdict[tuple[str, str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        for file in sorted(Path(self.folder.name).glob("*.prom")):
            for family in text_string_to_metric_families(file.read_text()):
                if family.name.endswith("_created"):  # of one process
                    continue
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    totals[family.name, sample.name, tuple(sample.labels.items())] += sample.value
        for (name, sample_name, labels), value in totals.items():
            families[name].add_sample(sample_name, dict(labels), value)
        return families.values()
