"""The tokens that end a response: the checkpoint's, its tokenizer's, its template's and the user's."""

import json
import re
import shutil

import pytest

from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config, parse_config
from onpolicy.run.launch import stop_tokens
from onpolicy.run.launch.stop_tokens import stop_token_ids
from tests.support.chat_tokenizers import TEMPLATES, byte_tokenizer
from tests.support.published import published, write_config
from tests.support.tiny import make_checkpoint


@pytest.fixture(autouse=True)
def says_everything_again():
    stop_tokens._warn.cache_clear()


@pytest.mark.parametrize(
    ("name", "ends"),
    [("qwen3-0.6b", (3,)), ("gemma-2-2b-it", (1, 3)), ("llama-3.1-8b-instruct", (1, 3, 4))],
)
def test_every_end_that_config_json_lists_ends_a_response(name, ends, tmp_path):
    write_config(tmp_path, published(name))
    assert stop_token_ids(str(tmp_path), parse_config(str(tmp_path))) == ends


@pytest.mark.parametrize(("listed", "ends"), [([9, 5], (3, 5, 9)), (9, (3, 9)), (None, (3,))])
def test_ends_of_the_generation_config_are_ends_too(listed, ends, tmp_path):
    write_config(tmp_path, published("qwen3-0.6b"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    config = parse_config(str(tmp_path))
    assert stop_token_ids(str(tmp_path), config) == ends
    assert stop_token_ids(str(tmp_path), config, extra=[7]) == tuple(sorted({*ends, 7}))


@pytest.mark.parametrize("listed", [True, "<|im_end|>", 1.0, [1, None], 10**6, -1])
def test_what_is_no_token_of_the_model_is_refused_with_its_value(listed, tmp_path):
    write_config(tmp_path, published("qwen3-0.6b"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(
        ConfigError, match=r"generation_config.json: eos_token_id=.*tokens are 0 to"
    ):
        stop_token_ids(str(tmp_path), parse_config(str(tmp_path)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint whose vocabulary has room for the tokenizer below."""
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "qwen3")
    return directory


EOS, IM_END, END = 1, 261, 263
"""What the files say, and tokens of the tokenizer: its own end, and another one."""


@pytest.fixture
def checkpoint_with(model, tmp_path):
    """Make a checkpoint whose files list token 1, with a tokenizer of this template and end."""

    def make(template, eos="<|im_end|>", listed=EOS, tokenizer_config=None):
        path = shutil.copytree(model, tmp_path / "model")
        tokenizer = byte_tokenizer(template)
        tokenizer.eos_token = eos
        tokenizer.save_pretrained(path)
        if tokenizer_config is not None:
            file = path / "tokenizer_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **tokenizer_config}))
        config = json.loads((path / "config.json").read_text()) | {"vocab_size": 300}
        (path / "config.json").write_text(json.dumps({**config, "eos_token_id": listed}))
        (path / "generation_config.json").unlink(missing_ok=True)
        return str(path), load_config(str(path))

    return make


PLAIN, OTHER = TEMPLATES["plain"], TEMPLATES["ends answers otherwise"]


ANSWERS_ALONE = {"of_chats": False}
FORM = {"__type": "AddedToken", "content": "<|end|>", "special": True}
NO_END = "{% for m in messages %}{{ m.content }}{% endfor %}"
ONLY_TEXT = PLAIN.replace("<|im_", "<|my_")
CASES = {
    "a base model stops where its chat template ends an answer": (
        {"template": PLAIN}, {}, (EOS, IM_END),
        r"does not list <\|im_end\|> \(261\).*responses end there too.*generation_config\.json"),
    "an end that neither files nor tokenizer list is found in the template": (
        {"template": OTHER}, {}, (EOS, IM_END, END),
        r"<\|end\|> \(263\), with which the chat template ends an answer"),
    "text ends where sft teaches it to and not where a chat does": (
        {"template": OTHER}, ANSWERS_ALONE, (EOS, IM_END), ""),
    "of ends that the files list nothing is said": (
        {"template": PLAIN, "listed": [EOS, IM_END]}, {}, (EOS, IM_END), "^$"),
    "nor of one of them": ({"template": PLAIN, "listed": [IM_END]}, {}, (IM_END,), "^$"),
    "nor where text ends": ({"template": PLAIN, "listed": [IM_END]}, ANSWERS_ALONE, (IM_END,), "^$"),
    "an end that the user gives is known": (
        {"template": OTHER, "listed": [EOS, IM_END]}, {"extra": [END]}, (EOS, IM_END, END), "^$"),
    "where the files list none there is the tokenizer's": (
        {"template": PLAIN, "listed": None}, {}, (IM_END,), r"does not list <\|im_end\|> \(261\)"),
    "an end may be written as an object": (
        {"template": PLAIN, "tokenizer_config": {"eos_token": FORM}}, ANSWERS_ALONE, (EOS, END), ""),
    "where nothing ends a response that is said": (
        {"template": NO_END, "eos": None, "listed": None}, {}, (), "no token ends a response"),
    "an end that is only text is none": (
        {"template": ONLY_TEXT, "listed": [EOS, IM_END]}, {}, (EOS, IM_END),
        r"ends an answer with the text '<\|my_end\|>', which is no token"),
}  # fmt: skip


@pytest.mark.parametrize(("made", "asked", "ends", "said"), CASES.values(), ids=CASES)
def test_ends_come_from_files_tokenizer_template_and_user(
    checkpoint_with, caplog, made, asked, ends, said
):
    assert stop_token_ids(*checkpoint_with(**made), **asked) == ends
    assert re.search(said, caplog.text, re.DOTALL)


def test_an_end_beyond_the_models_vocabulary_is_refused(checkpoint_with):
    path, config = checkpoint_with(PLAIN)
    config.vocab_size = 200
    with pytest.raises(
        ConfigError, match=r"the tokenizer's eos_token_id=261: the model's tokens are"
    ):
        stop_token_ids(path, config)
