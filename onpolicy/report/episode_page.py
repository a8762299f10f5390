"""Page of the episodes that a run has written down: turns, tokens, branches, and why they ended.

`make_server` serves it while the run goes on, for its user alone. Other users of the host can connect
to 127.0.0.1 as well, and so can any page in a browser here whose name was made to resolve to this host
(DNS rebinding). So the URL has a token, as Jupyter's has, and the `Host` header must be one of this
host's own names (jupyter/notebook #3714, spec-kitty/spec-kitty #4769).
"""

import io
import json
import re
import secrets
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, count
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any
from urllib.parse import quote

from annotated_types import Len
from pydantic import Field, model_validator

from onpolicy.errors import ConfigError
from onpolicy.outputs.destinations import write_output
from onpolicy.outputs.sample_images import IMAGES, STAND_IN
from onpolicy.report.page import LoggedRun, malformed, page_of
from onpolicy.system.files import parse_json
from onpolicy.system.records import Shape

Record = dict[str, Any]

Number = Annotated[float, Field(allow_inf_nan=False)]

Name = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
"""An image's SHA-256. A path in its place could lead to the reader's own files."""

KINDS = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats of images that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The text that was given or sampled in one stretch."""

    sampled: bool
    text: str
    num_tokens: int = 0
    seconds: Annotated[list[Number], Len(2, 2)] | None = None
    images: list[Name] | None = None

    @model_validator(mode="after")
    def _require_places(self) -> "Turn":
        if self.images and (self.sampled or self.text.count(STAND_IN) != len(self.images)):
            raise ValueError(f"images={len(self.images)}: each must have a place in given text")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The fields of a line of a samples file (`outputs/samples.py`) that the page reads."""

    step: int
    prompt_index: int
    sample: int
    prompt: str
    response: str
    label: str
    reward: Number | None
    finish_reason: str
    num_tokens: int
    mismatched_tokens: int | None
    # Fields of later versions, or of some episodes alone.
    trajectory: int = 0
    reward_parts: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    info: dict[str, Any] | None = None
    tokens: dict[str, Any] | None = None
    turns: list[Turn] | None = None
    token_rewards: list[Number] | None = None
    forks: list[Annotated[list[Any], Len(2, 2)]] | None = None
    is_unscored: bool = False
    failed: str | None = None
    message: str = ""
    attempt: int = 0


_SHAPE = Shape(Line, is_open=True)

FAULTS = re.compile("fault|refused|given_up|drift|error|timeout|timed_out")
"""Names of an episode's metrics and infos that report faults."""


def render(data: Record) -> str:
    """Return the page as HTML."""
    styles, scripts = ("page.css", "episodes.css"), ("elements.js", "episodes.js")
    return page_of("episodes", styles, scripts, data, "; connect-src 'self'; img-src data:")


def read_episodes(run: str, rollouts: int) -> Record:
    """Return the page's data as JSON values, for the last `rollouts` rollouts and evaluations with
    samples, failed attempts included. An episode's key is its own: a rollout that draws a prompt twice
    has its second episodes as `..., time 2`. Raises ConfigError for a directory that is no run, and for
    a line that cannot be read."""
    directory = Path(run)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"RUN={run}: has no config.json. Give the --run-dir of a run.")
    samples = (directory / "samples").glob("*.jsonl")
    files = sorted(samples, key=lambda file: (_step(file), _where(file), file))
    places = [*dict.fromkeys((_step(file), _where(file)) for file in files)]
    kept = places[-rollouts:]
    shown = [file for file in files if (_step(file), _where(file)) in kept]
    found = [episode for file in shown for episode in _episodes(file)]
    times: Counter[str] = Counter()
    for episode in found:
        times[episode["key"]] += 1
        if times[episode["key"]] > 1:
            episode["key"] += f", time {times[episode['key']]}"
    version = blake2b(json.dumps(found).encode(), digest_size=8).hexdigest()
    page = {"run": directory.name, "version": version, "left_out": len(places) - len(kept)}
    return page | {"episodes": found, "images": _images(directory / "samples" / IMAGES, found)}


