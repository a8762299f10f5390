"""Server of a page on a run in progress, for its user alone: the files are read again at every
request.

Other users of the host can connect to 127.0.0.1 as well, and so can any page in a browser here
whose name was made to resolve to this host (DNS rebinding). So the URL has a token, as Jupyter's
has, and the `Host` header must be one of this host's own names. Public reports:
jupyter/notebook #3714, spec-kitty/spec-kitty #4769.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from onpolicy.errors import ConfigError

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


def make_server(
    port: int, read: Callable[[], Any], render: Callable[[Any], str], names: tuple[str, ...] = ()
) -> PageServer:
    """Serve the page at the server's `url`, and its data as data.json beside it.

    `port`: 0 takes any free port. `names`: further host names for the page, of a proxy in front of
    it for example. Raises ConfigError for a port that is taken.
    """
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
                    self._answer(200, "application/json", json.dumps(read()))
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
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
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
