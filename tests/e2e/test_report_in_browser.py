"""`onpolicy report` as a person meets it: its page in a real Chromium that has no network."""

import io
import json
from collections import Counter

import numpy
import pytest
from PIL import Image, ImageColor

from onpolicy.cli.main import main
from onpolicy.explain.findings import render, told
from tests.support.browser import count, set_to
from tests.support.explained import RESULT
from tests.support.fake_runs import HOSTILE, aligned_run, governed_run, stock_run, write_run

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two aligned runs, three stock ones of which one is short, and one with a governor."""
    runs = tmp_path_factory.mktemp("runs")
    written = [aligned_run(runs / f"aligned-seed{seed}", seed) for seed in (1, 2)]
    written += [stock_run(runs / f"stock-seed{seed}", seed) for seed in (1, 2)]
    written += [stock_run(runs / "stock-seed3", 3, num_rollouts=35), governed_run(runs / "ladder")]
    assert main(["report", *written, "--output", str(runs / "report.html")]) == 0
    return (runs / "report.html").as_uri()


@pytest.fixture
def opened(browser, page):
    """The page, freshly opened. A JavaScript error fails the test."""
    browser.get(page)
    yield browser
    assert browser.get_log("browser") == []


def panel(browser, title):
    return browser.find_element("css selector", f'[data-panel="{title}"]')


def click_legend(browser, text):
    buttons = browser.find_elements("css selector", "#legend button")
    next(button for button in buttons if button.text == text).click()


def point_at(browser, element):
    webdriver.ActionChains(browser).scroll_to_element(element).move_to_element(element).perform()
    return browser.find_element("id", "tip").text


def test_it_draws_every_run_thin_and_every_groups_median_bold(opened):
    reward = panel(opened, "Reward")
    kinds = {kind: count(reward, f".curve.{kind}") for kind in ("thin", "median", "one")}
    assert kinds == {"thin": 5, "median": 2, "one": 1}
    colors = {
        kind: {
            curve.get_attribute("data-group"): curve.value_of_css_property("stroke")
            for curve in reward.find_elements("css selector", f".curve.{kind}")
        }
        for kind in ("thin", "median")
    }
    assert colors["thin"] == colors["median"]
    assert len(set(colors["median"].values())) == 2


def test_every_panel_with_data_has_curves_in_it(opened):
    panels = opened.find_elements("css selector", ".panel")
    assert {"Reward", "Lambda", "Learning rate", "Gradient norm", "Effective sample size"} <= {
        each.get_attribute("data-panel") for each in panels
    }
    assert all(count(each, '.curve[d^="M"]') for each in panels)
    assert "NaN" not in "".join(each.get_attribute("outerHTML") for each in panels)
    curve = panel(opened, "Gradient norm").find_element("css selector", '[data-run="2"]')
    assert curve.get_attribute("d").count("M") == 2  # one of its numbers is NaN: the line breaks


def test_the_legend_hides_a_run_and_a_group(opened):
    reward = panel(opened, "Reward")
    click_legend(opened, "seed 3")
    assert not count(reward, '[data-run="4"]')
    assert (count(reward, ".thin"), count(reward, ".median")) == (4, 2)
    assert count(opened, '#summary tr.off[data-run="4"]') == 1
    click_legend(opened, "lr=1e-06, true_on_policy_mode=true")
    assert (count(reward, ".thin"), count(reward, ".median")) == (2, 1)
    click_legend(opened, "lr=1e-06, true_on_policy_mode=true")
    assert (count(reward, ".thin"), count(reward, ".median")) == (4, 2)


def test_a_governors_move_is_a_line_in_every_panel_with_its_reason_on_hover(opened):
    assert count(opened, ".move") == 2 * count(opened, ".panel")
    line = panel(opened, "Reward").find_element("css selector", '.move[data-step="18"]')
    assert "plain → tis. k3 over 0.002 for 3 rollouts" in point_at(opened, line)
    click_legend(opened, "lr=2e-06, true_on_policy_mode=false")
    assert not count(opened, ".move")


def test_the_moves_are_listed_and_their_text_stays_text(opened):
    rows = [row.text for row in opened.find_elements("css selector", "#moves tr")]
    assert len(rows) == 3
    assert rows[2].endswith(f"tis → tis+decay ESS below 0.9 {HOSTILE}")
    assert not count(opened, "img")


def test_pointing_at_a_panel_shows_the_values_there(opened):
    text = point_at(opened, panel(opened, "Reward").find_element("css selector", ".plot"))
    assert text.startswith("rollout ")
    assert text.count("(median)") == 2


def test_a_panel_can_be_logarithmic(opened):
    ess = panel(opened, "k3 between the engines")
    before = ess.find_element("css selector", ".median").get_attribute("d")
    ess.find_element("css selector", "button.log").click()
    assert ess.find_element("css selector", ".median").get_attribute("d") != before


def test_it_follows_the_systems_dark_mode(opened):
    colors = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        body = opened.find_element("css selector", "body")
        colors.add(body.value_of_css_property("background-color"))
    assert len(colors) == 2


def test_on_a_phone_nothing_is_wider_than_the_screen(opened):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    opened.refresh()
    width = opened.execute_script("return document.documentElement.scrollWidth")
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width == 390


def test_it_loads_nothing_and_is_forbidden_to(opened):
    entries = opened.execute_script("return performance.getEntriesByType('resource').length")
    assert entries == 0
    opened.execute_script("new Image().src = 'https://example.org/x.png'")
    assert any("Content Security Policy" in e["message"] for e in opened.get_log("browser"))


@pytest.fixture
def twins(browser, tmp_path):
    """Three runs with the same values; the last leaves them at rollout 25, and has one value more."""
    runs = [tmp_path / name for name in ("as-it-is", "other-decay", "other-clip")]
    for run, config in zip(runs, ({}, {"weight_decay": 0.2}, {"eps_clip": 0.3}), strict=True):
        aligned_run(run, 1)
        values = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**values, **config}))
    lines = (runs[2] / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        if record["step"] >= 25 and "rollout/raw_reward" in record:
            record["rollout/raw_reward"] /= 2
    text = "".join(json.dumps(record) + "\n" for record in records)
    (runs[2] / "metrics.jsonl").write_text(text)
    for run in runs:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 30, "train/kl_loss": 0.5}\n')
    page = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--output", str(page)]) == 0
    browser.get(page.as_uri())
    yield browser
    assert browser.get_log("browser") == []


def colors_in_sight(element, count=3):
    """Which of the first groups' colours a picture shows, smooth edges aside."""
    image = Image.open(io.BytesIO(element.screenshot_as_png)).convert("RGB")
    colors = Counter(tuple(pixel) for pixel in numpy.asarray(image).reshape(-1, 3).tolist())
    script = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0])"
    seen = set()
    for group in range(count):
        wanted = ImageColor.getrgb(element.parent.execute_script(script, f"--c{group}"))
        near = [c for c in colors if max(abs(a - b) for a, b in zip(c, wanted, strict=True)) < 24]
        seen |= {group} if near else set()
    return seen


