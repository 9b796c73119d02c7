"""Print the section of CHANGELOG.md about a version, such as 0.1.0. Fails if there is none.

python .ci/release_notes.py 0.1.0
"""

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def section(text: str, version: str) -> str:
    found = re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    if found is None or not found[1].strip():
        sys.exit(f"{CHANGELOG.name} has no section `## [{version}] - YYYY-MM-DD`. Rename [Unreleased] before you tag.")
    return found[1].strip()


if __name__ == "__main__":
    print(section(CHANGELOG.read_text(), sys.argv[1]))
