#!/usr/bin/env bash
# The one-state experiment of DC-GRPO, in seconds on a CPU: writes toy.png and toy.json.
# It runs from any directory. More flags may follow: run.sh --reading weighted
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
work=${WORK_DIR:-$repo/runs/discrepancy_toy}

python "$here/toy.py" "$work" "$@"
