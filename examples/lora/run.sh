#!/usr/bin/env bash
# The quickstart with low-rank adapters in the place of all weights, on a CPU, with 0 mismatched tokens.
# It runs from any directory. More flags may follow: run.sh --num-rollout 5
set -euo pipefail
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export WORK_DIR=${WORK_DIR:-$examples/../runs/lora}

exec "$examples/quickstart/run.sh" --lora-rank 16 --lora-alpha 32 --lr 3e-3 "$@"
