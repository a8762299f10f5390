"""Makes what mini-swe-agent needs: a random Qwen3 with a tokenizer of characters, and tasks.

    python examples/mini_swe_agent/prepare.py OUT_DIR

OUT_DIR/data.jsonl, OUT_DIR/model/   Does nothing if OUT_DIR is complete.
"""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path

from onpolicy.compat.process import prepare_process

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

TASKS = ("mean.py is wrong. Mend it.", "test_mean.py fails. Why?", "Mend mean().", "Run the test.")
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def main(out: Path) -> None:
    if (out / "model" / "config.json").exists():
        return
    prepare_process()
    import torch  # seconds, for which nobody waits whose inputs are there
    from prepare import make_model, make_tokenizer, save

    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": task, "label": ""} for task in TASKS)
    (out / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer(string.printable)
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = make_model(len(tokenizer), max_position_embeddings=2048, **sizes)
    save(model, tokenizer, out / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
