"""An agent that multiplies with a tool, written with the `openai` package alone."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

NUMBER = {"type": "integer"}
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "mul",
        "description": "The product of two numbers.",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
    },
}
MOST_TURNS = 3


def solve(client: OpenAI, model: str, question: str) -> str:
    """Returns the model's last answer, after its calls."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        answer = client.chat.completions.create(model=model, messages=messages, tools=[MULTIPLY])
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = run(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def run(arguments: str) -> str:
    """Returns the product, or 0 for invalid arguments."""
    numbers = json.loads(arguments)
    a, b = numbers.get("a"), numbers.get("b")
    return str(a * b) if isinstance(a, int) and isinstance(b, int) else "0"


def act(base_url: str, api_key: str, prompt: Any) -> float:
    """Runs the agent on a problem and returns its reward; `--custom-agent-function-path` calls it."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        return float(solve(client, "policy", prompt.text) == prompt.label)