def write_pages(runs: Sequence[LoggedRun], report: Path, rollouts: int) -> dict[str, str]:
    """Write a page beside a report for each run with episodes; return the links to them, by the run's
    name. Raises ConfigError for a page that cannot be written, and for a line that cannot be read."""
    links = {}
    for number, run in enumerate(runs, start=1):
        directory = run.directory if run.config is not None else None
        if directory is not None and (directory / "samples").is_dir():
            file = report.with_name(f"{report.stem}.episodes-{number}.html")
            page = render(read_episodes(str(directory), rollouts))
            write_output("--episodes", str(file), page)
            links[run.name] = quote(file.name)
    return links


def _step(file: Path) -> int:
    number = file.stem.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def _where(file: Path) -> str:
    """Return the rollout's or evaluation's name. Example: 'rollout'; 'eval_aime'"""
    return file.stem.rpartition("_")[0].removeprefix("failed_")


def _episodes(file: Path) -> Iterator[Record]:
    """Yield the episodes of a file; the trajectories of one follow each other, from number 0 on."""
    together: list[Line] = []
    for line in _lines(file):
        if together and not line.trajectory:
            yield _episode(file, together)
            together = []
        together.append(line)
    if together:
        yield _episode(file, together)


def _lines(file: Path) -> Iterator[Line]:
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            record = parse_json(line.decode())
        except ValueError as error:
            raise malformed(file, number, f"not JSON ({error})") from error
        try:
            yield _SHAPE.take(record)
        except ValueError as error:
            raise malformed(file, number, str(error)) from error


def _images(folder: Path, episodes: Sequence[Record]) -> dict[str, Record]:
    """Return each image of the episodes once, by the name of its file."""
    trajectories = [each for episode in episodes for each in episode["trajectories"]]
    turns = [turn for each in trajectories for turn in each["turns"]]
    names = {name for turn in turns for _, name in turn.get("images", [])}
    return {name: _image(folder / name) for name in sorted(names)}


def _image(file: Path) -> Record:
    """Return an image's size and format in words, and a data URL of one that is shown."""
    try:
        from PIL import Image  # which the engines bring, and a reader elsewhere may lack

        data = file.read_bytes()
        with Image.open(io.BytesIO(data), formats=KINDS) as opened:
            kind = str(opened.format).replace("MPO", "JPEG")
            told = f"{opened.width} x {opened.height}, {kind}"
    except Exception as error:  # Pillow raises many kinds
        is_missing = isinstance(error, ImportError)
        why = getattr(error, "strerror", None) or f"no {', '.join(KINDS)}"
        why = "Pillow is not installed" if is_missing else why
        return {"told": f"not shown: {why}"}
    return {"told": told, "url": f"data:image/{kind.lower()};base64,{b64encode(data).decode()}"}


def _episode(file: Path, lines: Sequence[Line]) -> Record:
    first = lines[0]
    where = f"{_where(file)} {first.step}"
    said = {**(first.metrics or {}), **(first.info or {})}
    faults = [name for name, value in said.items() if value and FAULTS.search(name)]
    faults += ["truncated"] * any(line.finish_reason == "length" for line in lines)
    faults += ["mismatched"] * any(line.mismatched_tokens for line in lines)
    trajectories: list[Record] = [
        {
            "reward": line.reward,
            "finish_reason": line.finish_reason,
            "mismatched": line.mismatched_tokens,
            "turns": list(_turns(line, len(lines) > 1)),
        }
        for line in lines
    ]
    facts = {"label": first.label, **(first.reward_parts or {}), **said}
    key = f"{where}, prompt {first.prompt_index}, sample {first.sample}"
    faults += ["unscored"] * any(line.is_unscored for line in lines)
    rewards = [line.reward for line in lines if line.reward is not None]
    if first.failed is not None:
        faults, facts = [f"failed: {first.failed}"], {**facts, "failed": first.message}
        key += f", attempt {first.attempt}"
    return {
        "key": key,
        "where": where,
        "prompt": f"{_where(file)}, prompt {first.prompt_index}",
        "reward": fmean(rewards) if len(rewards) == len(lines) else None,
        "num_tokens": sum(line.num_tokens for line in lines),
        "num_turns": sum(turn["sampled"] for each in trajectories for turn in each["turns"]),
        "faults": faults,
        "has_failed": first.failed is not None,
        "facts": [[name, _told(value)] for name, value in facts.items()],
        "trajectories": trajectories,
    }


