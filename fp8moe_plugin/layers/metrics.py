"""Prometheus metrics of the workers' kernels and layers, exported next to the engine's own at the server's /metrics.

Workers count in processes of their own. With several API servers, vLLM enables the multiprocess mode of
prometheus_client (PROMETHEUS_MULTIPROC_DIR), which aggregates these counters, too. With one server, the default, vLLM
does not enable it, and enabling it here would change vLLM's own metrics. In that case each worker writes a text file
into a folder of the server, and the server adds the files up whenever it is scraped. SGLang always uses the
multiprocess mode if it exports metrics (--enable-metrics).
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
from prometheus_client.registry import Collector

from fp8moe_plugin.jit.driver import LoadCounts
from fp8moe_plugin.jit.lookup import Origin, compile_times
from fp8moe_plugin.launches.tuning_file import plugin_version
from fp8moe_plugin.layers.metrics_folder import PREFIX, WORKER_FILES, hold_lock, remove_stale_folders
from fp8moe_plugin.layers.node_metrics import added_up
from fp8moe_plugin.logs import log_once

FOLDER = "_FP8MOE_METRICS"  # passes the folder to the processes that the server starts; not a user setting
BY_PROMETHEUS = "PROMETHEUS_MULTIPROC_DIR"

REGISTRY = CollectorRegistry()  # the metrics of this process only
HITS = Counter("fp8moe_kernel_hits", "Kernels that workers did not have to compile", ["source"], registry=REGISTRY)
MISSES = Counter("fp8moe_kernel_misses", "Kernels that workers compiled", registry=REGISTRY)
SECONDS = Counter("fp8moe_compile_seconds", "Seconds that workers took to compile kernels", registry=REGISTRY)
LAYERS = Gauge(
    "fp8moe_layers",
    "Mixture-of-experts layers that workers serve; backend `engine`: layers of any kind left to the engine",
    ["backend", "layout"],
    registry=REGISTRY,
    multiprocess_mode="sum",
)
BUILD = Gauge(
    "fp8moe_build_info",
    "Workers that serve experts, by version of the plugin, compiler of the loaded kernels, and backend",
    ["version", "kernels", "backend"],
    registry=REGISTRY,
    multiprocess_mode="sum",
)
STORES = [origin for origin in Origin if origin != Origin.COMPILER]
for _source in STORES:
    HITS.labels(_source.value)  # exports 0 before the first hit

_exported = LoadCounts()  # the values of the counters; `seconds` counts compilation only
_layers: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # by name, so that a reload does not count twice


def count_layer(name: str, backend: str, layout: str) -> None:
    """Count a layer; the next `update` or `export` exports the count."""
    layers = _layers[backend, layout]
    layers.add(name)
    LAYERS.labels(backend, layout).set(len(layers))


def count_build(kernels: Iterable[str], backend: str) -> None:
    """Count this worker by the compilers of its kernels; the next `update` or `export` exports the count."""
    for compiler in kernels:
        BUILD.labels(plugin_version(), compiler, backend).set(1)


def update(kernels: LoadCounts) -> None:
    """Set the counters to the number of kernels that this process has loaded so far, and export them to the server."""
    for source in STORES:
        HITS.labels(source.value).inc(kernels.origins[source] - _exported.origins[source])
    MISSES.inc(kernels.origins[Origin.COMPILER] - _exported.origins[Origin.COMPILER])
    SECONDS.inc(sum(compile_times) - _exported.seconds)
    _exported.origins, _exported.seconds = kernels.origins.copy(), sum(compile_times)
    export()


def export() -> None:
    """Export the metrics of this process to the server."""
    if BY_PROMETHEUS in os.environ:
        return
    folder = os.environ.get(FOLDER)
    if folder is None:
        log_once(
            logging.INFO, "the kernels of this process are not counted at /metrics: it was not started by a server"
        )
        return
    try:
        prometheus_client.write_to_textfile(str(Path(folder, f"{os.getpid()}.prom")), REGISTRY)
    except OSError as error:
        log_once(logging.WARNING, f"the kernels of this process are not counted at /metrics: {error}")


@functools.cache  # only the first call has an effect
def expose() -> None:
    """Add the metrics of this process's future workers to its own registry.

    Called whenever a config is created. Workers do that too, for a draft model, and must not become servers. vLLM
    starts them with `multiprocessing`; a process started in any other way is a server, even if its parent is one.
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
    """The sums of the metrics in the folder's files. The folder is removed when the process exits."""

    def __init__(self, folder: tempfile.TemporaryDirectory[str], lock: int) -> None:
        self.folder = folder
        self.lock = lock  # open until the process ends: other servers see that this one is running

    def collect(self) -> Iterable[Metric]:
        return added_up(Path(self.folder.name).glob(WORKER_FILES))
