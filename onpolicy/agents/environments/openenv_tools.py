"""Episodes at an OpenEnv server whose actions are calls of its MCP tools.

The policy sees the tools in its chat template, and acts through its gateway session; the server has the
actions `list_tools` and `call_tool` of openenv 0.10 (its module env_server.mcp_types).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from onpolicy.agents.environments.stepped import OpenEnv
from onpolicy.agents.session_address import SessionAddress, session_of
from onpolicy.rollout.rollouter import Episode
from onpolicy.types import Prompt

Message = dict[str, Any]


async def roll_out(
    turns: Any, prompt: Prompt, *, url: str, observation: str = "", reset: Message | None = None
) -> Episode:
    """Return an episode that ends with an answer without calls, with `done`, or at the token limit.

    observation: the field of the reset's observation that the policy reads, if any. reset: the
    arguments of the reset. Raises RuntimeError for what the server or the gateway refuses."""
    server = OpenEnv(url, "type", observation, reset=reset)
    try:
        messages = [*(prompt.messages or [{"role": "user", "content": prompt.text}])]
        observed = await server.reset(prompt)
        if observation:
            messages.append({"role": "user", "content": observed})
        tools = [_described(tool) for tool in (await server.act(type="list_tools"))[0]["tools"]]
        reward, why = 0.0, "answer"
        async with aiohttp.ClientSession(trust_env=False) as client:
            while answer := await _answer(client, session_of(prompt), messages, tools):
                messages.append(answer)
                for call in answer.get("tool_calls") or ():
                    found, paid, is_done = await _called(server, call["function"])
                    reward += paid
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
                    if is_done:
                        return Episode(reward=reward, info={"ended": "done"})
                if not answer.get("tool_calls"):
                    break
            else:
                why = "length"
        return Episode(reward=reward, info={"ended": why})
    finally:
        await server.close()


def _described(tool: Mapping[str, Any]) -> Message:
    given = {"name": tool["name"], "description": tool["description"]}
    return {"type": "function", "function": {**given, "parameters": tool["input_schema"]}}


async def _answer(
    client: aiohttp.ClientSession,
    session: SessionAddress,
    messages: list[Any],
    tools: list[Message],
) -> Message | None:
    """Return the policy's next message, or None if no more tokens fit."""
    body = {"model": session.model, "messages": messages, "tools": tools}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/chat/completions"
    async with client.post(url, json=body, headers=headers, timeout=None) as answer:
        said = await answer.json()
    if error := said.get("error"):
        if error.get("code") == "context_length_exceeded":
            return None
        raise RuntimeError(error["message"])
    message: Message = said["choices"][0]["message"]
    return message


async def _called(server: OpenEnv, call: Mapping[str, Any]) -> tuple[str, float, bool]:
    """Return what a call gives to read, its reward, and whether the episode ends."""
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object", 0.0, False
    found, reward, is_done = await server.act(
        type="call_tool", tool_name=call["name"], arguments=arguments
    )
    if error := found.get("error"):
        return f"error: {error['message']}", reward, is_done
    result = found.get("result")
    parts = result.get("content") if isinstance(result, dict) else None
    if parts and all(part.get("type") == "text" for part in parts):
        return "\n".join(part["text"] for part in parts), reward, is_done
    return result if isinstance(result, str) else json.dumps(result), reward, is_done