def _turns(line: Line, has_branches: bool) -> Iterator[Record]:
    """Yield given text whole, and sampled text token by token. A session's answers are forks of
    each other: that is told where several trajectories are left, or a chat template is the reason."""
    tokens = line.tokens or {}
    turns = line.turns or [
        Turn(sampled=False, text=line.prompt),
        Turn(sampled=True, text=line.response, num_tokens=line.num_tokens),
    ]
    drifts = (line.info or {}).get("gateway/drifts", {})
    key, length = line.forks[-1] if line.forks else (None, None)
    ends = accumulate(turn.num_tokens for turn in turns)
    start, numbers = 0, count(1)
    for turn, end, seconds in zip(turns, ends, _durations(turns), strict=True):
        shown: Record = {"sampled": turn.sampled, "text": turn.text}
        if seconds is not None:
            shown["seconds"] = round(seconds, 3)
        if turn.images:
            shown["images"] = [[next(numbers), name] for name in turn.images]
        if turn.sampled and tokens:
            shown |= {name: _part(each, start, turn.num_tokens) for name, each in tokens.items()}
            if line.token_rewards:
                shown["reward"] = fsum(line.token_rewards[start : start + turn.num_tokens])
            start += turn.num_tokens
        why = drifts.get(key)
        if (
            length is not None
            and end - turn.num_tokens == length
            and (has_branches or why is not None)
        ):
            shown["branch"] = f"branch {key} begins here, after {length} tokens"
            if why is not None:
                shown["branch"] += f", since its chat template writes the past anew ({why})"
        yield shown


def _durations(turns: Sequence[Turn]) -> Iterator[float | None]:
    """Yield the seconds that each sampled turn took from its request on, and each given turn between
    the answer before it and the next request; None where no time is known."""
    for i, turn in enumerate(turns):
        before, after = (turns[j].seconds if 0 <= j < len(turns) else None for j in (i - 1, i + 1))
        if turn.seconds:
            yield turn.seconds[1] - turn.seconds[0]
        else:
            yield after[0] - before[1] if before and after else None


def _part(column: Any, start: int, count: int) -> Any:
    return column[start : start + count] if isinstance(column, list) else column


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)


HOST = "127.0.0.1"

_PORT = re.compile(r":\d{1,5}\Z")

NAMES = (HOST, "localhost", "[::1]")
"""Names of this host that nobody else can redefine."""


class PageServer(ThreadingHTTPServer):
    """A server of one page, which answers those who know its URL."""

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]):
        super().__init__((HOST, port), handler)
        self.token = secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        """The page's URL with its secret token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"


HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer."""


def make_server(
    port: int, read: Callable[[], Any], render: Callable[[Any], str], names: tuple[str, ...] = ()
) -> PageServer:
    """Serve the page at the server's `url`, and its data as data.json beside it. `port`: 0 takes
    any free port. `names`: further host names for the page, of a proxy in front of it for example.
    Raises ConfigError for a port that is taken."""
    known = {name.lower() for name in (*NAMES, *names)}

    class Handler(BaseHTTPRequestHandler):
        server: PageServer

        def do_GET(self) -> None:
            problem = self._problem()
            _, _, path = self.path[1:].partition("/")
            try:
                if problem:
                    self._answer(403, "text/plain", problem)
                elif path == "":
                    self._answer(200, "text/html", render(read()))
                elif path == "data.json":
                    data = read()
                    if self.headers.get("If-None-Match") == data["version"]:
                        self._answer(304, "application/json", "")
                    else:
                        self._answer(200, "application/json", json.dumps(data))
                else:
                    self._answer(404, "text/plain", "There is the page alone, and data.json.")
            except ConfigError as error:
                self._answer(500, "text/plain", str(error))

        def _problem(self) -> str:
            """Return why this request is refused; empty if it is not."""
            host = self.headers.get("Host", "")
            if _PORT.sub("", host.lower()) not in known:
                return (
                    f"Host={host!r}: this page answers to {', '.join(sorted(known))}. Take the URL that "
                    "was printed, or start the page with --page-host and the name that you use."
                )
            token = self.path[1:].partition("/")[0]
            if not secrets.compare_digest(token.encode(), self.server.token.encode()):
                return "The URL has no token, or another's. Take the whole URL that was printed."
            return ""

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "backslashreplace")
            self.send_response(status)
            own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
            for name, value in (own | HEADERS).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: the page polls every few seconds."""

    try:
        return PageServer(port, Handler)
    except OSError as error:
        raise ConfigError(
            f"--port={port}: cannot be listened at ({error.strerror}). Give another, or 0 for any."
        ) from error
