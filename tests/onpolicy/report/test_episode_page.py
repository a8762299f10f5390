"""`onpolicy episodes`: what it reads of a run's samples, and a page that is safe and follows the run."""

import base64
import contextlib
import functools
import hashlib
import http.client
import io
import json
import pathlib
import re
import threading
import urllib.error
import urllib.request

import pytest
from PIL import Image

from onpolicy.cli.main import main
from onpolicy.errors import ConfigError
from onpolicy.report.episode_page import make_server, read_episodes, render
from tests.support.fake_runs import HOSTILE, write_run


def sampled(text, num_tokens):
    return {"sampled": True, "text": text, "num_tokens": num_tokens}


def given(text, num_tokens):
    return {"sampled": False, "text": text, "num_tokens": num_tokens}


def sample(**changes):
    tokens = {"texts": ["2", "<eos>"], "log_probs": [-0.5, -1.0], "advantages": 0.5, "weights": 1.0}
    return {
        "step": 3, "prompt_index": 7, "sample": 0, "trajectory": 0, "prompt": "1+1=",
        "response": "2<eos>", "label": "2", "reward": 1.0, "reward_parts": {},
        "finish_reason": "stop", "num_tokens": 2, "mismatched_tokens": 0, "tokens": tokens,
        **changes,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Writes the samples of a rollout, and returns its run directory."""
    directory = write_run(tmp_path / "run", [])

    def write(*samples, name="rollout_000003"):
        (tmp_path / "run" / "samples").mkdir(exist_ok=True)
        text = "".join(json.dumps(each) + "\n" for each in samples)
        (tmp_path / "run" / "samples" / f"{name}.jsonl").write_text(text)
        return directory

    return write


def episodes(directory, rollouts=20):
    return read_episodes(directory, rollouts)["episodes"]


def test_a_single_answer_is_an_episode_of_one_turn(run):
    (found,) = episodes(run(sample()))
    assert found["key"] == "rollout 3, prompt 7, sample 0"
    assert (found["reward"], found["num_tokens"], found["num_turns"]) == (1.0, 2, 1)
    assert found["faults"] == []
    question, answer = found["trajectories"][0]["turns"]
    assert question == {"sampled": False, "text": "1+1="}
    assert answer["texts"] == ["2", "<eos>"] and answer["log_probs"] == [-0.5, -1.0]
    assert answer["advantages"] == 0.5


def test_a_turn_says_how_long_it_took_and_a_given_one_what_passed_before_the_next_request(run):
    turns = [given("ask", 3), sampled("ab", 2), given("tool", 1), sampled("c", 1)]
    turns[1]["seconds"], turns[3]["seconds"] = [0.25, 2.0], [2.75, 3.0]
    (timed, untimed) = episodes(run(sample(turns=turns), sample(sample=1, turns=turns[:2])))
    shown = [turn.get("seconds") for turn in timed["trajectories"][0]["turns"]]
    assert shown == [None, 1.75, 0.75, 0.25]
    assert "seconds" not in untimed["trajectories"][0]["turns"][0]
    with pytest.raises(ConfigError, match="seconds"):
        episodes(run(sample(turns=[{**turns[1], "seconds": [1.0]}])))


def test_tokens_stand_in_their_turns_and_a_branch_where_it_began(run):
    tokens = {"texts": ["a", "b", "c"], "log_probs": [-1.0, -2.0, -3.0]}
    first = [given("ask", 3), sampled("ab", 2), given("tool", 1), sampled("c", 1)]
    branch = {"turns": [given("ask", 3), given("?", 1), sampled("c", 1)], "forks": [["0", 3]]}
    found = episodes(
        run(
            sample(turns=first, tokens=tokens, num_tokens=3),
            sample(trajectory=1, tokens={"texts": ["c"], "log_probs": -1}, num_tokens=1, **branch),
            sample(sample=1, reward=0.0),
        )
    )
    assert [len(each["trajectories"]) for each in found] == [2, 1]
    assert (found[0]["num_tokens"], found[0]["num_turns"]) == (4, 3)
    _, ab, _, c = found[0]["trajectories"][0]["turns"]
    assert (ab["texts"], ab["log_probs"]) == (["a", "b"], [-1.0, -2.0])
    assert (c["texts"], c["log_probs"]) == (["c"], [-3.0])
    _, question, answer = found[0]["trajectories"][1]["turns"]
    assert question["branch"] == "branch 0 begins here, after 3 tokens"
    assert answer == {"sampled": True, "text": "c", "texts": ["c"], "log_probs": -1}


def test_a_turn_says_the_reward_of_its_tokens(run):
    turns = [given("ask", 3), sampled("ab", 2), given("tool", 1), sampled("c", 1)]
    tokens = {"texts": ["a", "b", "c"], "log_probs": -1}
    rewarded = {"token_rewards": [0.25, 0.5, -1.0], "num_tokens": 3}
    (found,) = episodes(run(sample(turns=turns, tokens=tokens, **rewarded)))
    rewards = [turn.get("reward") for turn in found["trajectories"][0]["turns"]]
    assert rewards == [None, 0.75, None, -1.0]


def test_a_session_with_one_trajectory_has_no_branches_but_of_a_template_that_rewrites_the_past(
    run,
):
    """Its answers are forks of each other, of which one trajectory is left."""
    told = {"turns": [given("ask", 3), sampled("2<eos>", 2)], "forks": [["0", 0], ["1", 3]]}
    drifts = {"info": {"gateway/drifts": {"1": "token 3"}}}
    plain, rewritten = episodes(run(sample(**told), sample(sample=1, **told, **drifts)))
    assert not any("branch" in turn for turn in plain["trajectories"][0]["turns"])
    assert "writes the past anew" in rewritten["trajectories"][0]["turns"][1]["branch"]


def encoded(kind="PNG", size=(32, 24), **options):
    """The bytes of a red image."""
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind, **options)
    return file.getvalue()


def asked(text, *images):
    """A given turn whose images are these bytes."""
    return given(text, 9) | {"images": [hashlib.sha256(data).hexdigest() for data in images]}


def keep(directory, *images):
    """Write images where a run keeps them."""
    folder = pathlib.Path(directory) / "samples" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for data in images:
        (folder / hashlib.sha256(data).hexdigest()).write_bytes(data)


def test_an_image_is_in_the_page_once_and_each_turn_says_which_of_the_trajectorys_it_is(run):
    """Each of its uses had its own copy in another's page (liaohch3/claude-tap #194)."""
    red, other = encoded(), encoded("JPEG", (3, 2))
    turns = [asked("\ufffc?", red), sampled("2", 1), asked("\ufffc and \ufffc", other, red)]
    directory = run(*(sample(sample=i, turns=turns) for i in range(8)))
    keep(directory, red, other)
    data = read_episodes(directory, 9)
    names = [hashlib.sha256(each).hexdigest() for each in (red, other)]
    for episode in data["episodes"]:
        first, _, last = episode["trajectories"][0]["turns"]
        assert first["images"] == [[1, names[0]]]
        assert last["images"] == [[2, names[1]], [3, names[0]]]
    page = render(data)
    assert [page.count(base64.b64encode(each).decode()) for each in (red, other)] == [1, 1]
    assert [data["images"][name]["told"] for name in names] == ["32 x 24, PNG", "3 x 2, JPEG"]


def test_a_run_without_images_says_what_it_said_before(run):
    data = read_episodes(run(sample(), sample(turns=[given("\ufffc", 1), sampled("2", 1)])), 9)
    assert data["images"] == {} and "images" not in json.dumps(data["episodes"])


SHOWN = {
    "PNG": (encoded(), "image/png"),
    "JPEG": (encoded("JPEG"), "image/jpeg"),
    "JPEG of a phone": (encoded("MPO", save_all=True, append_images=[Image.new("L", (9, 9))]),
                        "image/jpeg"),
    "WEBP": (encoded("WEBP"), "image/webp"),
    "GIF": (encoded("GIF"), "image/gif"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHOWN)
def test_the_four_formats_of_browsers_are_shown(run, kind):
    data, media_type = SHOWN[kind]
    directory = run(sample(turns=[asked("\ufffc", data)]))
    keep(directory, data)
    (found,) = read_episodes(directory, 9)["images"].values()
    assert found["url"] == f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    assert found["told"] == f"32 x 24, {kind.split()[0]}"


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="throw 1"><script>throw 2</script></svg>'


@pytest.mark.parametrize(
    "data", [SVG, HOSTILE.encode(), b"", b"\x89PNG\r\n\x1a\n", encoded("TIFF"), encoded("BMP")]
)
def test_what_is_none_of_them_is_told_in_words_and_its_bytes_are_not_in_the_page(run, data):
    """A drawing with scripts ran them in another's page (scaraude/home-automation-rs #30)."""
    directory = run(sample(turns=[asked("\ufffc", data)]))
    keep(directory, data)
    (found,) = read_episodes(directory, 9)["images"].values()
    assert found == {"told": "not shown: no PNG, JPEG, WEBP, GIF"}


def test_an_image_whose_file_is_gone_is_told_in_words(run):
    directory = run(sample(turns=[asked("\ufffc", b"gone")]))
    (found,) = read_episodes(directory, 9)["images"].values()
    assert found == {"told": "not shown: No such file or directory"}


@pytest.mark.parametrize(
    "changes",
    [
        {"images": ["../../../private.png"]},
        {"images": ["/private.png"]},
        {"images": ["a" * 64 + "\n"]},
        {"images": ["a" * 64] * 2},
        {"sampled": True},
    ],
)
def test_images_without_places_and_the_readers_own_files_are_refused(run, changes):
    """A run may come from somebody who would like a file to be in the page that is handed on."""
    turn = {**asked("\ufffc", b""), **changes}
    directory = run(sample(turns=[turn]))
    (pathlib.Path(directory).parent / "private.png").write_bytes(encoded())
    with pytest.raises(ConfigError, match=r"turns.0.*: .*Mend or delete the line"):
        read_episodes(directory, 9)


def test_two_episodes_never_share_the_key_that_links_to_one_of_them(run):
    found = episodes(run(sample(), sample(reward=0.0), sample(sample=1)))
    assert [each["key"].removeprefix("rollout 3, prompt 7, ") for each in found] == [
        "sample 0", "sample 0, time 2", "sample 1",
    ]  # fmt: skip
    assert {each["prompt"] for each in found} == {"rollout, prompt 7"}


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({"finish_reason": "length"}, ["truncated"]),
        ({"mismatched_tokens": 2}, ["mismatched"]),
        ({"mismatched_tokens": None}, []),
        ({"metrics": {"python_faults/time": 1.0, "python_calls": 4.0}}, ["python_faults/time"]),
        ({"metrics": {"gateway/num_refused": 0.0}, "info": {"error": "died"}}, ["error"]),
    ],
)
def test_what_went_wrong_is_named(run, changes, faults):
    (found,) = episodes(run(sample(**changes)))
    assert found["faults"] == faults


