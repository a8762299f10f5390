#!/usr/bin/env bash
# On-policy distillation on a CPU: a teacher that adds right, made by `onpolicy sft`, and a smaller student.
# It runs from any directory. More flags of `onpolicy train` may follow: run.sh --num-rollout 5
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/distillation}
inputs="$work/inputs"

python "$here/prepare.py" "$inputs"

learn() { # NAME ROWS STEPS: a model that knows what the rows say
  [ -d "$work/$1" ] || onpolicy sft \
    --hf-checkpoint "$inputs/$1" --prompt-data "$inputs/$2.jsonl" --max-steps "$3" \
    --global-batch-size 128 --lr 2e-3 --lr-warmup-steps 30 --lr-decay-style cosine --weight-decay 0.01 \
    --save-hf "$work/$1" --run-dir "$work/sft_$1"
}
learn teacher right 400
learn student wrong 300

onpolicy train \
  --custom-config-path "$here/config.yaml" \
  --hf-checkpoint "$work/student" \
  --teacher-checkpoint "$work/teacher" \
  --prompt-data "$inputs/data.jsonl" \
  --eval-prompt-data "$inputs/eval.jsonl" \
  --run-dir "$work/run" \
  "$@"
