"""`onpolicy episodes` as a person meets it: its page in a real Chromium that has no network."""

import json

import pytest

from onpolicy.cli.main import main
from tests.onpolicy.report.test_episode_page import (
    FAILED,
    SVG,
    asked,
    encoded,
    given,
    keep,
    sample,
    sampled,
)
from tests.support.browser import count, set_to, texts
from tests.support.fake_runs import HOSTILE, write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402


def test_the_page_of_episodes_lists_them_and_colours_their_tokens(browser, tmp_path):
    """By reward and by fault; one that is chosen shows its turns, its branch, and its tokens. What
    failed is there too, and the page of several runs links it."""
    directory = write_run(tmp_path / "run", [])
    tokens = {"texts": ["2", HOSTILE], "log_probs": [-3.0, 0.0], "advantages": [-1.0, 1.0]}
    turns = [given("1+1=", 4), sampled(f"2{HOSTILE}", 2)]
    told = {"turns": turns, "tokens": {**tokens, "weights": [0.0, 1.0]}}
    lines = [sample(**told, info={"calls": ["add"]}), sample(sample=1, reward=0.0)]
    lines += [sample(sample=2, reward=0.5, finish_reason="length")]
    (tmp_path / "run" / "samples").mkdir()
    file = tmp_path / "run" / "samples" / "rollout_000003.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    failed = json.dumps(sample(**FAILED | {"attempt": 7})) + "\n"
    file.with_name("failed_rollout_000003.jsonl").write_text(failed)
    assert main(["report", directory, "--episodes", "--output", str(tmp_path / "page.html")]) == 0
    browser.get((tmp_path / "page.html").as_uri())
    browser.find_element("link text", "episodes").click()

    def listed():
        rows = browser.find_elements("css selector", "tr[data-episode]")
        return [row.get_attribute("data-episode")[-1] for row in rows]

    assert listed() == ["7", "0", "1", "2"]
    set_to(browser, '#filters [data-name="faults"]', "= failed: died")
    assert listed() == ["7"]
    browser.find_element("css selector", "tr[data-episode]").click()
    assert FAILED["message"] in browser.find_element("id", "shown").text
    set_to(browser, '#filters [data-name="reward"][data-side="1"]', "9")  # it has none
    assert listed() == []
    set_to(browser, '#filters [data-name="reward"][data-side="1"]', "")
    set_to(browser, '#filters [data-name="faults"]', "")
    set_to(browser, '#filters [data-name="reward"][data-side="-1"]', "0.5")
    assert listed() == ["0", "2"]
    set_to(browser, '#filters [data-name="faults"]', "= truncated")
    assert listed() == ["2"]
    set_to(browser, '#filters [data-name="faults"]', "none")
    assert listed() == ["0"]
    browser.find_element("css selector", "tr[data-episode]").click()
    shown = browser.find_element("id", "shown")
    assert "calls" in shown.text and "ended by stop" in shown.text

    def spans():
        return shown.find_elements("css selector", ".token")

    def colours():
        return [span.value_of_css_property("background-color") for span in spans()]

    assert [span.text for span in spans()] == ["2", HOSTILE]
    assert spans()[0].get_attribute("title").startswith("probability 0.04979, log-probability -3")
    assert "rejected" in spans()[0].get_attribute("class")
    unlikely, sure = colours()
    assert unlikely != sure
    button = next(b for b in shown.find_elements("css selector", "button") if b.text == "advantage")
    button.click()
    below, above = colours()
    assert len({unlikely, below, above}) == 3
    assert browser.get_log("browser") == []


CHAT = [
    given("<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nGo:\n\x1b[41mS\x1b[0mFF\nFHF\nFFG<|im_end|>\n"
          "<|im_start|>assistant\n", 9),
    sampled("<think>Hm</think>I go.\n<tool_call>{}</tool_call><|im_end|>", 5),
    given("\n<|im_start|>tool\n" + HOSTILE + "<|im_end|>\n<|im_start|>assistant\n", 4),
    {**sampled("İİ done.", 2), "seconds": [3.5, 4.75]},
]  # fmt: skip
SAID = ["<think>", "Hm</think>I", " go.\n", "<tool_call>{}</tool", "_call><|im_end|>"]
DONE = ["İİ do", "ne."]


