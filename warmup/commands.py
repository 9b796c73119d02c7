"""The commands that serve a model with a split."""

from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.quoting import shell_word
from warmup.target import MAX_TOKENS, NODE, Target

REMOTE_CODE = "--trust-remote-code"


def commands(
    way: Parallel, target: Target, source: str, remote_code: bool = False, environment: str = ""
) -> tuple[str, str]:
    """Returns the commands that serve a model with this split in vLLM and in SGLang.

    Args:
        environment: the variables that they need, such as "A=1 ".
    """
    model = shell_word(source)
    whole = way.ep > 1
    vllm = [f"{environment}vllm serve {model} --quantization fp8moe --tensor-parallel-size {way.tp}"]
    vllm += [f"--pipeline-parallel-size {way.pp}"] * (way.pp > 1) + [f"--data-parallel-size {way.dp}"] * (way.dp > 1)
    vllm += ["--enable-expert-parallel"] * whole
    vllm += [f"--gpu-memory-utilization {target.utilization:g}"]
    sglang = [f"{environment}python -m sglang.launch_server --model-path {model} --quantization fp8moe"]
    sglang += [f"--tp-size {way.ranks}"]
    sglang += [f"--pp-size {way.pp}"] * (way.pp > 1)
    sglang += [f"--dp-size {way.dp} --enable-dp-attention"] * (way.dp > 1)
    sglang += ["--moe-dense-tp-size 1"] * way.dense_tp1 + [f"--ep-size {way.ep}"] * whole
    if (nodes := way.gpus // NODE) > 1:
        vllm += [_nodes(way, nodes)]
        sglang += [f"--nnodes {nodes} --node-rank RANK --dist-init-addr ADDRESS:20000"]
    if target.fp8_cache:
        vllm, sglang = [*vllm, "--kv-cache-dtype fp8"], [*sglang, "--kv-cache-dtype fp8_e4m3"]
    if target.max_model_len:
        vllm += [f"--max-model-len {target.max_model_len}"]
        sglang += [f"--context-length {target.max_model_len}"]
    if target.max_tokens != MAX_TOKENS:
        tokens = target.tokens(way)
        vllm += [f"--max-num-batched-tokens {tokens}"]
        sglang += [f"--chunked-prefill-size {tokens * way.dp}"]
    if remote_code:
        vllm, sglang = [*vllm, REMOTE_CODE], [*sglang, REMOTE_CODE]
    return " ".join(vllm), " ".join(sglang)


def _nodes(way: Parallel, nodes: int) -> str:
    """Returns vLLM's options for each of several nodes; RANK counts nodes from 0, ADDRESS is the first node's."""
    if way.dp == 1:
        return f"--nnodes {nodes} --node-rank RANK --master-addr ADDRESS"
    local = way.dp // nodes
    start = f"$(({local} * RANK))" if local > 1 else "RANK"
    return f"--data-parallel-size-local {local} --data-parallel-start-rank {start} --data-parallel-address ADDRESS"
