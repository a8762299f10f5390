#!/usr/bin/env bash
# An environment of the verifiers package, as it is, trained on through the gateway, on a CPU. Once:
#   pip install 'onpolicy[agents]'
# It runs from any directory. More flags may follow: run.sh --num-rollout 5
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # where onpolicy_letters.py is
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}   # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/verifiers}

python "$here/prepare.py" "$work/inputs"

onpolicy train \
  --custom-config-path "$here/config.yaml" \
  --environment verifiers:onpolicy-letters \
  --hf-checkpoint "$work/inputs/model" \
  --run-dir "$work/run" \
  "$@"
