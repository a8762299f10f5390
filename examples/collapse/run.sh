#!/usr/bin/env bash
# Mismatch makes training collapse, on a CPU: the same run aligned, with an engine of 3-bit weights, and
# with that engine and a correction. Runs from any directory; takes about 10 minutes on 2 cores.
#
#   run.sh                          aligned, nothing, tis_token; seed 0; int3
#   SEED=1 FORMAT=int4 run.sh nothing tis_token
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/collapse}
seed=${SEED:-0}
format=${FORMAT:-int3}
arms=${*:-aligned nothing tis_token}

python "$here/make_inputs.py" "$work/inputs"
runs=()
for arm in $arms; do
  rounding=(--rollout-weight-format "$format")
  name=$format-$arm
  if [ "$arm" = aligned ]; then rounding=() name=$arm; fi
  onpolicy train \
    --custom-config-path "$here/$arm.yaml" \
    --hf-checkpoint "$work/inputs/model" \
    --prompt-data "$work/inputs/data.jsonl" --no-shuffle \
    --rm-type exact \
    "${rounding[@]}" \
    --num-rollout "${NUM_ROLLOUT:-160}" --rollout-batch-size 12 --n-samples-per-prompt 8 \
    --rollout-max-response-len 14 --max-tokens-per-gpu 4096 \
    --advantage-estimator reinforce_plus_plus --lr 5e-4 --lr-warmup-steps 5 --weight-decay 0 \
    --seed "$seed" \
    --run-dir "$work/$name-$seed"
  runs+=("$name=$work/$name-$seed")
done
python "$here/picture.py" "$work/collapse-$seed.png" "${runs[@]}"
