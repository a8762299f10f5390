"""`onpolicy serve` as an OpenAI client meets it: the run's samples, by text, to the last bit."""

import json
import re
import shutil
from pathlib import Path

import numpy
import openai
import pytest
import requests

from onpolicy.cli.main import main
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.client import EngineClient
from onpolicy.rollout.sample_requests import sampling_seed
from onpolicy.run.launch.stop_tokens import stop_token_ids
from onpolicy.system.records import Shape
from onpolicy.trajectory import Grammar, Trajectory
from onpolicy.types import Request, SamplingParams
from tests.support.clients import client_of
from tests.support.proxies import recording_proxy
from tests.support.serving import serving
from tests.support.tiny import make_tokenizer
from tests.support.train_runs import onpolicy

pytestmark = pytest.mark.engine

TEMPLATE = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}{{ m.content }}"
    "{% if m.role == 'assistant' %}§{% endif %}{% endif %}{% endfor %}={% if 0 %}{% endif %}"
)
"""Knows as many roles as most, and ends an answer with a token that no file lists."""

TURN_END = 136

PROMPTS = ["12+34=", "abcabcabc", "x", "?!" * 40]
LENGTH = 24


@pytest.fixture(scope="module")
def model(checkpoint, tmp_path_factory):
    """A checkpoint that has a chat template, and wants top_p and top_k like many published ones."""
    model = shutil.copytree(checkpoint, tmp_path_factory.mktemp("text") / "model")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["§"])  # which is there
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    generation = {"eos_token_id": 1, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    (model / "generation_config.json").write_text(json.dumps(generation))
    return model


@pytest.fixture(scope="module")
def proxied():
    """(the environment of somebody behind a proxy, what that proxy is sent)"""
    with recording_proxy() as both:
        yield both


@pytest.fixture(scope="module")
def started(model, proxied):
    """(base URL, clients' key, URL of sessions, runs' key) of a server as a user starts it."""
    directory, proxy = model.parent, proxied[0]
    flags = ("--dtype", "float32", "--sessions")
    with serving(model, directory, *flags, environment=proxy) as (flags, printed):
        _, url, _, key = flags
        of_clients = re.search(rf"base_url {url}/v1, and what is in (\S+) as api_key", printed)
        sessions = re.search(r"sessions: POST (\S+)", printed)
        files = [Path(of_clients[1]), Path(key.removeprefix("@"))]
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        ours, runs = (file.read_text().strip() for file in files)
        assert ours != runs
        yield url, ours, sessions[1], runs


@pytest.fixture(scope="module")
def server(started):
    return started[:2]


def test_the_key_of_clients_changes_nothing_and_no_key_ends_the_server(
    started, client, proxied, tmp_path
):
    url, ours, _, runs = started
    before = ask(client, "12+34=", 5).choices[0].text

    def status(path, key, body):
        headers = {"Authorization": f"Bearer {key}"}
        return requests.post(f"{url}{path}", json=body, headers=headers, timeout=60).status_code

    dump = {
        "log_requests": True,
        "dump_requests_folder": str(tmp_path),
        "dump_requests_threshold": 1,
    }
    for key in (ours, runs):
        assert status("/configure_logging", key, dump) == 403
        assert status("/start_profile", key, {}) == 403
        assert status("/open_session", key, {"capacity_of_str_len": 100}) == 403
        assert (
            status("/generate", key, {"text": "1", "sampling_params": {"max_new_tokens": 1}}) == 200
        )
    new_version = {"new_version": "x", "abort_all_requests": False}
    assert status("/update_weight_version", ours, new_version) == 403
    assert status("/update_weights_from_disk", ours, {"model_path": "/elsewhere"}) == 403
    assert status("/update_weight_version", "", new_version) == 401
    assert status("/flush_cache?timeout=5", runs, {}) == 200
    for path in ("server_info", "get_server_info"):
        told = requests.get(
            f"{url}/{path}", headers={"Authorization": f"Bearer {ours}"}, timeout=60
        )
        assert told.status_code == 200 and ours not in told.text and runs not in told.text
    assert not any(tmp_path.iterdir())
    assert ask(client, "12+34=", 5).choices[0].text == before
    assert proxied[1] == []  # nor is a request of the server's own sent to a proxy


@pytest.fixture(scope="module")
def client(server):
    url, key = server
    return client_of(f"{url}/v1", key)


def a_runs_requests(prompts, temperature=1.0, stops=(1,), **asked):
    """As a run makes them: token ids, a seed of the run's, the checkpoint's stop tokens."""
    tokenizer = make_tokenizer()
    params = SamplingParams(
        temperature=temperature, max_new_tokens=LENGTH, stop_token_ids=stops, **asked
    )
    return [
        Request(
            prompt_ids=tokenizer.encode(prompt),
            sampling_seed=sampling_seed(0, "rollout", 0, i),
            params=params,
        )
        for i, prompt in enumerate(prompts)
    ]


def same(completion, token_ids, log_probs):
    """The same tokens, and the same float32 numbers."""
    ours, theirs = (
        numpy.array(x, numpy.float32) for x in (completion.rollout_log_probs, log_probs)
    )
    return completion.response_ids == token_ids and ours.tobytes() == theirs.tobytes()


def ask(client, prompt, seed, **changes):
    values = {"temperature": 1.0, "max_tokens": LENGTH, "logprobs": 0, **changes}
    extra = {"return_token_ids": True}
    return client.completions.create(
        model="any", prompt=prompt, seed=seed, extra_body=extra, **values
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_completion_is_the_sample_of_a_run_with_that_seed(engines, client, temperature):
    ours = a_runs_requests(PROMPTS, temperature)
    for prompt, request, completion in zip(PROMPTS, ours, engines.generate(ours), strict=True):
        (choice,) = ask(client, prompt, request.sampling_seed, temperature=temperature).choices
        assert same(completion, choice.token_ids, choice.logprobs.token_logprobs)
        assert choice.finish_reason == completion.finish_reason
        kept = (
            completion.response_ids[:-1]
            if choice.finish_reason == "stop"
            else completion.response_ids
        )
        assert choice.text == make_tokenizer().decode(kept, skip_special_tokens=True)


def test_a_stream_is_the_same_sample_piece_by_piece(client):
    (whole,) = ask(client, PROMPTS[0], 5).choices
    pieces = [chunk.choices[0] for chunk in ask(client, PROMPTS[0], 5, stream=True)]
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == whole.text
    numbers = [x for piece in pieces if piece.logprobs for x in piece.logprobs.token_logprobs]
    assert numbers == whole.logprobs.token_logprobs
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids


def test_a_chat_is_sampled_from_its_template_without_the_checkpoints_own_filters(engines, client):
    ours = a_runs_requests(["12+34="], stops=(1, TURN_END))
    (completion,) = engines.generate(ours)
    asked = {"seed": ours[0].sampling_seed, "max_tokens": LENGTH, "logprobs": True}
    messages = [{"role": "user", "content": "12+34"}]
    (choice,) = client.chat.completions.create(
        model="any", messages=messages, top_logprobs=3, **asked
    ).choices
    tokens = choice.logprobs.content
    ids = [make_tokenizer().convert_tokens_to_ids(token.token) for token in tokens]
    assert same(completion, ids, [token.logprob for token in tokens])
    assert all(len(token.top_logprobs) == 3 for token in tokens)
    stream = client.chat.completions.create(model="any", messages=messages, stream=True, **asked)
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(deltas) == choice.message.content


def test_generate_takes_text_too_and_a_run_may_use_this_server(engines, server):
    url, key = server
    run = EngineClient(url, key, 60, 60)
    ours = a_runs_requests(PROMPTS)
    for prompt, request, completion in zip(PROMPTS, ours, engines.generate(ours), strict=True):
        body = {
            "text": prompt,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": LENGTH, "sampling_seed": request.sampling_seed},
        }
        answer = requests.post(f"{url}/generate", json=body, headers=run.headers).json()
        pairs = answer["meta_info"]["output_token_logprobs"]
        assert same(completion, [pair[1] for pair in pairs], [pair[0] for pair in pairs])
        assert answer["output_ids"] == completion.response_ids


def test_without_a_seed_the_same_question_has_several_answers(client):
    asked = {"model": "any", "prompt": PROMPTS[0], "max_tokens": LENGTH}
    answers = {client.completions.create(**asked).choices[0].text for _ in range(8)}
    assert len(answers) == 8
    batch = client.completions.create(model="any", prompt=[PROMPTS[0]] * 8, max_tokens=LENGTH)
    assert len({choice.text for choice in batch.choices} | answers) == 16


REFUSED = [
    ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
    ({"logit_bias": {"5": 1}}, "logit_bias="),
    ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty=1.1"),
    ({"extra_body": {"min_tokens": 3}}, "min_new_tokens=3"),
    ({"extra_body": {"ebnf": "root ::= [a-z]"}}, "ebnf="),
]


@pytest.mark.parametrize(("fields", "name"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_changes_the_distribution_is_refused_by_name(client, fields, name, stream):
    for create, prompt in (
        (client.completions.create, {"prompt": "x"}),
        (client.chat.completions.create, {"messages": [{"role": "user", "content": "x"}]}),
    ):
        with pytest.raises(openai.BadRequestError, match=f"{re.escape(name)}.*true-on-policy mode"):
            create(model="any", max_tokens=4, stream=stream, **prompt, **fields)


def test_a_format_that_would_keep_an_answer_from_calling_a_tool_is_refused(client):
    tool, form = {"name": "add", "parameters": {}}, {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="type=json_object beside tools"):
        client.chat.completions.create(
            model="any",
            messages=[USER],
            tools=[{"type": "function", "function": tool}],
            response_format=form,
        )
    with pytest.raises(openai.BadRequestError, match="type=json_object beside tools"):
        client.responses.create(
            model="any", input="x", tools=[{"type": "function", **tool}], text={"format": form}
        )


def echoed(client, prompt, max_tokens=4, **fields):
    """The texts, log-probabilities and alternatives of a prompt that is sent back, and of its answer;
    and how that ends."""
    answer = client.completions.create(
        model="any", prompt=prompt, echo=True, seed=5, max_tokens=max_tokens, **fields
    )
    pieces = [chunk.choices[0] for chunk in answer] if "stream" in fields else answer.choices
    parts = [piece.logprobs for piece in pieces if piece.logprobs]
    return (
        "".join(piece.text for piece in pieces),
        [x for part in parts for x in part.token_logprobs],
        [x for part in parts for x in part.top_logprobs or []],
        pieces[-1].finish_reason,
    )


@pytest.mark.parametrize("max_tokens", [0, 4])  # without an answer, and with one
@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "streamed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_echo_has_the_prompts_log_probabilities_and_they_are_the_trainers(
    engines, client, temperature, fields, max_tokens
):
    prompt, asked = PROMPTS[3], {"temperature": temperature, "logprobs": 2, **fields}
    text, numbers, top, ended = echoed(client, prompt, max_tokens, **asked)
    sequence = make_tokenizer().encode(text)
    assert text.startswith(prompt) and ended == "length"
    assert len(sequence) == len(numbers) == len(top) == len(prompt) + max_tokens
    (expected,) = engines.trainer.log_probs([sequence], [1], temperature)
    assert numbers[0] is None
    assert numpy.array(numbers[1:], numpy.float32).tobytes() == expected.numpy().tobytes()


def test_an_echo_has_as_many_alternatives_as_were_asked_for(client):
    text, numbers, top, _ = echoed(client, PROMPTS[0], logprobs=2)
    assert (text, numbers) == echoed(client, PROMPTS[0], logprobs=0)[:2]
    assert top[0] is None and {len(row) for row in top[1:]} == {2}
    assert all(max(row.values()) >= x for row, x in zip(top[1:], numbers[1:], strict=True))


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("ends", ["in the middle", "in the vocabulary's last token"])
def test_prompt_logprobs_are_the_trainers_and_those_of_the_likeliest(engines, client, count, ends):
    prompt = make_tokenizer().encode(PROMPTS[3])
    prompt = [*prompt, len(make_tokenizer()) - 1] if ends != "in the middle" else prompt
    (choice,) = client.completions.create(
        model="any", prompt=prompt, max_tokens=1, extra_body={"prompt_logprobs": count}
    ).choices
    assert choice.logprobs is None
    first, *rest = choice.prompt_logprobs
    (expected,) = engines.trainer.log_probs([prompt], [1], 1.0)
    ours = [row[str(token)]["logprob"] for row, token in zip(rest, prompt[1:], strict=True)]
    assert first is None
    assert numpy.array(ours, numpy.float32).tobytes() == expected.numpy().tobytes()
    for row, token in zip(rest, prompt[1:], strict=True):
        ranked = sorted(
            (entry["rank"], -entry["logprob"]) for entry in row.values() if entry["rank"]
        )
        assert [rank for rank, _ in ranked] == list(range(1, count + 1))
        assert ranked == sorted(ranked, key=lambda pair: pair[1])
        assert set(row) - {str(token)} <= {i for i, entry in row.items() if entry["rank"]}
        assert row[str(token)]["decoded_token"] == make_tokenizer().decode([token])


def test_a_chat_has_the_prompt_logprobs_of_what_its_template_writes(engines, client):
    answer = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "12+34"}],
        max_tokens=2,
        n=2,
        logprobs=True,
        extra_body={"prompt_logprobs": 0, "return_prompt_token_ids": True},
    )
    prompt = answer.choices[0].prompt_token_ids
    ours = [
        row[str(token)]["logprob"]
        for row, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    (expected,) = engines.trainer.log_probs([prompt], [1], 1.0)
    assert numpy.array(ours, numpy.float32).tobytes() == expected.numpy().tobytes()
    assert [len(choice.logprobs.content) for choice in answer.choices] == [2, 2]


OF_PROMPTS = {"extra_body": {"prompt_logprobs": 1}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 3}, "best_of=3: not available in true-on-policy mode"),
        ({"suffix": "y"}, "suffix='y': the server would not read it"),
        ({"max_tokens": -1}, "max_tokens must be positive"),
        ({"extra_body": {"regex": "("}}, r"regex='\('.*parenthesis"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs=-1: must be a whole number"),
        ({"extra_body": {"prompt_logprobs": True}}, "prompt_logprobs=True: must be"),
        ({**OF_PROMPTS, "stream": True}, "prompt_logprobs=1: a stream has"),
        ({**OF_PROMPTS, "logprobs": 3}, "prompt_logprobs=1: .*of which 3"),
    ],
)
def test_what_a_completion_cannot_be_asked_is_refused(client, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model="any", prompt="x", **fields)


