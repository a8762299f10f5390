#!/usr/bin/env bash
# The corrections side by side on the quickstart's sums, with a mismatch that is real on a CPU: the
# engine's weights are rounded to FP8. It runs from any directory; takes about 25 minutes on 2 cores.
#
#   run.sh                         all configurations, seeds 0 1 2
#   SEEDS="0" run.sh mis tis       some of them
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/mismatch_correction}
configs=${*:-baseline tis mis mis_normalized dc_grpo length_decay}

python "$here/../quickstart/prepare.py" "$work/inputs"
for seed in ${SEEDS:-0 1 2}; do
  for config in $configs; do
    onpolicy train \
      --custom-config-path "$here/$config.yaml" \
      --hf-checkpoint "$work/inputs/model" \
      --prompt-data "$work/inputs/data.jsonl" \
      --rm-type exact \
      --rollout-weight-format fp8_e4m3 \
      --num-rollout "${NUM_ROLLOUT:-20}" --rollout-batch-size 32 --n-samples-per-prompt 8 \
      --rollout-max-response-len 8 --max-tokens-per-gpu 4096 \
      --lr 3e-4 --lr-warmup-steps 5 --weight-decay 0 \
      --seed "$seed" \
      --run-dir "$work/$config-$seed"
  done
done
onpolicy report "$work"/*-[0-9]* --output "$work/report.html"
echo "$work/report.html"
