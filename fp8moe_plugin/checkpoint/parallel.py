"""The distribution of a model over GPUs by an engine."""

from dataclasses import dataclass

MLPS = ("mlp.", "ffn.")  # beginnings of names; the second is DeepSeek-V4's


@dataclass(frozen=True)
class Parallel:
    """The distribution of a model over GPUs.

    The experts are divided among `ep` groups of ranks, and the ranks of a group share each of its experts. In vLLM `ep`
    is 1 or the number of ranks, in SGLang any divisor of it.
    """

    tp: int = 1  # of attention and dense layers
    dp: int = 1  # of attention; the experts process the tokens of all parts
    ep: int = 1
    sglang: bool = False  # printed as options of SGLang, whose tp counts all ranks
    pp: int = 1  # stages, each of tp x dp ranks, with a part of the layers
    dense_tp1: bool = False  # SGLang's --moe-dense-tp-size 1

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def gpus(self) -> int:
        return self.ranks * self.pp

    @property
    def sharing(self) -> int:
        """The number of ranks that share each expert."""
        return self.ranks // self.ep

    def dense_ranks(self, layer: str) -> int:
        """Returns the number of ranks that share a dense layer, which can differ between MLPs and attention."""
        if self.dp == 1 or not layer.startswith(MLPS):
            return self.tp
        shared = layer.partition(".")[2].startswith("shared")
        if self.sglang:  # DP attention: MLPs get the tokens of all parts
            return 1 if self.dense_tp1 and not shared else self.ranks
        return 1 if shared and self.ep > 1 else self.tp  # vLLM gives each rank a part of the tokens instead

    def __str__(self) -> str:
        """Returns the command-line options of `fp8moe-warmup` for it."""
        if self.sglang:
            parts = [f"--tp-size {self.ranks}"]
            parts += [f"--dp-size {self.dp} --enable-dp-attention"] if self.dp > 1 else []
            parts += ["--moe-dense-tp-size 1"] if self.dense_tp1 else []
            parts += [f"--pp-size {self.pp}"] if self.pp > 1 else []
            return " ".join(parts + ([f"--ep-size {self.ep}"] if self.ep > 1 else []))
        parts = [f"--tp {self.tp}"]
        parts += [f"--pp {self.pp}"] if self.pp > 1 else []
        parts += [f"--dp {self.dp}"] if self.dp > 1 else []
        parts += [f"--ep {self.ep}"] if self.ep > 1 else []
        return " ".join(parts)
