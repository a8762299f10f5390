#!/usr/bin/env bash
# As run_qwen3_4b.sh, with PPO in the place of Dr. GRPO: the critic begins as the policy's checkpoint, and
# learns alone in the first 20 rollouts. More flags may follow: run_qwen3_4b_ppo.sh --critic-load /models/critic
#
#   HF_CHECKPOINT=/models/Qwen3-4B PROMPT_DATA=/data/dapo-math-17k.jsonl run_qwen3_4b_ppo.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export WORK_DIR=${WORK_DIR:-runs/true_on_policy_qwen3_4b_ppo}

exec "$here/run_qwen3_4b.sh" \
  --advantage-estimator gae --no-filter-equal-rewards \
  --critic-lr 1e-5 --num-critic-only-steps 20 \
  "$@"
