"""A task of lm-eval, the package `lm_eval`, answered by a running server."""

import numbers
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import numpy as np

from fp8moe_plugin.compare.intervals import Floats
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown_text

CLIENTS = 32  # requests in flight
TIMEOUT_S = 600  # for each request

Scores = dict[str, Floats]  # by metric: the score of each document, [documents]


def check_task(task: str) -> None:
    """Load a task, which downloads its documents if it needs to.

    Raises:
        UnsupportedError: lm-eval is not installed, cannot load the task, or would need the model's tokenizer for it.
    """
    if find_spec("lm_eval") is None:
        raise UnsupportedError(
            "--task needs lm-eval, which is not installed. Run `pip install 'lm_eval[api]>=0.4.13'`."
        )
    from lm_eval.tasks import TaskManager

    try:
        found = TaskManager().load([task])["tasks"]
    except Exception as error:  # of any class: its own, or those of data sets and downloads
        raise UnsupportedError(f"--task {shown_text(task)} cannot be loaded: {shown_text(error)}") from error
    others = sorted({one.OUTPUT_TYPE for one in found.values()} - {"generate_until"})
    if others:
        raise UnsupportedError(
            f"--task {shown_text(task)} does not generate text ({', '.join(others)}), which needs the model's "
            "tokenizer here. Choose a task that generates its answers, such as gsm8k, or run lm-eval itself."
        )


def evaluate(task: str, url: str, model: str) -> Scores:
    """Returns the scores of a server with OpenAI's completions."""
    import lm_eval

    server = {"model": model, "base_url": f"{url}/v1/completions", "num_concurrent": CLIENTS, "timeout": TIMEOUT_S}
    arguments = server | {"tokenizer_backend": None}  # prompts are sent as text
    done = lm_eval.simple_evaluate("local-completions", model_args=arguments, tasks=[task], bootstrap_iters=0)
    return scores(done["samples"])


def scores(samples: dict[str, list[dict[str, Any]]]) -> Scores:
    """Returns the scores of all documents, from lm-eval's samples by the name of the subtask.

    A metric that is not one number for each document is left out, so that the scores of two servers can be paired.
    """
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for _, documents in sorted(samples.items()):
        for document in sorted(documents, key=lambda document: document["doc_id"]):
            way = "" if document["filter"] == "none" else f", {document['filter']}"
            for metric in document["metrics"]:
                found[f"{metric}{way}"].append(document[metric])
    one_number = {metric: all(isinstance(value, numbers.Real) for value in values) for metric, values in found.items()}
    return {metric: np.array(values, np.float64) for metric, values in found.items() if one_number[metric]}
