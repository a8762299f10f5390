#!/usr/bin/env bash
# An agent that searches, or one that runs Python, on one host with 8 GPUs, which FSDP2's ranks and
# SGLang's servers share, each in its turn. It runs from any directory. More flags may follow: run.sh code --num-rollout 5
#
#   HF_CHECKPOINT=/models/Qwen3-4B PROMPT_DATA=/data/nq.jsonl SEARCH_URL=http://host:8000/retrieve run.sh search
#   HF_CHECKPOINT=/models/Qwen3-4B PROMPT_DATA=/data/dapo-math-17k.jsonl run.sh code
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${HF_CHECKPOINT:?must name a local Hugging Face checkpoint}"
: "${PROMPT_DATA:?must name a .jsonl or .parquet file of prompts}"
case ${1:-} in
  search)
    : "${SEARCH_URL:?must be the address of a retrieval server}"
    agent=(--environment "$here/search.py:Search" --environment-args "{\"url\": \"$SEARCH_URL\"}")
    ;;
  code) agent=(--environment "$here/code.py:Code") ;;
  *)
    echo "run.sh: give search or code" >&2
    exit 2
    ;;
esac
work=${WORK_DIR:-runs/agents_8gpu/$1}
shift

onpolicy train \
  --custom-config-path "$here/config.yaml" \
  --hf-checkpoint "$HF_CHECKPOINT" \
  --prompt-data "$PROMPT_DATA" \
  --actor-num-gpus-per-node "${NUM_TRAINERS:-8}" \
  --rollout-num-engines "${NUM_ENGINES:-8}" \
  --run-dir "$work/run" \
  --save "$work/checkpoints" --load "$work/checkpoints" \
  "${agent[@]}" "$@"
