"""An agent that searches before it answers, in the form of Search-R1 (arXiv 2503.09516).

It writes `<search>a query</search>`, reads what a retrieval server finds in `<information>`, and ends
with `<answer>...</answer>`; the prompts tell it to, as those of Search-R1 do. The server is that of
Search-R1 too: it takes `{"queries": [...], "topk": k}`.
"""

from __future__ import annotations

import re
import string

import aiohttp


class Search:
    """An episode; `url` is the retrieval server's, `topk` the passages that it returns."""

    stop = ("</search>", "</answer>")

    def __init__(self, url: str, topk: int = 3):
        self._url, self._topk = url, topk

    def reset(self, prompt):
        self._label = prompt.label

    async def step(self, action):
        if (query := _between(action, "search")) is not None:
            return f"\n<information>{await self._found(query)}</information>\n", 0.0, False
        answer = _between(action, "answer")
        return "", float(answer is not None and _plain(answer) == _plain(self._label)), True

    async def _found(self, query: str) -> str:
        asked = {"queries": [query], "topk": self._topk, "return_scores": True}
        async with aiohttp.ClientSession(raise_for_status=True) as client:
            response = await client.post(self._url, json=asked)
            (found,) = (await response.json())["result"]
        return "\n".join(each["document"]["contents"] for each in found)


def _between(text: str, tag: str) -> str | None:
    found = re.findall(f"<{tag}>(.*?)</{tag}>\\Z", text, re.DOTALL)
    return found[-1].strip() if found else None


def _plain(text: str) -> str:
    """Returns an answer without case, punctuation and articles, as SQuAD compares it."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())
