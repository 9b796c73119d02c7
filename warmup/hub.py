"""Downloads a model's config.json from the Hugging Face hub. An unreachable hub is reported at once."""

import importlib.util
import socket
import sys
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from fp8moe_plugin.errors import CheckpointError
from fp8moe_plugin.quoting import shown, shown_text

PATIENCE_S = 4  # for a connection, including the look-up of the name
PORTS = {"http": 80, "https": 443}


def download_config(model: str, revision: str | None, folder: Path | None) -> Path:
    """Returns the folder with a model's config.json, which is downloaded if it is not cached.

    Args:
        model: its id.
        revision: a branch, tag or commit; None for the newest.
        folder: where downloads are kept; None for huggingface_hub's cache.
    Raises:
        CheckpointError: it cannot be downloaded.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointError(
            f"There is no folder {shown(model)}, and the hub's client is not installed, which the extra `hub` of this "
            "package has. Run `pip install huggingface_hub`, or give a folder with the model's config.json."
        )
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    problem = None if offline else _unreachable(huggingface_hub.constants.ENDPOINT)
    if problem:
        return _downloaded_before(model, revision, folder, problem)
    try:
        return Path(huggingface_hub.hf_hub_download(model, "config.json", revision=revision, cache_dir=folder)).parent
    except Exception as error:  # errors of huggingface_hub or of its HTTP library
        reason = "; ".join(f"{type(e).__name__}: {str(e).strip()[:300]}" for e in (error, error.__cause__) if e)
        raise CheckpointError(
            f"There is no folder {shown(model)}, and its config.json cannot be downloaded from the hub: {reason}. "
            "Check the name, HF_TOKEN and the network, or give the folder of a downloaded checkpoint."
        ) from error


def _downloaded_before(model: str, revision: str | None, folder: Path | None, problem: str) -> Path:
    """Returns the folder with config.json of an earlier download. `hf_hub_download` would wait for the hub again."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=folder, revision=revision)
    except HFValidationError:  # no model can have this name
        found = None
    if not isinstance(found, str):
        raise CheckpointError(
            f"{problem}, and there is no folder {shown(model)}. Check the network, HF_ENDPOINT and the proxy "
            "(HTTPS_PROXY), or give a folder with the model's config.json, which is all that is needed."
        )
    print(f"warning: {problem}: the config.json that was downloaded before is used", file=sys.stderr)
    return Path(found).parent


def _unreachable(endpoint: str) -> str | None:
    """Returns why the hub cannot be reached, or None if it, or the proxy in front of it, accepts a connection."""
    address = urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(address.scheme)
    if proxy and not urllib.request.proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            port = address.port or PORTS.get(address.scheme, 443)
            socket.create_connection((address.hostname, port), PATIENCE_S).close()
        except TimeoutError:
            pass  # reported below, with one message for both timeouts
        except (OSError, ValueError) as error:  # ValueError for a port or a name that cannot be one
            outcome.append(str(error))
        else:
            outcome.append(None)

    # A thread, because no timeout ends the look-up of a name.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    reason = outcome[0] if outcome else f"no answer within {PATIENCE_S} s"
    return None if reason is None else f"The hub at {shown_text(endpoint)} is unreachable ({shown_text(reason)})"
