"""Makes README.md the first page of the site, and turns links that lead out of docs/ into plain text."""

import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

README = Path(__file__).parents[2] / "README.md"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Show in the footer of each page of which version it is; a copy without git's history has none."""
    command = ["git", "-C", str(README.parent), "describe", "--tags", "--always"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if done.returncode == 0:
        config.copyright = f"Version {done.stdout.strip()}"
    return config


def on_files(files: Any, config: Any) -> Any:
    content = re.sub(r"(\]\(|src=\"|srcset=\")docs/", r"\1", README.read_text())
    files.append(File.generated(config, "index.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    folder = Path(page.file.src_uri).parent
    root = Path(config.docs_dir)

    def kept(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        inside = not target or "://" in target or (root / folder / target).resolve().is_relative_to(root.resolve())
        there = not target or "://" in target or (root / folder / target).exists()
        return match[0] if inside and there else text

    return LINK.sub(kept, markdown)