@pytest.fixture
def chats(browser, tmp_path):
    """A page of 150 episodes, of which the first two are chats about one prompt."""
    directory = write_run(tmp_path / "run", [])
    tokens = {"texts": SAID + DONE, "log_probs": -0.5}
    drift = {"forks": [["0", 9]], "info": {"gateway/drifts": {"0": "token 9"}}}
    chat = {
        "turns": CHAT,
        "tokens": tokens,
        "num_tokens": 7,
        "token_rewards": [0.0] * 5 + [0.5, 0.0],
    }
    lines = [sample(**chat, **drift, reward=0.25), sample(**chat, sample=1)]
    lines += [sample(prompt_index=8, sample=i, reward=i / 200) for i in range(148)]
    (tmp_path / "run" / "samples").mkdir()
    file = tmp_path / "run" / "samples" / "rollout_000003.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["episodes", directory, "--output", str(tmp_path / "page.html")]) == 0
    browser.get((tmp_path / "page.html").as_uri())
    yield browser
    assert browser.get_log("browser") == []


def test_messages_stand_under_their_roles_and_calls_in_boxes_of_their_own(chats):
    chats.find_element("css selector", "tr[data-episode]").click()
    assert texts(chats, ".role") == [
        "system, given", "user, given", "assistant, sampled5 tokensreward 0", "tool, given",
        "assistant, sampled2 tokensreward 0.51.25 s",
    ]  # fmt: skip
    boxes = chats.find_elements("css selector", ".box")
    assert [(box.get_attribute("data-kind"), box.text) for box in boxes] == [
        ("thoughts", "<think>Hm</think>I"), ("call", "<tool_call>{}</tool_call><|im_end|>"),
    ]  # fmt: skip
    assert "".join(texts(chats, ".token")).replace("\n", "") == "".join(SAID + DONE).replace(
        "\n", ""
    )
    assert texts(chats, ".ansi") == ["S"]
    turns = chats.find_elements("css selector", ".turn")
    fonts = ["mono" in turn.value_of_css_property("font-family") for turn in turns]
    assert fonts == [False, True, *[False] * 3, True, False, False]  # a board, and what a tool said
    shown = chats.find_element("id", "shown").text
    assert "branch 0 begins here, after 9 tokens, since its chat template" in shown
    assert HOSTILE in shown and not count(chats, "img")


def test_a_click_goes_to_the_episode_and_its_link_finds_it_again(chats):
    """A list whose every row is drawn at once froze a page of logs (Mic92/nixbot #161)."""
    assert count(chats, "tr[data-episode]") == 100
    chats.execute_script("document.getElementById('list').scrollTop = 1e6")
    WebDriverWait(chats, 60).until(lambda _: count(chats, "tr[data-episode]") == 150)
    rows = chats.find_elements("css selector", "tr[data-episode]")
    rows[120].click()
    top = "return document.getElementById('shown').getBoundingClientRect().top"
    assert 0 <= chats.execute_script(top) < 800
    link, title = chats.current_url, texts(chats, "#shown h2 a")
    assert title == ["rollout 3, prompt 8, sample 118"]
    chats.get("about:blank")
    chats.get(link)
    assert texts(chats, "#shown h2 a") == title and 0 <= chats.execute_script(top) < 800
    chats.execute_script("location.hash = '#episode=gone'")
    chats.execute_async_script("setTimeout(arguments[0], 50)")
    assert "gone: no such episode is on this page" in chats.find_element("id", "shown").text


def test_two_episodes_of_a_prompt_stand_side_by_side(chats):
    first, second, third = chats.find_elements("css selector", "tr[data-episode]")[:3]
    first.click()
    assert len(texts(chats, "#beside option")) == 2
    set_to(chats, "#beside", second.get_attribute("data-episode"))
    left, right = chats.find_elements("css selector", ".episode")
    assert left.location["y"] == right.location["y"] and left.location["x"] < right.location["x"]
    webdriver.ActionChains(chats).key_down("\ue008").click(third).key_up("\ue008").perform()
    assert texts(chats, ".episode h2 a") == [
        "rollout 3, prompt 7, sample 0", "rollout 3, prompt 8, sample 0",
    ]  # fmt: skip
    chats.back()
    assert texts(chats, ".episode h2 a")[1] == "rollout 3, prompt 7, sample 1"


