"""A page of a run that goes on, for this host alone: the files are read again at every look."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from onpolicy.errors import ConfigError


def make_server(
    port: int, read: Callable[[], Any], render: Callable[[Any], str]
) -> ThreadingHTTPServer:
    """Serves the page as /, and its data as /data.json. Port 0: any that is free.

    Raises ConfigError for a port that is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                if self.path == "/":
                    self._answer(200, "text/html", render(read()))
                elif self.path == "/data.json":
                    self._answer(200, "application/json", json.dumps(read()))
                else:
                    self._answer(404, "text/plain", "There is / alone, and /data.json.")
            except ConfigError as error:
                self._answer(500, "text/plain", str(error))

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "backslashreplace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """A page that looks every few seconds is nothing to tell of."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(
            f"--port={port}: cannot be listened at ({error.strerror}). Give another, or 0 for any."
        ) from error