def test_an_episode_that_could_not_be_scored_is_a_fault_without_a_reward(run):
    unscored = {"reward": None, "is_unscored": True}
    (found,) = episodes(run(sample(reward=1.0), sample(trajectory=1, **unscored)))
    assert (found["reward"], found["has_failed"]) == (None, False)
    assert "unscored" in found["faults"]
    assert [each["reward"] for each in found["trajectories"]] == [1.0, None]


FAILED = {"reward": None, "attempt": 1, "failed": "died", "message": "its process died"}


def test_an_attempt_that_failed_has_no_reward_and_says_why(run):
    directory = run(sample(**FAILED), sample(trajectory=1, **FAILED), name="failed_rollout_000003")
    run(sample(), name="rollout_000003")
    failed, found = episodes(directory, rollouts=1)
    assert failed["key"] == "rollout 3, prompt 7, sample 0, attempt 1"
    assert (failed["reward"], failed["faults"]) == (None, ["failed: died"])
    assert dict(failed["facts"])["failed"] == "its process died"
    assert len(failed["trajectories"]) == 2 and failed["where"] == found["where"]


def test_infos_and_metrics_are_told(run):
    calls = [{"name": "add", "arguments": [1, 1]}]
    (found,) = episodes(run(sample(metrics={"num_calls": 1.0}, info={"calls": calls})))
    told = dict(found["facts"])
    assert told["num_calls"] == "1.0" and json.loads(told["calls"]) == calls


