#!/usr/bin/env bash
# A small model learns to call a calculator that has a price, on a CPU, with 0 mismatched tokens.
# It runs from any directory. More flags may follow: run.sh --num-rollout 5
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/calculator_agent}

python "$here/prepare.py" "$work/inputs"

onpolicy train \
  --custom-config-path "$here/config.yaml" \
  --environment "$here/environment.py:Calculator" \
  --hf-checkpoint "$work/inputs/model" \
  --prompt-data "$work/inputs/data.jsonl" \
  --run-dir "$work/run" \
  "$@"
