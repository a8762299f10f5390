"""A smolagents agent that multiplies with a tool; the client finds the policy in OPENAI_BASE_URL."""

import json
import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def mul(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


row = json.loads(input())
agent = ToolCallingAgent([mul], OpenAIModel("policy"), max_steps=3)
answer = agent.run(row["prompt"])
reward = float(str(answer) == row["label"])
print(json.dumps({"reward": reward, "api_key": os.environ["OPENAI_API_KEY"]}))
