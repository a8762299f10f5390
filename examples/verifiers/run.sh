#!/usr/bin/env bash
# An environment of the verifiers package, as it is, trained on through the gateway, on a CPU.
# It runs from any directory. More flags may follow: run.sh --num-rollout 5
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" # where onpolicy_letters.py is
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}   # spinning threads would slow a busy machine
work=${WORK_DIR:-$repo/runs/verifiers}
agent_python=$("$repo/examples/common/own_python.sh" verifiers "$here/requirements.txt")
export PATH="$PATH:${agent_python%/*}" # where uv is

python "$here/prepare.py" "$work/inputs"

onpolicy train \
  --custom-config-path "$here/config.yaml" \
  --environment verifiers:onpolicy-letters \
  --environment-python "$agent_python" \
  --hf-checkpoint "$work/inputs/model" \
  --run-dir "$work/run" \
  "$@"
