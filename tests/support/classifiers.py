"""Tiny sequence classifiers with random weights, as transformers writes them."""

import torch
from transformers import AutoModelForSequenceClassification

from tests.support.tiny import ARCHITECTURES, SIZES, make_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ message['role'][0] }}:{{ message['content'] }}.{% endfor %}"
)


def make_classifier(directory, architecture="qwen3", **sizes):
    """A checkpoint with one label and a chat template of its own."""
    config_class, own = ARCHITECTURES[architecture]
    torch.manual_seed(5)
    config = config_class(**{**SIZES, **own, "num_labels": 1, **sizes})
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(directory)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory
