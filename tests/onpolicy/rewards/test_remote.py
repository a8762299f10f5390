"""What scores over HTTP (remote_rm, judge), at a server that fails in every way there is."""

import json
import math
import threading
from collections import Counter
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from onpolicy.errors import ConfigError, RewardError
from onpolicy.rewards import endpoint
from onpolicy.system.proxies import proxy_of
from tests.support.proxies import EXCEPTIONS, PROXIES, recording_proxy
from tests.support.samples import rewards_of
from tests.support.samples import to_score as sample

MISDEEDS = {
    "refuses": (403, b"who are you?"),
    "moves": (302, b""),
    "breaks": (500, b"out of memory"),
    "babbles": (200, b"<html>"),
    "short": (200, b'{"rewards": []}'),
    "no list": (200, b'{"reward": 1}'),
    "text": (200, b'{"rewards": ["1.0"]}'),
    "nan": (200, b'{"rewards": [NaN]}'),
    "weights": (200, b'{"rewards": [{"score": 1, "token_weights": [1]}]}'),
}


class Service:
    """Scores a response by its length; does what it is told by a first word, the first `times`."""

    def __init__(self):
        self.asked, self.keys, self.times, self.hold = [], set(), Counter(), threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.asked.append(body)
                service.keys.add(self.headers.get("Authorization"))
                status, answer = service.answer(self.path, body)
                if status == 0:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *given):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path, body):
        if path == "/v1/chat/completions":
            return self.judge(body)
        responses = [each["response"] for each in body["samples"]]
        if responses[0] == "hangs":
            self.hold.wait()
        for word, status in [("drops", 0), ("busy", 429), ("restarts", 503)]:
            if responses[0].startswith(word) and self.times[responses[0]] < 2:
                self.times[responses[0]] += 1
                return status, b""
        if responses[0] in MISDEEDS:
            return MISDEEDS[responses[0]]
        parts = [{"score": len(r), "is_short": len(r) < 3} for r in responses]
        return 200, json.dumps({"rewards": parts}).encode()

    def judge(self, body):
        said = body["messages"][0]["content"].rpartition("Response: ")[2]
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return 200, json.dumps({"choices": [choice] if said != "empty" else []}).encode()

    def close(self):
        self.hold.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(endpoint, "BACKOFF_SECONDS", 0.0)
    service = Service()
    yield service
    service.close()


@pytest.fixture
def remote(scorer, service, monkeypatch):
    def make(batch_size=16, breaker=8, **config):
        monkeypatch.setattr("onpolicy.rewards.endpoint.BATCH_SIZE", batch_size)
        monkeypatch.setattr("onpolicy.rewards.endpoint.MOST_FAILURES", breaker)
        return scorer(rm_type="remote_rm", rm_url=service.url, **config)

    return make


def test_samples_are_sent_in_batches_and_scored_in_their_order(remote, service):
    samples = [sample("x" * n, "7", hint="a") for n in range(1, 6)]
    metrics = remote(batch_size=2, rm_api_key="K").score([samples[:3], samples[3:]])
    assert [s.reward for s in samples] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert samples[0].reward_parts == {"is_short": 1.0}
    assert not any(metrics.values())
    assert sorted(len(body["samples"]) for body in service.asked) == [1, 2, 2]
    assert service.keys == {"Bearer K"}
    first = next(b for b in service.asked if b["samples"][0]["response"] == "x")["samples"][0]
    assert first == {
        "prompt": "", "response": "x", "label": "7", "metadata": {"hint": "a"},
        "finish_reason": "stop", "prompt_index": 0, "sample_index": 0,
    }  # fmt: skip


def test_columns_that_json_has_no_word_for_are_sent_as_text_and_no_number_as_null(remote, service):
    columns = {"made": datetime(2024, 5, 1), "gap": math.nan, "price": Decimal("1.10"), "raw": b"a"}
    remote().try_out(sample("", **columns).prompt)
    remote().score([[sample("good", **columns)]])
    said = {"made": "2024-05-01T00:00:00", "gap": None, "price": "1.10", "raw": "YQ=="}
    assert [body["samples"][0]["metadata"] for body in service.asked] == [said, said]


def test_a_column_that_no_strict_service_takes_is_refused_by_name_before_the_start(
    remote, scorer, service
):
    prompts = [sample("").prompt, sample("", width=math.inf).prompt]
    message = (
        r"data.jsonl: prompt 0, column 'width': inf: .* --rm-type=remote_rm is sent all .*text"
    )
    with pytest.raises(ConfigError, match=message):
        remote().check_labels(prompts, "data.jsonl")
    scorer(rm_type="exact").check_labels(prompts, "data.jsonl")
    (failed,) = asked = [sample("good", width=math.inf)]
    metrics = remote(rm_max_error_rate=1.0).score([asked])  # such as an episode's own prompt
    assert failed.has_failed and metrics["rollout/reward_errors"] == 1 and service.asked == []


