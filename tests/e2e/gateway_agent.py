"""Agents for whole runs, written with the clients of OpenAI and Anthropic alone."""

import anthropic
import openai

TOOL = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object"}},
}


def chats(base_url, api_key, prompt):
    """Three turns of a chat, the last as a stream, and a message of the other protocol that goes on."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": prompt.text}]
        for text in ("more", "and"):
            answer = client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL], max_tokens=6, logprobs=True
            )
            (choice,) = answer.choices
            assert all(token.logprob <= 0 for token in choice.logprobs.content)
            messages += [choice.message, {"role": "user", "content": text}]
        chunks = client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], max_tokens=6, stream=True
        )
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        messages = [{"role": "user", "content": prompt.text}]
        client.messages.create(model="policy", messages=messages, max_tokens=6)
    return min(len(text) / 9, 1.0)
