"""Train a small DeepSeek-V3 on real text, on one GPU in minutes, and write it as a BF16 checkpoint that vLLM loads.

    python -m benchmarks.checkpoints.train_small_moe --text english.txt.xz --out DIR
    fp8moe-warmup convert --model DIR --out DIR-fp8
    python -m benchmarks.accuracy.perplexity --model DIR-fp8 --twin DIR --out benchmarks/results/perplexity-<date>.json

`DIR` receives the weights, config.json, a tokenizer trained on the same text, `held_out.txt` (a twentieth of the text
that is not trained on), and the report `training.json`. Without `--text` the text is Python's standard library, which
every machine has. Steps draw windows of the text at random; the learning rate follows a cosine. Weights are float32 and
products BF16; the load of the experts is balanced without an auxiliary loss (arXiv 2408.15664).

What `make serve` serves, tests/data/capitals, was made by these commands, in ten minutes on two cores:

    python -m benchmarks.checkpoints.capitals capitals.txt
    python -m benchmarks.checkpoints.train_small_moe --recipe capitals --minutes 20 --text capitals.txt --out DIR
    fp8moe-warmup convert --model DIR --out tests/data/capitals
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.checkpoints.small_moe import SmallMoE
from benchmarks.checkpoints.synthetic import YARN, Shape, ShardWriter, config, tensors
from benchmarks.checkpoints.text import default_text, read_text, split, windows
from benchmarks.checkpoints.tokenizer import write_tokenizer
from benchmarks.report import write_report
from fp8moe_plugin.errors import UnsupportedError

WINDOW = 512  # tokens
BETAS, WEIGHT_DECAY, LARGEST_GRADIENT = (0.9, 0.95), 0.1, 1.0
WARM_UP, LAST_RATE = 0.04, 0.05  # of the steps; of the learning rate
BALANCE_RATE = 2e-3
UNSCALED = YARN | {"factor": 1.0}  # the same as none, without which SGLang does not start on a CPU
HELD_OUT_TEXT = "held_out.txt"
EVALUATED = 32  # windows at once


@dataclass(frozen=True)
class Recipe:
    shape: Shape
    steps: int
    batch: int  # windows per step
    learning_rate: float
    window: int = WINDOW  # tokens


RECIPES = {
    "small": Recipe(
        Shape(
            family="deepseek_v3", hidden=512, vocab=8192, heads=16, moe_layers=5, experts=32, topk=4,
            moe_intermediate=256, dense_layers=1, dense_intermediate=1536, groups=4, topk_groups=2, q_lora=384,
        ),
        steps=1000, batch=64, learning_rate=1e-3,
    ),
    "tiny": Recipe(
        Shape(
            family="deepseek_v3", hidden=256, vocab=1024, heads=4, moe_layers=2, experts=16, topk=4,
            moe_intermediate=128, dense_layers=1, dense_intermediate=512, groups=4, topk_groups=2, q_lora=256,
        ),
        steps=300, batch=4, learning_rate=2e-3,
    ),
    "capitals": Recipe(
        Shape(
            family="deepseek_v3", hidden=256, vocab=1024, heads=4, moe_layers=1, experts=8, topk=2,
            moe_intermediate=128, dense_layers=1, dense_intermediate=256, groups=4, topk_groups=2, q_lora=128,
        ),
        steps=2500, batch=32, learning_rate=2e-3, window=24,
    ),
}  # fmt: skip


# Gates and ups have a standard deviation of about 1, so this limit cuts many.
RECIPES["clamped"] = replace(RECIPES["small"], shape=replace(RECIPES["small"].shape, swiglu_limit=1.0))


class TrainingReport(BaseModel):
    """Losses are in nats per token; `unigram_loss` uses the token frequencies of the training text, without context."""

    model_config = ConfigDict(extra="forbid")

    text_sha256: str
    text_bytes: int
    train_tokens: int
    parameters: int
    parameters_of_a_token: int  # without experts that the token does not have
    steps: int
    tokens_seen: int
    seconds: float
    tokens_per_s: float
    train_loss: float  # mean of the last steps
    held_out_tokens: int
    held_out_loss: float
    held_out_perplexity: float
    unigram_loss: float
    largest_load: float  # largest load of an expert in the last step, over the average


def token_losses(model: SmallMoE, ids: torch.Tensor) -> torch.Tensor:
    """Returns the loss of each token after the first of its window in nats, float32 [windows, length - 1]."""
    device = model.lm_head.weight.device
    losses = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for part in ids.split(EVALUATED):
            part = part.to(device)
            logits = model(part[:, :-1]).float()
            losses.append(F.cross_entropy(logits.mT, part[:, 1:], reduction="none").cpu())
    return torch.cat(losses)


def unigram_loss(train: torch.Tensor, held_out: torch.Tensor, vocab: int) -> float:
    """Nats per token of the held-out windows from the counts in the training text plus one."""
    counts = train.cpu().bincount(minlength=vocab) + 1
    return -(counts / counts.sum()).log()[held_out[:, 1:]].mean().item()


def optimizer(model: SmallMoE, learning_rate: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, fused=True)


def rate(progress: float) -> float:
    """Returns the learning rate over its maximum, for `progress` from 0 to 1."""
    if progress < WARM_UP:
        return (progress + 1e-3) / WARM_UP
    cosine = (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2
    return LAST_RATE + (1 - LAST_RATE) * cosine


def train(model: SmallMoE, recipe: Recipe, tokens: torch.Tensor, minutes: float, seed: int) -> Iterator[float]:
    """Train on tokens [n] and yield the loss of each step; when the time is up, the schedule ends early."""
    generator = torch.Generator().manual_seed(seed)
    adam = optimizer(model, recipe.learning_rate)
    offsets = torch.arange(recipe.window + 1)
    start = time.monotonic()
    for step in range(recipe.steps):
        progress = max(step / recipe.steps, (time.monotonic() - start) / (60 * minutes))
        if progress >= 1:
            return
        for group in adam.param_groups:
            group["lr"] = recipe.learning_rate * rate(progress)
        begins = torch.randint(len(tokens) - recipe.window, (recipe.batch, 1), generator=generator)
        ids = tokens[(begins + offsets).to(tokens.device)]
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
        adam.step()
        adam.zero_grad()
        for router in model.routers():
            router.balance(BALANCE_RATE)
        yield loss.item()


def write_checkpoint(folder: Path, model: SmallMoE) -> None:
    """Write config.json and the weights in BF16, named as in `benchmarks.checkpoints.synthetic`."""
    writer = ShardWriter(folder)
    for tensor in tensors(model.shape):
        value = model.weight(tensor.name).to(tensor.dtype).contiguous()
        if value.shape != tensor.shape:
            raise ValueError(f"{tensor.name} is {list(value.shape)}, a checkpoint has {list(tensor.shape)}")
        writer.add(tensor.name, value)
    writer.finish()
    about = config(model.shape, fp8=False) | {"rope_scaling": UNSCALED}
    (folder / "config.json").write_text(json.dumps(about, indent=2))


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_tokens(
    folder: Path, text: str, vocab: int, seed: int, window: int = WINDOW
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the training tokens [n] and the held-out windows. Writes tokenizer and held-out text to the folder."""
    pieces, held_out = split(text, seed)
    write_tokenizer(folder, vocab, pieces)
    (folder / HELD_OUT_TEXT).write_bytes("".join(held_out).encode())
    encoded = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch_fast(pieces)
    tokens = torch.tensor([token for piece in encoded for token in piece.ids])
    if len(tokens) <= window:
        raise UnsupportedError(f"The text has {len(tokens)} tokens to train on, a window has {window}. Give more text.")
    return tokens, windows(folder / "tokenizer.json", "".join(held_out), window)


