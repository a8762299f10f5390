"""A LangGraph agent that multiplies with a tool; the client finds the policy in OPENAI_BASE_URL."""

import json
import os

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError


def mul(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


row = json.loads(input())
agent = create_agent(ChatOpenAI(model="policy"), tools=[mul])
asked = {"messages": [{"role": "user", "content": row["prompt"]}]}
try:
    answer = agent.invoke(asked, {"recursion_limit": 6})["messages"][-1].content
except GraphRecursionError:
    answer = ""
reward = float(answer == row["label"])
print(json.dumps({"reward": reward, "api_key": os.environ["OPENAI_API_KEY"]}))
