"""A real browser for the tests of the pages."""

import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
REMEDY = "On Debian: apt-get install chromium chromium-driver"


def start_browser():
    """Start a Chromium that has no network; skip the test where there is none."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="no selenium: pip install selenium"
    )
    binary = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip(f"no {'chromedriver' if binary else ' or '.join(BROWSERS)}. {REMEDY}")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1280,900",
        "host-resolver-rules=MAP * ~NOTFOUND",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    chromium = webdriver.Chrome(options, webdriver.ChromeService(driver))
    chromium.set_network_conditions(offline=True, latency=0, throughput=0)
    return chromium


def count(browser, selector):
    return len(browser.find_elements("css selector", selector))


def texts(browser, selector):
    return [each.text for each in browser.find_elements("css selector", selector)]


def set_to(browser, selector, value):
    script = "const [c, v] = arguments; c.value = v; (c.oninput || c.onchange)({ target: c });"
    browser.execute_script(script, browser.find_element("css selector", selector), value)
