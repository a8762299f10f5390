#!/usr/bin/env bash
# Qwen3-30B-A3B (128 experts) on DAPO-Math-17k, true on-policy, on one host with 8 H200: 8 FSDP2 ranks, which
# share 480 GB of weights, gradients and optimizer state, and a server on each of their GPUs. Runs from
# any directory. More flags may follow: run_qwen3_30b_a3b.sh --num-rollout 5
#
#   HF_CHECKPOINT=/models/Qwen3-30B-A3B PROMPT_DATA=/data/dapo-math-17k.jsonl run_qwen3_30b_a3b.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${HF_CHECKPOINT:?must name a local Hugging Face checkpoint}"
: "${PROMPT_DATA:?must name a .jsonl or .parquet file of prompts}"
num_trainers=${NUM_TRAINERS:-8}
num_engines=${NUM_ENGINES:-8}
work=${WORK_DIR:-runs/true_on_policy_qwen3_30b_a3b}

flags=(
  --custom-config-path "$here/config.yaml"
  --hf-checkpoint "$HF_CHECKPOINT"
  --prompt-data "$PROMPT_DATA"
  --actor-num-gpus-per-node "$num_trainers"
  --rollout-num-engines "$num_engines"
  --max-tokens-per-gpu 8192
  --run-dir "$work/run"
  --save "$work/checkpoints" --load "$work/checkpoints"
  "$@"
)

onpolicy train "${flags[@]}"
