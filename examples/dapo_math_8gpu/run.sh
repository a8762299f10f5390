#!/usr/bin/env bash
# GRPO on DAPO-Math-17k with Qwen3-4B on one host with 8 GPUs, which FSDP2's ranks and SGLang's
# servers share, each in its turn. It runs from any directory. More flags may follow: run.sh --num-rollout 5
#
#   HF_CHECKPOINT=/models/Qwen3-4B PROMPT_DATA=/data/dapo-math-17k.jsonl examples/dapo_math_8gpu/run.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${HF_CHECKPOINT:?must name a local Hugging Face checkpoint}"
: "${PROMPT_DATA:?must name a .jsonl or .parquet file of prompts}"
num_trainers=${NUM_TRAINERS:-8}
num_engines=${NUM_ENGINES:-8}
work=${WORK_DIR:-runs/dapo_math_8gpu}

flags=(
  --custom-config-path "$here/config.yaml"
  --hf-checkpoint "$HF_CHECKPOINT"
  --prompt-data "$PROMPT_DATA"
  --actor-num-gpus-per-node "$num_trainers"
  --rollout-num-engines "$num_engines"
  --run-dir "$work/run"
  --save "$work/checkpoints" --load "$work/checkpoints"
  "$@"
)

onpolicy train "${flags[@]}"
