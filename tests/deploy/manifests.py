"""The objects of deploy/'s manifests."""

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def objects(manifest: str) -> dict[str, Any]:
    """Returns the objects of a manifest by kind. It has one of each."""
    found = list(yaml.safe_load_all((DEPLOY / manifest).read_text()))
    by_kind = {one["kind"]: one for one in found}
    assert len(by_kind) == len(found)
    return by_kind