def test_every_endpoint_takes_any_name_for_the_model_and_answers_by_it(client):
    question = [{"role": "user", "content": "12+34"}]
    for answer in (
        client.completions.create(model="any", prompt="12+34=", max_tokens=4),
        client.chat.completions.create(model="any", messages=question, max_tokens=4),
        client.responses.create(model="any", input="12+34", max_output_tokens=16),
    ):
        assert answer.model == "any"


def chat(client, messages, seed=5, **fields):
    return client.chat.completions.create(
        model="any", messages=messages, seed=seed, extra_body={"return_token_ids": True}, **fields
    )


USER = {"role": "user", "content": "12+34"}


def test_a_chat_ends_where_an_answer_of_a_run_does_and_a_text_where_a_text_of_a_run_does(
    engines, client, model
):
    of_chats = stop_token_ids(str(model), load_config(str(model)))
    of_text = stop_token_ids(str(model), load_config(str(model)), of_chats=False)
    assert (of_chats, of_text) == ((1, TURN_END), (1,))
    for stops in (of_chats, of_text):
        ours = a_runs_requests(["12+34="] * 30, stops=stops)
        sampled = engines.generate(ours)
        for request, completion in zip(ours, sampled, strict=True):
            seed = request.sampling_seed
            if stops == of_chats:
                (choice,) = chat(client, [USER], seed, max_tokens=LENGTH).choices
                assert choice.response_token_ids == completion.response_ids
            else:
                (choice,) = ask(client, "12+34=", seed).choices
                assert choice.token_ids == completion.response_ids
        ends = {completion.response_ids[-1] for completion in sampled}
        assert (TURN_END in ends) == (stops == of_chats)
        assert any(TURN_END in completion.response_ids for completion in sampled)