def test_the_last_rollouts_are_shown_and_the_others_counted(run):
    for step in range(4):
        directory = run(sample(step=step), name=f"rollout_{step:06d}")
    run(sample(step=2), name="eval_000002")
    data = read_episodes(directory, 3)
    assert [each["where"] for each in data["episodes"]] == ["eval 2", "rollout 2", "rollout 3"]
    assert data["left_out"] == 2


def test_what_is_no_run_or_no_sample_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"RUN=nowhere: has no config\.json"):
        read_episodes("nowhere", 1)
    directory = run(sample(), {"step": 3})
    with pytest.raises(
        ConfigError, match=re.escape("rollout_000003.jsonl:2: holds no prompt_index")
    ):
        read_episodes(directory, 1)


def test_the_page_cannot_be_broken_out_of_and_asks_for_nothing(run, tmp_path):
    said = {"info": {HOSTILE: HOSTILE}, "tokens": {"texts": [HOSTILE, "\ud800"], "log_probs": -1}}
    directory = run(sample(prompt=HOSTILE, **said))
    file = tmp_path / "page.html"
    assert main(["episodes", directory, "--output", str(file)]) == 0
    page = file.read_text()
    assert page.count("</script>") == 2 and "<img" not in page
    before, _, rest = page.partition('<script type="application/json" id="data">')
    text, _, after = rest.partition("</script>")
    assert not re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org)|__", before + after)
    data = json.loads(text)
    assert dict(data["episodes"][0]["facts"])[HOSTILE] == HOSTILE


