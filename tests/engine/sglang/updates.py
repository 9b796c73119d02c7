"""A model of SGLang's in this process, loaded and updated by SGLang's own functions, without an engine around it.

    python -m tests.engine.sglang.updates FOLDER

Each line of standard input is a command in JSON, a list of its name and arguments. It is answered by a line of JSON:
what the function has returned, or `{"raised": its error}`. See `Host` for the commands.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers import dp_attention
from sglang.srt.managers.scheduler_components import weight_updater as answers
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import ShardedStateLoader, get_model_loader
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from tests.layers.sglang.process import start

DERIVED = ("w_kc", "w_vc", "w_scale")  # attributes of SGLang's attention, derived from weights
SESSIONS = hasattr(WeightUpdater, "end_weight_update")


def digests(model: Any) -> dict[str, str]:
    """Of all that a step reads."""
    tensors = dict(model.named_parameters())
    for name, module in model.named_modules():
        derived = {attribute: getattr(module, attribute, None) for attribute in DERIVED}
        tensors |= {f"{name}.{a}": t for a, t in derived.items() if isinstance(t, torch.Tensor)}
    return {name: sha256(t.detach().reshape(-1).view(torch.uint8).numpy()).hexdigest() for name, t in tensors.items()}


class Host:
    """A model and the parts of an engine that update it."""

    def __init__(self, folder: Path, arguments: ServerArgs) -> None:
        self.folder, self.arguments = folder, arguments
        self.kept: dict[str, dict[str, torch.Tensor]] = {}

    def start(self, checkpoint: str, load_format: str = "auto") -> None:
        """Load the model, and do what a runner does next."""
        config = ModelConfig(str(self.folder / checkpoint), quantization="fp8moe", dtype="bfloat16")
        loader = get_model_loader(LoadConfig(load_format=load_format), config)
        self.model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        runner: Any = SimpleNamespace(model=self.model, model_config=config, server_args=self.arguments)
        ModelRunner.check_quantized_moe_compatibility(runner)
        parts = dict.fromkeys(f.name for f in fields(WeightUpdater) if f.name != "_model_update_group")
        parts |= {"tp_rank": 0, "device": "cpu", "gpu_id": 0, "model_config": config, "custom_weight_loaders": {}}
        parts |= {
            "get_model": lambda: self.model,
            "get_model_runner": lambda: runner,
            "update_model_fields": lambda *_, **__: None,
        }
        runner.weight_updater = self.updater = WeightUpdater(**parts)
        self.runner = runner
        self.manager: Any = object.__new__(answers.SchedulerWeightUpdaterManager)
        self.manager.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
        self.manager.draft_worker, self.manager.tp_cpu_group = None, torch.distributed.group.WORLD
        if SESSIONS:
            self.manager._session = None

    def save(self, checkpoint: str) -> None:
        """For the load format `sharded_state`."""
        ShardedStateLoader.save_model(self.model, str(self.folder / checkpoint))

    def step(self) -> Any:
        return ModelRunner.forward(self.runner, None)

    def disk(self, checkpoint: str) -> Any:
        return self.updater.update_weights_from_disk(str(self.folder / checkpoint), "auto")

    def begin(self) -> None:
        if SESSIONS:
            assert self.manager.begin_weight_update(SimpleNamespace(selector="all")).success

    def tensors(self, checkpoint: str, pattern: str) -> Any:
        """Pass the tensors whose names match, in one call."""
        return self.updater.update_weights_from_tensor(self.read(checkpoint, pattern))

    def flattened(self, checkpoint: str, pattern: str) -> Any:
        """Pass the same as a trainer does: a bucket for each layer, flattened into one tensor."""
        answer = None
        for _, named in groupby(self.read(checkpoint, pattern), lambda named: named[0].split(".")[:3]):
            bucket = FlattenedTensorBucket(list(named))
            content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            answer = self.updater.update_weights_from_tensor(content, "flattened_bucket")
            if not answer[0]:
                break
        return answer

    def ipc(self, checkpoint: str, pattern: str, tensors: int | None) -> Any:
        """Returns the same through checkpoint-engine's worker. `tensors`: how many, before the connection breaks."""
        named = self.read(checkpoint, pattern)
        weights = iter(named) if tensors is None else broken(named[:tensors])
        return self.updater.update_weights_from_ipc(SimpleNamespace(zmq_handles={"this": weights}))

    def read(self, checkpoint: str, pattern: str) -> list[tuple[str, torch.Tensor]]:
        shards = (self.folder / checkpoint).glob("*.safetensors")
        named = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
        return [(name, tensor) for name, tensor in sorted(named.items()) if re.search(pattern, name)]

    def keep(self, name: str) -> None:
        """Remember the parameters, for `direct`."""
        self.kept[name] = {parameter: t.detach().clone() for parameter, t in self.model.named_parameters()}

    def direct(self, name: str, pattern: str, dtype: str | None = None) -> Any:
        """Pass what parameters held, to be copied into those of the same names."""
        named = [(parameter, t) for parameter, t in self.kept[name].items() if re.search(pattern, parameter)]
        if dtype:
            named = [(parameter, t.to(getattr(torch, dtype))) for parameter, t in named]
        return self.updater.update_weights_from_tensor(named, "direct")

    def end(self) -> Any:
        if not SESSIONS:
            return True, ""
        answer = self.manager.end_weight_update(None)
        return answer.success, answer.message


def broken(named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from named
    raise OSError("the connection is lost")


def add_checkpoint_engine() -> None:
    """Replace checkpoint-engine by a package that passes on what SGLang is given as the address of tensors."""

    def update(context: Any, tensors: Any, device_id: Any, run: Any, post_hook: Any) -> None:
        run(tensors)
        post_hook()

    sys.modules["checkpoint_engine"] = ModuleType("checkpoint_engine")
    sys.modules["checkpoint_engine.worker"] = worker = ModuleType("checkpoint_engine.worker")
    vars(worker)["update_weights_from_ipc"] = update
    from sglang.srt.checkpoint_engine.checkpoint_engine_worker import SGLangCheckpointEngineWorkerExtensionImpl

    SGLangCheckpointEngineWorkerExtensionImpl.get_device_uuid = lambda self: "this"
    SGLangCheckpointEngineWorkerExtensionImpl.get_device_id = lambda self: 0


def main() -> None:
    folder = Path(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SGLang prints is no answer
    # Before the plugin wraps them.
    ModelRunner.forward = lambda runner, batch: digests(runner.model)
    ModelRunner.check_quantized_moe_compatibility = lambda runner: None
    load_plugins()
    add_checkpoint_engine()
    any_model = next(path for path in folder.iterdir() if (path / "config.json").exists())
    arguments = ServerArgs(model_path=str(any_model), device="cpu", quantization="fp8moe")
    start(arguments)
    if "model_config" in inspect.signature(dp_attention.initialize_dp_attention).parameters:  # older versions need it
        config = ModelConfig(str(any_model), quantization="fp8moe", dtype="bfloat16")
        dp_attention.initialize_dp_attention(arguments, config)
    host = Host(folder, arguments)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = getattr(host, command)(*arguments)
        except Exception as error:  # noqa: BLE001 - what it is, is the answer
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main()