def test_an_answer_within_a_grammar_ends_where_a_runs_does(engines, client):
    stops, regex = (1, TURN_END), "[a-z]{1,30}"
    grammar = Grammar(kind="regex", text=regex, stop_token_ids=stops)
    ours = a_runs_requests(["12+34="] * 12, stops=stops, grammar=grammar)
    sampled = engines.generate(ours)
    for request, completion in zip(ours, sampled, strict=True):
        (choice,) = client.chat.completions.create(
            model="any", messages=[USER], seed=request.sampling_seed, max_tokens=LENGTH,
            extra_body={"return_token_ids": True, "regex": regex},
        ).choices  # fmt: skip
        assert choice.response_token_ids == completion.response_ids
    assert TURN_END in {completion.response_ids[-1] for completion in sampled}


def test_a_response_ends_where_its_template_ends_an_answer(client):
    for _ in range(12):
        answer = client.responses.create(model="any", input="12+34", max_output_tokens=60)
        assert "§" not in answer.output_text


SYSTEM = {"role": "system", "content": "ab"}
CALLED = {"type": "function", "id": "x", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        ([{"role": "developer", "content": "ab"}, USER], [SYSTEM, USER]),
        ([{"role": "Developer", "content": "ab"}, USER], [SYSTEM, USER]),
        (
            [{"role": "developer", "content": [{"type": "text", "text": "ab"}]}, USER],
            [SYSTEM, USER],
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": x} for x in ("12", "+34")]}],
            [USER],
        ),
        ([USER, {"role": "assistant", "content": "ab"}], "12+34=ab"),
        ([USER, {"role": "assistant", "tool_calls": [CALLED], "content": "ab"}], "12+34ab§="),
        ([USER, {"role": "assistant", "content": "ab"}, SYSTEM], "12+34ab§ab="),
        ([SYSTEM, USER, {"role": "user", "content": ""}], [SYSTEM, USER]),
    ],
)
def test_a_chat_is_read_as_a_run_reads_it(client, messages, same):
    extra = {"return_prompt_token_ids": True}

    def prompt(messages):
        answer = client.chat.completions.create(
            model="any", messages=messages, max_tokens=1, extra_body=extra
        )
        return make_tokenizer().decode(answer.choices[0].prompt_token_ids)

    assert prompt(messages) == (same if isinstance(same, str) else prompt(same))


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        (
            {"role": "tool", "tool_call_id": "x", "content": "7"},
            r"messages\[1\]: role='tool': the mod",
        ),
        ({"role": "function", "name": "f", "content": "7"}, r"messages\[1\]: role='function': the"),
        ({"role": "critic", "content": "7"}, "critic|'role' must be one of"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(client, message, refused):
    with pytest.raises(openai.BadRequestError, match=refused):
        chat(client, [USER, message, USER], max_tokens=1)


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_a_message_with_more_than_text_is_refused(client, kind):
    parts = [{"type": "text", "text": "7"}, {"type": kind, kind: {"url": "data:image/png,x"}}]
    with pytest.raises(openai.BadRequestError, match=f"only supports text input.*'{kind}'"):
        chat(client, [USER, {"role": "user", "content": parts}], max_tokens=1)


def test_several_texts_are_scored_at_once_as_an_evaluation_harness_asks_for_it(engines, client):
    texts = [make_tokenizer().encode(prompt) for prompt in PROMPTS]
    answer = client.completions.create(
        model="any", prompt=texts, echo=True, max_tokens=0, logprobs=1, temperature=0, seed=1
    )
    expected = engines.trainer.log_probs(texts, [1] * len(texts), 1.0)
    for choice, ours in zip(answer.choices, expected, strict=True):
        numbers = numpy.array(choice.logprobs.token_logprobs[1:], numpy.float32)
        assert numbers.tobytes() == ours.numpy().tobytes()
    assert answer.usage.completion_tokens == 0


def test_no_token_is_no_token_under_either_name_of_the_limit(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="any", messages=[USER], **{name: 0})
        assert answer.usage.completion_tokens == 0 and answer.choices[0].message.content == ""


NEUTRAL = {
    "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "n": 1,
    "best_of": 1, "stop": [], "stop_token_ids": [], "stop_regex": [], "suffix": "", "echo": False,
    "stream": False, "stream_options": {"include_usage": True}, "temperature": 1, "top_p": 1,
    "top_k": -1, "min_p": 0, "min_tokens": 0, "user": "me", "metadata": {"a": "b"}, "store": False,
    "service_tier": "auto", "tools": [], "tool_choice": "none", "functions": [],
    "function_call": "none", "parallel_tool_calls": True, "modalities": ["text"], "seed": 5,
    "response_format": {"type": "text"}, "top_logprobs": 0, "chat_template_kwargs": {}, "regex": "",
    "prediction": None, "audio": None, "reasoning_effort": None, "max_completion_tokens": None,
    "watermark": {}, "custom_params": {}, "extra_key": None, "logprobs": None, "model": "any",
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "asked"),
    [("completions", {"prompt": "12+34="}), ("chat/completions", {"messages": [USER]})],
)
def test_fields_that_ask_for_nothing_change_nothing(server, path, asked):
    url, key = server

    def post(**fields):
        body = {"max_tokens": 6, "seed": 5, **asked, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        answer = requests.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, (fields, answer.text)
        (choice,) = answer.json()["choices"]
        return choice.get("text") or choice["message"]["content"]

    expected = post()
    others = [("stop", None), ("logit_bias", {"5": 0}), ("logit_bias", None)]
    for name, value in [*NEUTRAL.items(), *others]:
        assert post(**{name: value}) == expected, name
        if name not in ("seed", *asked):
            assert post(**{name: None}) == expected, name


def test_what_a_client_had_sampled_in_a_session_has_the_trainers_log_probabilities(
    engines, started
):
    _, key, url, _ = started
    headers = {"Authorization": f"Bearer {key}"}
    session = requests.post(url, headers=headers, timeout=60).json()
    with client_of(session["base_url"], session["api_key"]) as client:
        messages = [{"role": "user", "content": "12+34"}]
        for _ in range(2):
            (choice,) = client.chat.completions.create(
                model="policy", messages=messages, max_tokens=6
            ).choices
            messages += [choice.message, {"role": "user", "content": "x"}]
    found = requests.delete(f"{url}/{session['id']}", headers=headers, timeout=60).json()
    assert not found["failures"] and found["metrics"]["gateway/num_answers"] == 2
    # The template ends with `=`, and has none before the answer when the chat goes on: it drifts.
    assert found["metrics"]["gateway/num_drifts"] == 1 < len(found["trajectories"])
    for trajectory in map(Shape(Trajectory, is_open=True).take, found["trajectories"]):
        (trained,) = engines.trainer.log_probs([trajectory.token_ids], [1], 1.0)
        theirs = trained.numpy()[numpy.array(trajectory.sampled[1:])]
        ours = numpy.array(trajectory.rollout_log_probs, numpy.float32)
        assert len(ours) and ours.tobytes() == theirs.tobytes()


def test_a_checkpoint_without_a_tokenizer_is_refused_before_anything_starts(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    for file in model.glob("token*"):
        file.unlink()
    done = onpolicy("serve", "--hf-checkpoint", model, code=2, cwd=tmp_path)
    assert "its tokenizer has no tokens" in done.stderr and "Traceback" not in done.stderr


def test_verify_takes_a_server_that_somebody_else_started(started, checkpoint, tmp_path, capsys):
    """The last test of this file: it leaves the server with weights that it trained."""
    url, of_clients, _, key = started
    key_file, file = tmp_path / "key", tmp_path / "report.json"
    argv = [
        "verify", "--hf-checkpoint", str(checkpoint), "--dtype", "float32",
        "--rollout-server-url", url, "--rollout-api-key", f"@{key_file}",
        "--num-prompts", "8", "--max-new-tokens", "8",
        "--json", str(file), "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    key_file.write_text(of_clients)
    assert main(argv) == 2
    assert "takes it for the key of clients" in capsys.readouterr().err
    key_file.write_text(key)
    code = main(argv)
    report = json.loads(file.read_text())
    assert code == 0, report
    assert report["num_mismatched_tokens"] == 0 and report["num_compared_tokens"] == 2 * 8 * 8
    assert not list((tmp_path / "run").rglob("engine*.log"))  # none was started


SCHEMA = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
OBJECT = {**SCHEMA, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}
CONSTRAINED = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}
    },
    "json_object": {"response_format": {"type": "json_object"}},
    "regex": {"extra_body": {"regex": r'\{"n":(true|false)\}'}},
}