@pytest.mark.parametrize("title", ["Reward", "Mismatched tokens", "KL to the reference model"])
def test_curves_that_lie_on_each_other_can_all_be_seen(twins, title):
    """As long as two of them go together, and where each is a single value."""
    plot = panel(twins, title).find_element("css selector", ".plot")
    assert colors_in_sight(plot) == {0, 1, 2}


def test_what_is_identical_is_said(twins):
    notes = {
        title: panel(twins, title).find_element("css selector", ".identical").text
        for title in ("Reward", "Mismatched tokens")
    }
    assert notes == {
        "Reward": "identical: as-it-is, other-decay",
        "Mismatched tokens": "identical: as-it-is, other-decay, other-clip",
    }
    for place in ("#summary", "#legend"):
        same = twins.find_elements("css selector", f"{place} .same")
        assert [note.text for note in same] == ["same as as-it-is"]
    twins.find_element("css selector", '#legend [data-runs="1"]').click()
    assert panel(twins, "Reward").find_element("css selector", ".identical").text == ""


def test_smoothing_changes_neither_equal_nor_sparse_values_nor_what_is_not_finite(opened):
    """Elsewhere it made spikes of a constant (tensorflow/tensorboard #786), moved a curve of two values
    (#1127), and a value between two NaN was lost (#866)."""
    set_to(opened, "#choose-smoothing", 8)
    smooth = "return smooth(arguments[0], arguments[1].map(number)).map(String)"
    assert {*opened.execute_script(smooth, [*range(9)], [0.1] * 9)} == {"0.1"}
    assert opened.execute_script(smooth, [0, 50], [1, 3]) == ["1", "3"]
    assert opened.execute_script(smooth, [0, 1, 2], ["nan", 5, "nan"]) == ["NaN", "5", "NaN"]
    assert opened.execute_script(smooth, [0, 1, 2, 9], [1, 3, 8, 0]) == ["1", "2", "4", "4"]
    reward = panel(opened, "Reward")
    raw, smoothed = (
        reward.find_element("css selector", f'.curve{kind}[data-group="2"]').get_attribute("d")
        for kind in (".raw", ".one")
    )
    assert raw != smoothed and count(reward, ".raw") == 8


def test_the_ticks_of_a_logarithmic_axis_come_to_an_end(opened):
    """Where the lowest value is just below a power of ten (leeoniya/uPlot #1098), and where all
    are equal."""
    script = """return arguments[0].map((raw) => valueTicks(
      valueScale([{ raw, places: raw.map(() => 0) }], true, [0, 0])))"""
    several, equal, none = opened.execute_script(script, [[0.00099, 10], [0.00099] * 2, [0, -1]])
    assert several == [0.01, 1] and 0 < len(equal) < 9 and len(none) < 9


@pytest.fixture
def odd(browser, tmp_path):
    """A page of two runs, of which one has a name that means something in a URL."""
    runs = [tmp_path / "a&b=c#d%20e+f", tmp_path / "other"]
    for number, run in enumerate(runs, start=1):
        records = [
            {
                "step": i,
                "rollout/raw_reward": number + i % 3,
                "perf/step_time": 2.5,
                "train/loss": i,
            }
            for i in range(30)
        ]
        write_run(run, records, lr=number * 1e-6)
    page = tmp_path / "report.html"
    assert main(["report", *map(str, runs), "--output", str(page)]) == 0
    browser.get(page.as_uri())
    yield browser
    assert browser.get_log("browser") == []


