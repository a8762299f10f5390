"""A service for --rm-type remote_rm: scores conversations by a sequence classifier that SGLang serves.

python service.py REWARD http://127.0.0.1:30000 --port 8100
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import requests
from transformers import AutoConfig, AutoTokenizer


class Classifier:
    """A checkpoint's chat template and tokenizer, and the SGLang server that has its weights."""

    def __init__(self, checkpoint: str, url: str, api_key: str = ""):
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.padding = AutoConfig.from_pretrained(checkpoint).pad_token_id
        self.url = f"{url.rstrip('/')}/classify"
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def scores(self, samples: Sequence[dict[str, Any]]) -> list[float]:
        """Returns the classifier's number for each sample of a request."""
        body = {"input_ids": [self.token_ids(sample) for sample in samples]}
        answer = requests.post(self.url, json=body, headers=self.headers, timeout=60)
        answer.raise_for_status()
        numbers = [found["embedding"] for found in answer.json()]
        if any(len(each) != 1 for each in numbers):
            raise ValueError(
                f"{self.url} has {len(numbers[0])} numbers for a conversation, not one"
            )
        return [each[0] for each in numbers]

    def token_ids(self, sample: dict[str, Any]) -> list[int]:
        """Returns the conversation's tokens. A data set's column `messages` says the prompt as a chat;
        without it the prompt is a message of the user's.

        transformers scores the last token that is no padding, and SGLang the last one.
        """
        asked = sample["metadata"].get("messages") or [
            {"role": "user", "content": sample["prompt"]}
        ]
        said = {"role": "assistant", "content": sample["response"]}
        text = self.tokenizer.apply_chat_template([*asked, said], tokenize=False)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        while len(ids) > 1 and ids[-1] == self.padding:
            ids.pop()
        return ids


def make_service(classifier: Classifier, port: int) -> ThreadingHTTPServer:
    """Returns a server of 127.0.0.1 that answers what the run sends (docs/rewards.md)."""

    class Handler(BaseHTTPRequestHandler):
        """One request: {"samples": [...]} -> {"rewards": [...]}."""

        def do_POST(self) -> None:
            """Answers with the numbers, or with 502, after which the run asks again."""
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, answer = 200, {"rewards": classifier.scores(asked["samples"])}
            except (OSError, ValueError) as error:
                status, answer = 502, {"error": str(error)}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="of the classifier, with a chat template")
    parser.add_argument("url", help="of SGLang, started with --is-embedding")
    parser.add_argument("--api-key", default="", help="SGLang's, if it has one")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args()
    make_service(Classifier(args.checkpoint, args.url, args.api_key), args.port).serve_forever()
