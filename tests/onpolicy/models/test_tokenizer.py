"""A tokenizer gives back the text that it was given, whatever class transformers makes of it."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from onpolicy.models.tokenizer import PROBE, load_tokenizer
from tests.support.chat_tokenizers import PLAIN, byte_tokenizer, real_files, real_tokenizer
from tests.support.tiny import make_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1)


def round_trip(tokenizer):
    return tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False))


def test_a_tokenizer_of_bytes_under_the_name_of_llamas_is_read_as_it_is(checkpoint, caplog):
    byte_tokenizer(PLAIN).save_pretrained(checkpoint)
    file = checkpoint / "tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "tokenizer_class": "LlamaTokenizerFast"})
    )
    assert round_trip(AutoTokenizer.from_pretrained(checkpoint)) != PROBE
    loaded = load_tokenizer(str(checkpoint))
    assert round_trip(loaded) == PROBE
    assert loaded.chat_template == PLAIN
    assert "which loses text; tokenizer.json is used" in caplog.text


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3"])
def test_published_tokenizers_give_back_what_they_were_given(checkpoint, name):
    published = real_tokenizer(name)
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    shutil.copytree(real_files(name), checkpoint, dirs_exist_ok=True)
    loaded = load_tokenizer(str(checkpoint))
    assert round_trip(loaded) == PROBE
    assert loaded.encode(PROBE) == published.encode(PROBE)
