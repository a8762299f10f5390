#!/usr/bin/env bash
# Qwen3-32B with low-rank adapters beside every linear of its layers on DAPO-Math-17k, true on-policy, on
# one host with 8 H100 or H200: 8 FSDP2 ranks, which share the frozen base out, and on the same GPUs 4 SGLang
# servers of two. It runs from any directory. More flags may follow: run_qwen3_32b_lora.sh --num-rollout 5
#
#   HF_CHECKPOINT=/models/Qwen3-32B PROMPT_DATA=/data/dapo-math-17k.jsonl run_qwen3_32b_lora.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export NUM_TRAINERS=${NUM_TRAINERS:-8} NUM_ENGINES=${NUM_ENGINES:-4}
export WORK_DIR=${WORK_DIR:-runs/true_on_policy_qwen3_32b_lora}

exec "$here/run_qwen3_4b.sh" \
  --lora-rank 32 --lr 1e-5 \
  --sglang-tp-size 2 \
  "$@"
