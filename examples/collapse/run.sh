#!/usr/bin/env bash
# Mismatch makes training collapse, on a CPU: the same run aligned, with an engine of 3-bit weights, and
# with that engine and a correction. It runs from any directory; takes 10 to 20 minutes on 2 cores.
#
#   run.sh                            aligned, nothing, tis_token; seed 0; int3
#   SEED=1 FORMAT=int4 run.sh nothing tis_token
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export WORK_DIR=${WORK_DIR:-$repo/runs/collapse}

runs=()
for arm in ${*:-aligned nothing tis_token}; do
  name=${FORMAT:-int3}-$arm
  if [ "$arm" = aligned ]; then name=$arm; fi
  RUN_DIR="$WORK_DIR/$name" "$here/train.sh" "$arm"
  runs+=("$name=$WORK_DIR/$name")
done
python "$here/picture.py" "$WORK_DIR/collapse.png" "${runs[@]}"
