#!/usr/bin/env bash
# One run of the study: train.sh ARM [flags]. ARM is a file in arms/. Variables: FORMAT (of the engine's
# weights; the arm `aligned` has none), SEED, NUM_ROLLOUT, ESTIMATOR, WORK_DIR, RUN_DIR.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/collapse}
arm=$1
shift

python "$here/make_inputs.py" "$work/inputs"
rounding=(--rollout-weight-format "${FORMAT:-int3}")
if [ "$arm" = aligned ]; then rounding=(); fi
exec onpolicy train \
  --custom-config-path "$here/arms/$arm.yaml" \
  --hf-checkpoint "$work/inputs/model" \
  --prompt-data "$work/inputs/data.jsonl" --no-shuffle \
  --rm-type exact \
  "${rounding[@]}" \
  --num-rollout "${NUM_ROLLOUT:-160}" --rollout-batch-size 48 --n-samples-per-prompt 2 \
  --rollout-max-response-len 14 --max-tokens-per-gpu 4096 \
  --advantage-estimator "${ESTIMATOR:-reinforce_plus_plus}" --lr 5e-4 --lr-warmup-steps 5 --weight-decay 0 \
  --seed "${SEED:-0}" \
  --run-dir "${RUN_DIR:-$work/$arm}" \
  "$@"
