"""The file of a measurement: when it was taken and on what, then what was seen."""

import datetime
import json
from pathlib import Path
from typing import Any

import torch


def write_report(path: Path, results: dict[str, Any]) -> None:
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    path.write_text(json.dumps(about | results, indent=1) + "\n")