def run(folder: Path, recipe: Recipe, text: str, minutes: float = 4, seed: int = 0) -> TrainingReport:
    """Tokenize, train, and write the checkpoint into the new `folder`; returns the report."""
    folder.mkdir(parents=True)
    shape = recipe.shape
    tokens, held_out = make_tokens(folder, text, shape.vocab, seed, recipe.window)
    unigram = unigram_loss(tokens, held_out, shape.vocab)
    print(f"{len(tokens):,} tokens to train on, {held_out.numel():,} held out, unigram loss {unigram:.3f}", flush=True)
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = SmallMoE(shape).to(device)
    start = time.monotonic()
    losses = []
    with tqdm(total=recipe.steps, desc="training", mininterval=2) as progress:
        for loss in train(model, recipe, tokens.to(device), minutes, seed):
            losses.append(loss)
            progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
            progress.update()
    seconds = time.monotonic() - start
    if len(losses) < recipe.steps:
        print(f"after {len(losses)} of {recipe.steps} steps {minutes:g} minutes had passed", flush=True)
    loads = max((router.load.max() / router.load.float().mean()).item() for router in model.routers())
    write_checkpoint(folder, model)
    held_out_loss = token_losses(model, held_out).double().mean().item()
    parameters = sum(p.numel() for p in model.parameters())
    idle = (shape.experts - shape.topk) * 3 * shape.hidden * shape.moe_intermediate * shape.moe_layers
    last = losses[-min(len(losses), 20) :]
    return TrainingReport(
        text_sha256=text_digest(text),
        text_bytes=len(text.encode()),
        train_tokens=len(tokens),
        parameters=parameters,
        parameters_of_a_token=parameters - idle,
        steps=len(losses),
        tokens_seen=len(losses) * recipe.batch * recipe.window,
        seconds=round(seconds, 1),
        tokens_per_s=round(len(losses) * recipe.batch * recipe.window / seconds, 1),
        train_loss=round(sum(last) / len(last), 4),
        held_out_tokens=held_out[:, 1:].numel(),
        held_out_loss=round(held_out_loss, 5),
        held_out_perplexity=round(math.exp(held_out_loss), 4),
        unigram_loss=round(unigram, 4),
        largest_load=round(loads, 2),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="files, .xz too, or folders of .md, .py, .rst, .txt")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint, which must not exist")
    parser.add_argument("--recipe", choices=RECIPES, default="small", help="tiny: minutes on a CPU, learns little")
    parser.add_argument("--minutes", type=float, default=4, help="time limit of the steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.out.exists():
        parser.error(f"{args.out} is already there. Delete it, or give another --out.")
    try:
        text = read_text(args.text or [default_text()])
        report = run(args.out, RECIPES[args.recipe], text, args.minutes, args.seed)
    except (UnsupportedError, OSError) as error:
        parser.error(str(error))
    write_report(args.out / "training.json", report.model_dump())
    print(
        f"{args.out}: held-out loss {report.held_out_loss:.4f} (perplexity {report.held_out_perplexity:.3f}), "
        f"training loss {report.train_loss:.4f}, unigram loss {report.unigram_loss:.4f}; {report.steps} steps, "
        f"{report.tokens_seen:,} tokens in {report.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
