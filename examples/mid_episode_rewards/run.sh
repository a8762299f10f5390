#!/usr/bin/env bash
# Rewards in mid-episode under one estimator: run.sh grpo, run.sh dr_grpo or run.sh gae.
# Runs on a CPU, from any directory. More flags may follow: run.sh gae --seed 1
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/mid_episode_rewards}
estimator=${1:-gae}
[ $# -eq 0 ] || shift

critic=()
if [ "$estimator" = gae ]; then
  critic=(--lambd 0 --critic-lr 2e-3 --num-critic-only-steps 2)
fi

python "$here/prepare.py" "$work/inputs"

onpolicy train \
  --custom-config-path "$here/config.yaml" \
  --advantage-estimator "$estimator" "${critic[@]}" \
  --environment "$here/environment.py:Market" \
  --environment-rewards turn \
  --hf-checkpoint "$work/inputs/model" \
  --prompt-data "$work/inputs/data.jsonl" \
  --run-dir "$work/$estimator" \
  "$@"