def seen(browser):
    panels = browser.find_elements("css selector", ".panel")
    return {
        "curves": [p.find_element("css selector", ".plot").get_attribute("innerHTML")
                   for p in panels if p.is_displayed()],
        "titles": [p.get_attribute("data-panel") for p in panels if p.is_displayed()],
        "off": [b.text for b in browser.find_elements("css selector", "button.off")],
    }  # fmt: skip


def test_a_link_keeps_what_was_chosen(odd):
    """Also where names have characters of URLs (status-im/status-legacy #12025), and where a chat
    program encodes the link once more than needed (plumpudding/meshviewer #19)."""
    set_to(odd, "#choose-axis", "seconds")
    set_to(odd, "#choose-smoothing", 5)
    set_to(odd, "#choose-panels", "REWARD, nothing")
    panel(odd, "Reward").find_element("css selector", "button.log").click()
    click_legend(odd, "lr=1e-06")
    plot = panel(odd, "Reward").find_element("css selector", ".plot")
    drag = webdriver.ActionChains(odd).move_to_element(plot).click_and_hold()
    drag.move_by_offset(100, 0).release().perform()
    before, link = seen(odd), odd.current_url
    assert before["titles"] == ["Reward"] and before["off"] == ["lr=1e-06"]
    for url in (link, link.replace("zoom", "z%6Fom")):
        odd.get("about:blank")
        odd.get(url)
        assert seen(odd) == before
    webdriver.ActionChains(odd).double_click(
        panel(odd, "Reward").find_element("css selector", ".plot")
    ).perform()
    assert seen(odd)["curves"] != before["curves"] and "zoom" not in odd.current_url
    odd.execute_script("location.hash = '#axis=furlongs'")
    odd.execute_async_script("setTimeout(arguments[0], 50)")
    assert "axis=furlongs means nothing here" in odd.find_element("id", "about").text
    assert seen(odd)["titles"] == ["Reward", "Loss"]


def test_a_drag_zooms_all_panels_to_the_same_part_of_the_axis(odd):
    def ends(title):
        texts = panel(odd, title).find_elements("css selector", 'text[text-anchor="middle"]')
        return [float(text.text) for text in texts]

    assert ends("Reward")[0] == 0
    plot = panel(odd, "Reward").find_element("css selector", ".plot")
    drag = webdriver.ActionChains(odd).move_to_element(plot).click_and_hold()
    drag.move_by_offset(120, 0).release().perform()
    assert ends("Reward") == ends("Loss") and ends("Loss")[0] >= 14 and ends("Loss")[-1] < 28
    odd.find_element("id", "whole").click()
    assert ends("Loss")[0] == 0


def test_the_flags_in_which_groups_differ_can_be_read(odd):
    odd.find_element("css selector", "#flags summary").click()
    rows = [row.text for row in odd.find_elements("css selector", "#differences tr")]
    assert rows == ["flag lr=1e-06 lr=2e-06", "--lr 1e-06 2e-06"]


def test_a_point_says_its_tokens_or_seconds_too(odd):
    set_to(odd, "#choose-axis", "seconds")
    text = point_at(odd, panel(odd, "Reward").find_element("css selector", ".plot"))
    step, seconds = (
        float(part.split()[-2 + i])
        for i, part in ((1, text.split(" · ")[0]), (0, text.split("\n")[0]))
    )
    assert seconds == pytest.approx(2.5 * step, abs=1)
    assert "logged none" not in odd.find_element("id", "about").text
    assert not odd.find_element("css selector", "#choose-axis option:nth-child(2)").is_enabled()


def test_these_tests_would_notice_a_javascript_error(opened):
    opened.execute_script("setTimeout(() => missing())")
    opened.execute_async_script("setTimeout(arguments[0], 50)")
    assert any("missing is not defined" in e["message"] for e in opened.get_log("browser"))


def test_the_page_of_explain_is_seen(browser, tmp_path):
    """Cells and tokens are shaded by what they say, and the page asks for nothing."""
    file = tmp_path / "explained.html"
    file.write_text(render(RESULT, told(RESULT)))
    browser.get(file.as_uri())
    cells = browser.find_elements("css selector", "table.heat td[class]")
    colours = [cell.value_of_css_property("background-color") for cell in cells]
    same, own, given = (colours[i] for i in (0, 1, 2))
    assert len({same, own, given}) == 3
    assert (cells[1].text, cells[2].text) == ("7", "80")
    assert cells[2].get_attribute("title").startswith("attention of layers.1.self_attn")
    tokens = browser.find_elements("css selector", ".tokens span")
    shades = [token.value_of_css_property("background-color") for token in tokens]
    assert [token.text for token in tokens] == ["5", "9", "7"]
    assert shades[0] == same and shades[1] == shades[2] != same
    assert "first in sequence" not in browser.page_source
    assert browser.get_log("browser") == []
