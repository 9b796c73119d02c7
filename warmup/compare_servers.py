"""`compare --url`: compares two running servers, wherever they run."""

import datetime
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fp8moe_plugin.compare.engine import WINDOW
from fp8moe_plugin.compare.measure import Cells
from fp8moe_plugin.compare.process import EngineProcess
from fp8moe_plugin.compare.result import BASELINE, CANDIDATE, CompareResult, EngineResult
from fp8moe_plugin.compare.server import LISTED, Server, windows
from fp8moe_plugin.compare.task import check_task
from warmup.compare import DEFAULT_TEXT, PROMPT, Say, cells_of, text_of
from warmup.options import Options


@dataclass(frozen=True)
class ServerComparison:
    """A comparison of two servers. Processes of this machine ask them in turns."""

    options: Options
    text: str
    cells: Cells
    result: CompareResult

    def groups(self, say: Say, logs: Path) -> Iterator[dict[str, EngineProcess]]:
        self.result.in_turns = True
        makes = {e.name: partial(Server, e.url or "", self.text, self.cells.all) for e in self.result.engines}
        yield {name: EngineProcess(make, {}, logs / f"{name}.log") for name, make in makes.items()}
        for engine in self.result.engines:
            engine.ready_s = None  # the server was ready before


def prepare_servers(options: Options) -> ServerComparison:
    """Returns the comparison that a command line describes, with a result that has no figures yet.

    Raises:
        UnsupportedError: the text or the task cannot be used.
    """
    text = text_of(options.text)
    windows(text)
    if options.task:
        check_task(options.task)
    result = CompareResult(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        gpu=None,
        vllm=None,
        model=None,
        twin=None,
        parallel=None,
        text=str(options.text or DEFAULT_TEXT),
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        window_tokens=WINDOW,
        listed_tokens=LISTED,
        prompt_tokens=PROMPT,
        task=options.task,
        engines=[
            EngineResult(name=CANDIDATE, url=options.url),
            EngineResult(name=BASELINE, url=options.baseline),
        ],
    )
    return ServerComparison(options, text, cells_of(options.sequences), result)
