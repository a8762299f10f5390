"""The tokens that end a response: the checkpoint's, its tokenizer's, its template's and the user's."""

import json
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


def test_a_base_model_with_a_chat_template_stops_where_the_template_ends_an_answer(
    checkpoint_with, caplog
):
    given = checkpoint_with(PLAIN)
    assert stop_token_ids(*given) == (EOS, IM_END)
    assert "does not list <|im_end|> (261)" in caplog.text
    assert "responses end there too" in caplog.text and "generation_config.json" in caplog.text


def test_an_end_that_neither_the_files_nor_the_tokenizer_list_is_found_in_the_template(
    checkpoint_with, caplog
):
    given = checkpoint_with(OTHER)
    assert stop_token_ids(*given) == (EOS, IM_END, END)
    assert "<|end|> (263), with which the chat template ends an answer" in caplog.text


def test_text_ends_where_sft_teaches_it_to_and_not_where_a_chat_does(checkpoint_with):
    given = checkpoint_with(OTHER)
    assert stop_token_ids(*given, of_chats=False) == (EOS, IM_END)


def test_without_the_flag_an_end_is_left_out_and_that_is_said(checkpoint_with, caplog):
    given = checkpoint_with(OTHER)
    assert stop_token_ids(*given, at_turn_ends=False) == (EOS,)
    assert "<|im_end|> (261), with which the tokenizer ends a text: no response ends" in caplog.text


@pytest.mark.parametrize("listed", [[EOS, IM_END], [IM_END]])
def test_ends_that_the_files_list_change_nothing_and_nothing_is_said(
    listed, checkpoint_with, caplog
):
    given = checkpoint_with(PLAIN, listed=listed)
    for of_chats in (True, False):
        assert stop_token_ids(*given, of_chats=of_chats) == tuple(sorted(listed))
    assert not caplog.text


def test_an_end_that_the_user_gives_is_known(checkpoint_with, caplog):
    given = checkpoint_with(OTHER, listed=[EOS, IM_END])
    assert stop_token_ids(*given, extra=[END]) == (EOS, IM_END, END)
    assert not caplog.text


def test_a_checkpoint_whose_files_list_no_end_has_the_tokenizers(checkpoint_with, caplog):
    given = checkpoint_with(PLAIN, listed=None)
    assert stop_token_ids(*given) == (IM_END,)
    assert "does not list <|im_end|> (261)" in caplog.text


def test_an_end_that_is_written_as_an_object_is_read(checkpoint_with):
    form = {"__type": "AddedToken", "content": "<|end|>", "special": True}
    given = checkpoint_with(PLAIN, tokenizer_config={"eos_token": form})
    assert stop_token_ids(*given, of_chats=False) == (EOS, END)


def test_where_nothing_ends_a_response_that_is_said(checkpoint_with, caplog):
    given = checkpoint_with("{% for m in messages %}{{ m.content }}{% endfor %}", None, None)
    assert stop_token_ids(*given) == ()
    assert "no token ends a response" in caplog.text


def test_an_end_that_is_only_text_is_said_and_is_none(checkpoint_with, caplog):
    given = checkpoint_with(PLAIN.replace("<|im_", "<|my_"), listed=[EOS, IM_END])
    assert stop_token_ids(*given) == (EOS, IM_END)
    assert "ends an answer with the text '<|my_end|>', which is no token" in caplog.text


def test_an_end_beyond_the_models_vocabulary_is_refused(checkpoint_with):
    path, config = checkpoint_with(PLAIN)
    config.vocab_size = 200
    with pytest.raises(
        ConfigError, match=r"the tokenizer's eos_token_id=261: the model's tokens are"
    ):
        stop_token_ids(path, config)
