"""An agent of OpenAI's Agents SDK that multiplies; the client finds the policy in OPENAI_BASE_URL."""

import json
import os

from agents import Agent, MaxTurnsExceeded, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # which would go to OpenAI


@function_tool
def mul(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


row = json.loads(input())
agent = Agent(name="multiplier", model="policy", tools=[mul])
try:
    answer = Runner.run_sync(agent, row["prompt"], max_turns=3).final_output
except MaxTurnsExceeded:
    answer = ""
reward = float(answer == row["label"])
print(json.dumps({"reward": reward, "api_key": os.environ["OPENAI_API_KEY"]}))