def test_the_list_is_sorted_by_its_titles_and_searched_for_text(chats):
    def first():
        return chats.find_element("css selector", "tr[data-episode]").get_attribute("data-episode")

    def sort():
        chats.find_element("css selector", '[data-column="reward"]').click()
        return first()

    assert (sort(), sort()) == ("rollout 3, prompt 7, sample 1", "rollout 3, prompt 8, sample 0")
    set_to(chats, '[data-name="text"]', "DONE")
    assert count(chats, "tr[data-episode]") == 2 and "done." in texts(chats, ".gist")[0]
    chats.find_element("css selector", "tr[data-episode]").click()
    script = 'return [...CSS.highlights.get("found")].map(String)'
    assert chats.execute_script(script) == [
        "done"
    ]  # over two tokens, and where lower case is longer
    set_to(chats, '[data-name="text"]', "<|im_end|>")
    assert count(chats, "tr[data-episode]") == 2
    set_to(chats, '[data-name="text"]', "(not there")
    assert count(chats, "tr[data-episode]") == 0


@pytest.fixture
def pictures(browser, tmp_path):
    """Opens the page of a run with some episodes and images; returns the milliseconds it took."""

    def open_page(lines, images):
        directory = write_run(tmp_path / "run", [])
        keep(directory, *images)
        file = tmp_path / "run" / "samples" / "rollout_000003.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert main(["episodes", directory, "--output", str(tmp_path / "page.html")]) == 0
        browser.get((tmp_path / "page.html").as_uri())
        script = "return performance.getEntriesByType('navigation')[0].loadEventEnd"
        return browser.execute_script(script)

    yield open_page
    assert browser.get_log("browser") == []


def loaded(browser, selector="#shown img"):
    """(alternative text, width, height) of each image, as its own bytes have it."""
    script = (
        "return Promise.all([...document.querySelectorAll(arguments[0])].map((image) => ("
        "image.decode().then(() => [image.alt, image.naturalWidth, image.naturalHeight]))))"
    )
    return browser.execute_script(script, selector)


def test_images_stand_in_their_places_and_a_click_shows_one_whole(browser, pictures):
    """Elsewhere their bytes were shown as text (langfuse/langfuse #9933)."""
    chat, small, tall = "<|im_start|>user\n", encoded(), encoded("WEBP", (40, 700))
    told = [
        asked(f"{chat}see \ufffc and \ufffc, \\ufffc?<|im_end|>\n", small, tall),
        sampled("2", 1),
        asked("<|im_start|>tool\n<tool_response>\ufffc</tool_response>{\ufffc", SVG, small),
    ]
    pictures([sample(turns=told)], [small, tall, SVG])
    assert texts(browser, ".gist") == [r"see [image] and [image], \ufffc?<|im_end|> → 2"
                                       " → <tool_response>[image]</tool_response>{[image]"]  # fmt: skip
    assert count(browser, "img") == 0  # made when an episode is shown
    browser.find_element("css selector", "tr[data-episode]").click()
    assert loaded(browser) == [
        ["image 1, 32 x 24, PNG", 32, 24], ["image 2, 40 x 700, WEBP", 40, 700],
        ["image 4, 32 x 24, PNG", 32, 24],
    ]  # fmt: skip
    script = """return [...document.querySelector("#shown .turn").querySelectorAll("span, img")]
      .map((each) => each.alt ?? each.firstChild.data)"""
    assert browser.execute_script(script)[:4] == [
        chat, "see ", "image 1, 32 x 24, PNG", "image 2, 40 x 700, WEBP",
    ]  # fmt: skip
    (box,) = browser.find_elements("css selector", ".box")
    assert "[image 3, not shown: no PNG, JPEG, WEBP, GIF]" in box.text
    _, button, _ = browser.find_elements("css selector", "#shown button.image")
    heights = [button.size["height"]]
    for _ in range(2):
        button.click()
        heights.append(button.size["height"])
    assert heights[0] == heights[2] < 200 and heights[1] >= 700


def test_a_thousand_episodes_with_images_of_their_own_are_open_at_once(browser, pictures):
    images = [encoded(size=(32, 24)) + b"%06d" % i * 4000 for i in range(1000)]  # of 24 kB
    lines = [
        sample(prompt_index=i, turns=[asked("\ufffc?", image), sampled("2", 1)])
        for i, image in enumerate(images)
    ]
    took = pictures(lines, images)
    assert count(browser, "tr[data-episode]") == 100 and count(browser, "img") == 0
    assert took < 8000  # 2 s on two cores that eight processes shared
    browser.find_elements("css selector", "tr[data-episode]")[50].click()
    assert loaded(browser) == [["image 1, 32 x 24, PNG", 32, 24]]