def test_what_may_pass_is_asked_again(remote, service):
    samples = [sample(word) for word in ("drops", "busy", "restarts")]
    remote(batch_size=1, rm_retries=2, rm_max_error_rate=0.0).score([samples])
    assert [s.reward for s in samples] == [5.0, 4.0, 8.0]
    assert len(service.asked) == 9
    with pytest.raises(
        RewardError, match=r"--rm-type=remote_rm: 1 of 1 .*had no answer .*HTTP 429"
    ):
        remote(rm_retries=1, rm_max_error_rate=0.0).score([[sample("busy again")]])  # fmt: skip


def test_what_fails_has_no_reward_and_is_counted(remote, service, caplog):
    samples = [sample(word) for word in MISDEEDS] + [sample("good")]
    rule = remote(batch_size=1, rm_retries=1, breaker=99, rm_max_error_rate=0.9)
    metrics = rule.score([samples])
    assert rewards_of(samples) == [None] * len(MISDEEDS) + [4.0]
    assert metrics["rollout/reward_errors"] == len(MISDEEDS)
    assert "9 of 10 samples could not be scored" in caplog.text
    assert "HTTP 403: who are you?" in caplog.text
    counts = Counter(body["samples"][0]["response"] for body in service.asked)
    twice = {"breaks", "babbles"}
    assert counts == {s.response: 1 + (s.response in twice) for s in samples}
    with pytest.raises(RewardError, match=r"9 of 10 .* more than --rm-max-error-rate=0\.8"):
        remote(batch_size=1, rm_retries=0, breaker=99, rm_max_error_rate=0.8).score([samples])


def test_a_request_without_an_answer_is_given_up(remote):
    rule = remote(rm_request_timeout=0.2, rm_retries=0, rm_max_error_rate=0.0)
    message = r"no answer within --rm-request-timeout=0\.2 seconds"
    with pytest.raises(RewardError, match=message):
        rule.score([[sample("hangs")]])


def test_a_service_that_fails_again_and_again_is_left_alone_until_one_request_succeeds(
    remote, service, caplog
):
    flags = {"batch_size": 1, "rm_concurrency": 1, "rm_retries": 0, "rm_max_error_rate": 1.0}
    rule = remote(breaker=2, **flags)
    broken, good = [sample("breaks") for _ in range(5)], [sample("good") for _ in range(5)]
    assert rule.score([broken])["rollout/reward_errors"] == 5
    assert len(service.asked) == 2
    rule.score([broken])
    assert len(service.asked) == 3
    assert rule.score([good])["rollout/reward_errors"] == 0
    assert len(service.asked) == 8
    assert (
        rule.score([[*broken[:1], *good[:1], *broken[:1], *good[:1]]])["rollout/reward_errors"] == 2
    )


def test_a_service_is_tried_before_a_run_is_started(remote, scorer, service):
    remote().try_out(sample("", "good").prompt)
    with pytest.raises(
        ConfigError, match=r"--rm-type=remote_rm: tried on the first .*HTTP 500: out of"
    ):
        remote(rm_retries=0).try_out(sample("", "breaks").prompt)
    nowhere = scorer(rm_type="remote_rm", rm_url="http://127.0.0.1:9", rm_retries=0)
    with pytest.raises(ConfigError, match=r"no answer from http://127\.0\.0\.1:9: ClientConn"):
        nowhere.try_out(sample("").prompt)


def test_a_prompt_that_names_a_service_is_scored_by_it_and_tried_with_it(scorer, service):
    rule = scorer(rm_type="exact", rm_url=service.url, rm_retries=0)
    ours, theirs = sample("xx", "xx"), sample("xxx", "breaks")
    theirs.prompt = replace(theirs.prompt, rule="remote_rm")
    rule.check_labels([ours.prompt, theirs.prompt], "sets.jsonl")
    rule.score([[ours, theirs]])
    assert (ours.reward, theirs.reward, theirs.reward_parts) == (1.0, 3.0, {"is_short": 0.0})
    with pytest.raises(ConfigError, match=r"the reward remote_rm: tried on the first .*HTTP 500"):
        rule.try_out(theirs.prompt)
    assert len(service.asked) == 2


@pytest.fixture
def judge(scorer, service, tmp_path):
    (tmp_path / "judge.txt").write_text("Q: {prompt}\nA: {label}\nResponse: {response}")
    given = {"judge_url": f"{service.url}/v1/", "judge_model": "j"}
    return lambda **config: scorer(judge_prompt=str(tmp_path / "judge.txt"), **given, **config)


