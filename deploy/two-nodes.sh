#!/usr/bin/env bash
# One model over two nodes of eight GPUs each, with vLLM's own multiprocessing launcher. On each of them:
#
#     bash two-nodes.sh 0 10.0.0.1 moonshotai/Kimi-K2-Instruct --trust-remote-code  # the first, which answers requests
#     bash two-nodes.sh 1 10.0.0.1 moonshotai/Kimi-K2-Instruct --trust-remote-code  # the second
#
# What follows the model goes to vllm serve, such as --max-model-len; Kimi-K2's tokenizer is code of its repository.
# Both need the kernels: those of a wheel that `make wheel` built, or one bundle, named by FP8MOE_BUNDLE:
# fp8moe-warmup bundle --model MODEL --tp 16 --bundle kernels.tar
# The first exports the metrics of its own workers. To export those of the second, at port 9400, run there, too:
# python -m fp8moe_plugin.layers.node_metrics --port 9400
set -euo pipefail
rank=${1:?rank of this node, 0 or 1} first=${2:?address of node 0} model=${3:?folder or id of the model}
[[ $rank = [01] ]] || { echo "the rank of this node is 0 or 1, not $rank" >&2; exit 2; }
export FP8MOE_JIT=forbid
options=(--quantization fp8moe --tensor-parallel-size 16 --nnodes 2 --node-rank "$rank" --master-addr "$first")
[ "$rank" = 0 ] || options+=(--headless)
exec vllm serve "$model" "${options[@]}" "${@:4}"