def test_a_served_page_follows_the_run(run):
    directory = run(sample())
    with make_server(0, lambda: read_episodes(directory, 9), render) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = server.url

            def data():
                with urllib.request.urlopen(f"{address}data.json") as answer:
                    return json.load(answer)

            with urllib.request.urlopen(address) as answer:
                assert "onpolicy episodes" in answer.read().decode()
            before = data()
            assert data()["version"] == before["version"]
            known = {"If-None-Match": before["version"]}
            again = urllib.request.Request(f"{address}data.json", headers=known)
            with pytest.raises(urllib.error.HTTPError, match="304"):
                urllib.request.urlopen(again)
            run(sample(step=4), name="rollout_000004")
            assert len(data()["episodes"]) == 2 and data()["version"] != before["version"]
            assert urllib.request.urlopen(again).status == 200
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{address}samples")
            with pytest.raises(ConfigError, match=f"--port={server.server_port}: cannot be"):
                make_server(server.server_port, dict, render)
        finally:
            server.shutdown()
            thread.join()


WRONG = [None, 5, "x", True, [], [1], [[1]], {"a": 1}, [{"b": 2}], float("nan")]


@pytest.mark.parametrize("field", sample())
def test_a_line_of_another_shape_is_refused_or_shown_and_never_a_traceback(run, field):
    for number, wrong in enumerate(WRONG):
        directory = run({**sample(), field: wrong}, name=f"rollout_{number:06}")
        with contextlib.suppress(ConfigError):
            render(read_episodes(directory, 1))
    with pytest.raises(ConfigError, match=r"rollout_\d+.jsonl:1: .*Mend or delete the line"):
        read_episodes(directory, 99)


HOSTS = {
    "127.0.0.1": 200, "localhost:{port}": 200, "LOCALHOST": 200, "[::1]:{port}": 200,
    "workstation.example:{port}": 200, "evil.example": 403, "127.0.0.1.evil.example": 403,
    "evil.example:{port}": 403, "127.0.0.1:80@evil.example": 403, "": 403, "localhost.": 403,
    "127.0.0.1:": 403, "::1": 403, "localhost/evil": 403,
}  # fmt: skip


def test_a_served_page_is_for_those_who_know_its_token_and_call_this_host_by_its_name(run):
    directory = run(sample())
    read = functools.partial(read_episodes, directory, 9)
    with make_server(0, read, render, ("workstation.example",)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()

        def status(path, host="127.0.0.1"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
            connection.putrequest("GET", path, skip_host=True)
            connection.putheader("Host", host)
            connection.endheaders()
            answer = connection.getresponse()
            assert answer.status == 200 or b"onpolicy episodes" not in answer.read()
            connection.close()
            return answer.status

        try:
            own = f"/{server.token}/"
            for path in (own, f"{own}data.json"):
                for host, expected in HOSTS.items():
                    assert status(path, host.format(port=server.server_port)) == expected, host
            for token in ("", "/", f"/{server.token[:-1]}"):
                assert [status(f"{token}/"), status(f"{token}/data.json")] == [403, 403], token
        finally:
            server.shutdown()
            thread.join()


def links(page):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    return [each["episodes"] for each in json.loads(found[1])["runs"]]


def test_a_report_links_the_pages_of_its_runs_that_have_episodes(run, tmp_path):
    without = write_run(tmp_path / "without", [])
    argv = ["report", without, run(sample()), "--output", str(tmp_path / "all of them.html")]
    assert main(argv) == 0
    assert links((tmp_path / "all of them.html").read_text()) == [None, None]
    assert [*tmp_path.glob("*.html")] == [tmp_path / "all of them.html"]
    assert main([*argv, "--episodes"]) == 0
    assert links((tmp_path / "all of them.html").read_text()) == [
        None, "all%20of%20them.episodes-2.html",
    ]  # fmt: skip
    page = (tmp_path / "all of them.episodes-2.html").read_text()
    assert page == render(read_episodes(str(tmp_path / "run"), 20))
    (tmp_path / "run" / "config.json").unlink()  # nothing is known of such a run but its curves
    assert main([*argv, "--episodes"]) == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "70000"], "--port=70000: must be at most 65535"),
        (["--rollouts", "0"], "--rollouts=0: must be at least 1"),
        (["--output", "no/such/page.html"], "--output=no/such/page.html: cannot be written"),
    ],
)
def test_bad_flags_are_refused(run, capsys, flags, says):
    assert main(["episodes", run(sample()), *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_run_has_to_be_given(capsys):
    assert main(["episodes"]) == 2
    assert "RUN is missing" in capsys.readouterr().err
