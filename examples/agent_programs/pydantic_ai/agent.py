"""A Pydantic AI agent that multiplies with a tool; the client finds the policy in OPENAI_BASE_URL."""

import json
import os

from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits

agent = Agent("openai-chat:policy")


@agent.tool_plain
def mul(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


row = json.loads(input())
try:
    answer = agent.run_sync(row["prompt"], usage_limits=UsageLimits(request_limit=3)).output
except UsageLimitExceeded:
    answer = ""
reward = float(answer == row["label"])
print(json.dumps({"reward": reward, "api_key": os.environ["OPENAI_API_KEY"]}))
