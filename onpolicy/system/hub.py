"""Hub of Hugging Face: a name of a model or a data set becomes a local path of one commit.

huggingface_hub and datasets are imported where such a name is given, and only there. Each name is
looked up once in a process, the command's, whose configuration all ranks, engines and hosts get.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from onpolicy.errors import ConfigError, in_one_line

logger = logging.getLogger(__name__)

_NAME = r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?"
_DATA = rf"{_NAME}:(?:([\w.-]+):)?([\w.-]+)"

_WEIGHTS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
_OTHER_FORMS = ("original/*", "metal/*", "onnx/*")
"""Folders with the same weights for other programs."""

_commits: dict[tuple[str, str, str | None], str] = {}
"""The commit hash of each kind, name and revision that this process looked up."""


def model_path(value: str, flag: str) -> str:
    """Return the directory of a checkpoint: a path, or `OWNER/NAME[@REVISION]` of the hub, which is
    downloaded into its cache. What is on this host wins. Raises ConfigError."""
    found = re.fullmatch(_NAME, value)
    if found is None or Path(value).exists():
        return value
    name, revision = found.groups()
    return str(_snapshot("model", name, revision, f"{flag}={value}", _WEIGHTS))


def data_name(value: str, flag: str) -> str:
    """Return a name of rows with the commit hash as its revision; a path as it is. Raises
    ConfigError."""
    found = re.fullmatch(_DATA, value)
    if found is None or Path(value).exists():
        return value
    name, revision, config, split = found.groups()
    commit = _snapshot("dataset", name, revision, f"{flag}={value}", ("README.md",)).name
    return f"{name}@{commit}:" + (f"{config}:" if config else "") + split


def data_path(value: str, flag: str) -> Path:
    """Return the path of rows: a path, or `OWNER/NAME[@REVISION]:[CONFIG:]SPLIT` of the hub, which is
    saved within its cache. Without a config it is the only one, or `default` or `main`. Raises
    ConfigError."""
    found = re.fullmatch(_DATA, value)
    if found is None or Path(value).exists():
        return Path(value)
    name, revision, config, split = found.groups()
    cached = _snapshot("dataset", name, revision, f"{flag}={value}", ("README.md",))
    parts = cached.name, config or "_", split
    saved = cached.parents[1].joinpath("onpolicy", *parts)
    if not saved.is_dir():
        rows = _asked(
            "dataset", name, f"{flag}={value}", lambda: _split(name, config, split, cached.name)
        )
        partial = saved.with_name(f".{split}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        rows.save_to_disk(partial)
        if not saved.is_dir():  # by another command, meanwhile
            partial.rename(saved)
    return saved


def pinned(value: Any) -> Any:
    """Return the name and commit hash of a checkpoint within a cache of the hub; other values as they
    are. Two caches may hold one commit."""
    if isinstance(value, str) and (
        found := re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?$", value)
    ):
        return "{}/{}@{}".format(*found.groups())
    return value


def _snapshot(
    kind: Literal["model", "dataset"],
    name: str,
    revision: str | None,
    given: str,
    files: tuple[str, ...],
) -> Path:
    from huggingface_hub import snapshot_download

    key = kind, name, revision

    def download() -> str:
        known = _commits.get(key, revision)
        return snapshot_download(
            name, repo_type=kind, revision=known, allow_patterns=[*files],
            ignore_patterns=[*_OTHER_FORMS], dry_run=False,
        )  # fmt: skip

    path = Path(_asked(kind, name, given, download))
    _commits[key] = path.name
    logger.info("%s: revision %s, in %s", given, path.name, path)
    return path


def _split(name: str, config: str | None, split: str, commit: str) -> Any:
    """Return a split of a data set as `datasets` reads it."""
    import datasets

    if config is None:
        configs = datasets.get_dataset_config_names(name, revision=commit)
        config = configs[0] if len(configs) == 1 else None
        for usual in ("main", "default"):
            config = usual if usual in configs else config
        if config is None:
            raise ValueError(f"it has the configs {', '.join(configs)}. Give {name}:CONFIG:{split}")
        logger.info("%s: config %s of %s", name, config, ", ".join(configs))
    return datasets.load_dataset(name, config, split=split, revision=commit)


def _asked(kind: str, name: str, given: str, ask: Callable[[], Any]) -> Any:
    """Return what the hub says. Raises ConfigError with the command that helps."""
    from huggingface_hub import constants, errors

    place = "" if kind == "model" else "datasets/"
    url, more = (
        f"{constants.ENDPOINT}/{place}{name}",
        "" if kind == "model" else "--repo-type dataset ",
    )
    try:
        return ask()
    except errors.GatedRepoError as error:
        cause: Exception = error
        rule = f"is gated. Ask for access at {url}, then run `hf auth login` with that account."
    except errors.RepositoryNotFoundError as error:
        cause = error
        rule = (
            f"there is no such path on this host, and {constants.ENDPOINT} has no such {kind}, or a "
            "private one. Correct the name, or run `hf auth login`."
        )
    except errors.RevisionNotFoundError as error:
        cause = error
        rule = f"{url} has no such revision. Give a branch, a tag or a commit hash after the @."
    except (ConnectionError, errors.LocalEntryNotFoundError) as error:
        cause = error
        rule = (
            f"there is no such path on this host, {constants.ENDPOINT} cannot be reached or "
            f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} has not all of it. Run `hf "
            f"download {more}{name}` where there is a network, and give that cache as HF_HUB_CACHE."
        )
    except (ImportError, OSError, ValueError, errors.HfHubHTTPError) as error:
        cause = error
        rule = f"{url} cannot be read ({in_one_line(error)})."
    raise ConfigError(f"{given}: {rule}") from cause
