#!/usr/bin/env bash
# Qwen3-4B with low-rank adapters beside every linear of its layers on DAPO-Math-17k, true on-policy, on
# one H100 or H200, which FSDP2's rank and SGLang's server share, each in its turn. It runs from any directory.
# More flags may follow: run_qwen3_4b_lora.sh --num-rollout 5
#
#   HF_CHECKPOINT=/models/Qwen3-4B PROMPT_DATA=/data/dapo-math-17k.jsonl run_qwen3_4b_lora.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export NUM_TRAINERS=1 NUM_ENGINES=1
export WORK_DIR=${WORK_DIR:-runs/true_on_policy_qwen3_4b_lora}

exec "$here/run_qwen3_4b.sh" \
  --lora-rank 32 --lr 1e-5 \
  "$@"
