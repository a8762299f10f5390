#!/usr/bin/env bash
# The quickstart's sums with Megatron-core as the trainer: two tensor-parallel ranks, an engine whose
# weights are rounded to FP8, and the mismatch between them corrected by MIS. It runs from any directory, on
# a CPU; more flags may follow: run_megatron.sh --num-rollout 5
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/mismatch_correction_megatron}

python "$here/../quickstart/prepare.py" "$work/inputs"

flags=(
  --train-backend megatron --megatron-tp 2 --actor-num-ranks-per-node 2
  --use-tis --custom-config-path "$here/mis.yaml"
  --hf-checkpoint "$work/inputs/model"
  --prompt-data "$work/inputs/data.jsonl"
  --rm-type exact
  --rollout-weight-format fp8_e4m3
  --num-rollout 20 --rollout-batch-size 32 --n-samples-per-prompt 8
  --rollout-max-response-len 8 --max-tokens-per-gpu 4096
  --lr 3e-4 --lr-warmup-steps 5 --weight-decay 0
  --run-dir "$work/run"
  "$@"
)

onpolicy train "${flags[@]}"
