#!/usr/bin/env bash
# GRPO of an agent in a Python of its own, on a CPU: run.sh langgraph (or openai_agents, pydantic_ai, smolagents).
# It runs from any directory. More flags may follow: run.sh langgraph --num-rollout 5
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH="$repo/.venv/bin:$PATH"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} # spinning threads would slow a busy machine
agent=${1:?which agent: langgraph, openai_agents, pydantic_ai or smolagents}
shift
work=${WORK_DIR:-$repo/runs/agent_programs}
agent_python=$("$repo/examples/common/own_python.sh" "$agent" "$here/$agent/requirements.txt")

python "$here/../openai_agent/prepare.py" "$work/inputs"

onpolicy train \
  --custom-config-path "$here/config.yaml" \
  --agent-command "$agent_python $here/$agent/agent.py" \
  --hf-checkpoint "${HF_CHECKPOINT:-$work/inputs/model}" \
  --prompt-data "$work/inputs/data.jsonl" \
  --run-dir "$work/$agent" \
  "$@"