def test_the_last_verdict_of_a_judge_is_the_reward(judge, service):
    says = ["Score: 3. On second thoughts, score: 7", "**Score:** -0.5", "SCORE = 1 for {label}"]
    samples = [sample(text) for text in says]
    judge(rm_type="judge", judge_api_key="K").score([samples])
    assert [s.reward for s in samples] == [7.0, -0.5, 1.0]
    asked = {body["messages"][0]["content"] for body in service.asked}
    assert "Q: \nA: 42\nResponse: SCORE = 1 for {label}" in asked
    assert service.asked[0].keys() == {"model", "messages", "max_tokens", "temperature"}
    assert service.keys == {"Bearer K"}
    graded = sample("score 1, mark 2")
    judge(rm_type="judge", judge_verdict=r"(?:grade|mark) (\d)").score([[graded]])
    assert graded.reward == 2.0


def test_a_judge_without_a_verdict_has_failed(judge):
    samples = [sample(text) for text in ("I like it", "empty", "score 1", "score: 2")]
    metrics = judge(rewards=("judge=0.5", "exact"), rm_max_error_rate=0.5).score([samples])
    assert rewards_of(samples) == [None, None, 0.5, 1.0]
    assert metrics["rollout/reward_errors"] == 2
    message = "2 of 4 .* was answered with 'I like it': no --judge-verdict is in it"
    with pytest.raises(RewardError, match=message):
        judge(rm_type="judge", rm_max_error_rate=0.4).score([samples])


def test_a_judge_that_sees_no_response_is_refused(judge, tmp_path):
    rule = judge(rm_type="judge")
    (tmp_path / "judge.txt").write_text("Is {prompt} a good question?")
    with pytest.raises(ConfigError, match=r"--judge-prompt=.*would not see what"):
        rule.try_out(sample("").prompt)
    (tmp_path / "judge.txt").unlink()
    with pytest.raises(ConfigError, match=r"--judge-prompt=.*cannot be read"):
        rule.try_out(sample("").prompt)


ANSWER = b'{"rewards": [7.0]}'
RELAYED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)
OUTSIDE = {"rm_type": "remote_rm", "rm_url": "http://rm.example.com:8000/score", "rm_api_key": "K"}


def scored(rule, response):
    rule.score([[asked := sample(response)]])
    return asked.reward


@pytest.fixture
def proxied(monkeypatch):
    """Sets the environment of a proxy, which answers as a service would; yields what it was sent."""
    for name in (*PROXIES, *EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)
    with recording_proxy(RELAYED) as (environment, seen):

        def set_variables(**others):
            for name, value in {**environment, **others}.items():
                monkeypatch.setenv(name, value)
            return seen

        yield set_variables


def test_a_service_outside_is_asked_through_the_proxy_that_the_environment_names(scorer, proxied):
    seen = proxied()
    assert scored(scorer(**OUTSIDE), "a") == 7.0
    assert seen[-1].startswith("POST http://rm.example.com:8000/score HTTP/1.1")


def test_a_key_for_an_encrypted_service_is_not_shown_to_the_proxy(scorer, proxied):
    seen = proxied()
    https = {**OUTSIDE, "rm_url": "https://rm.example.com/score", "rm_retries": 0}
    scored(scorer(**https, rm_max_error_rate=1.0), "a")
    assert seen and all(each.startswith("CONNECT rm.example.com:443") for each in seen)
    assert "Bearer" not in "".join(seen)


def test_a_service_of_this_host_takes_no_proxy(remote, proxied):
    seen = proxied()
    assert scored(remote(), "abc") == 3.0
    assert seen == []


@pytest.mark.parametrize(
    ("url", "is_direct"),
    [
        ("http://127.0.0.5:1/x", True), ("http://[::1]:1/x", True), ("http://localhost:1/x", True),
        ("http://10.1.2.3:1/x", True), ("http://192.168.0.9/x", True),
        ("http://[fd00::7]/x", True), ("http://reward-server:8000/x", True),
        ("http://rm.cluster.example/x", True), ("http://8.8.8.8/x", False),
        ("https://api.example.com/v1", False), ("wss://env.example.com/ws", False),
        ("http://cluster.example.com/x", False),
    ],
)  # fmt: skip
def test_which_services_are_asked_directly(proxied, url, is_direct):
    """aio-libs/aiohttp#4431: a service that no_proxy names went through the proxy."""
    proxied(no_proxy="elsewhere.example,.cluster.example", NO_PROXY="")
    assert (proxy_of(url, "--rm-url") is None) == is_direct


def test_without_a_proxy_in_the_environment_there_is_none(proxied):
    assert proxy_of("https://api.example.com/v1", "--rm-url") is None


def test_a_proxy_of_another_kind_is_refused_with_what_to_do(proxied, scorer):
    """aio-libs/aiohttp#3075: a proxy that the library cannot use was passed over without a word."""
    socks = dict.fromkeys(PROXIES, "") | {"all_proxy": "socks5://127.0.0.1:1080"}
    proxied(**socks)
    rule = "all_proxy is a proxy of socks5.*Name one in http_proxy, or rm.example.com in no_proxy"
    with pytest.raises(ConfigError, match=rf"--rm-url={OUTSIDE['rm_url']}: .*{rule}"):
        scored(scorer(**OUTSIDE), "a")