@pytest.mark.parametrize("fields", CONSTRAINED.values(), ids=CONSTRAINED)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_within_a_grammar_is_that_and_its_numbers_are_of_what_it_was_drawn_from(
    client, fields, stream
):
    messages = [{"role": "user", "content": "x"}]
    asked = {"model": "any", "messages": messages, "max_tokens": 40, "seed": 5, "logprobs": True}
    answer = client.chat.completions.create(**asked, stream=stream, **fields)
    choices = [piece.choices[0] for piece in answer] if stream else answer.choices
    text = "".join((c.delta if stream else c.message).content or "" for c in choices)
    numbers = [x.logprob for c in choices if c.logprobs for x in c.logprobs.content]
    if choices[-1].finish_reason == "stop" or "json_object" not in str(fields):
        assert isinstance(json.loads(text), dict)
    assert text.startswith("{") and numbers[0] == 0.0  # nothing else was allowed


def test_a_call_that_is_forced_is_made(client):
    messages = [{"role": "user", "content": "x"}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        (answer,) = client.chat.completions.create(
            model="any", messages=messages, max_tokens=200, seed=5, tools=[TOOL], tool_choice=choice,
            parallel_tool_calls=False,
        ).choices  # fmt: skip
        (call,) = json.loads(answer.message.content)  # which a --sglang-tool-call-parser reads
        assert call["name"] == "f" and set(call["parameters"]) == {"n"}
