"""Where a checkpoint's description is: a folder, or on the Hugging Face hub, of which only small files are fetched."""

import re
from pathlib import Path

from fp8moe_plugin.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
FILES = ["config.json", "model.safetensors.index.json"]


def checkpoint_folder(model: str) -> Path:
    """The folder that holds the checkpoint's config.json.

    Args:
        model: a folder, or the id of a model on the hub, fetched into huggingface_hub's cache.
    Raises:
        CheckpointError: there is no such folder, and no such model or no way to the hub.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if not HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model!r} is neither a folder nor the id of a model on the hub (organisation/name).")
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=FILES))
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"There is no folder {model!r} here, and the hub does not give a model of this name: {reason}. "
            "Check the name, HF_TOKEN and the network, or give the folder of a downloaded checkpoint."
        ) from error
