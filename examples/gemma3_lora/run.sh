#!/usr/bin/env bash
# GRPO with LoRA of Gemma-3-270M on sums, on a CPU: trained weights, 0 mismatched tokens.
# Runs from any directory. More flags may follow: run.sh --num-rollout 5
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/gemma3_lora}

python "$here/prepare.py" "$work/inputs"

onpolicy train \
  --custom-config-path "$here/config.yaml" \
  --hf-checkpoint "$work/inputs/model" \
  --prompt-data "$work/inputs/data.jsonl" \
  --eval-prompt-data "$work/inputs/eval.jsonl" \
  --run-dir "$work/run" \
  "$@"
