#!/usr/bin/env bash
# One run of the study: train.sh ARM [flags]. ARM is a file in arms/. Variables: FORMAT (of the engine's
# weights; the arm `aligned` has none), SEED, NUM_ROLLOUT, ESTIMATOR, DIGITS (of a problem), EXPERTS (of
# the model), MODEL (seed of the model), WORK_DIR, RUN_DIR.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/collapse}
arm=$1
shift

digits=${DIGITS:-12}
inputs=$work/inputs${DIGITS:+-$DIGITS-digits}${EXPERTS:+-$EXPERTS-experts}${MODEL:+-model-$MODEL}
python "$here/make_inputs.py" "$inputs" "$digits" "${EXPERTS:-0}" "${MODEL:-0}"
rounding=(--rollout-weight-format "${FORMAT:-int3}")
if [ "$arm" = aligned ]; then rounding=(); fi
exec onpolicy train \
  --custom-config-path "$here/arms/$arm.yaml" \
  --hf-checkpoint "$inputs/model" \
  --prompt-data "$inputs/data.jsonl" --no-shuffle \
  --rm-type exact \
  "${rounding[@]}" \
  --num-rollout "${NUM_ROLLOUT:-160}" --rollout-batch-size 48 --n-samples-per-prompt 2 \
  --rollout-max-response-len $((digits + 2)) --max-tokens-per-gpu 4096 \
  --advantage-estimator "${ESTIMATOR:-reinforce_plus_plus}" --lr 5e-4 --lr-warmup-steps 5 --weight-decay 0 \
  --seed "${SEED:-0}" \
  --run-dir "${RUN_DIR:-$work/$arm}" \
  "$@"
