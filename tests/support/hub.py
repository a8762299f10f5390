"""A small hub on this host, with the routes that huggingface_hub and datasets ask."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Repositories by kind and name, each with the files of its commits; the last is `main`."""

    def __init__(self):
        self.commits, self.gated, self.asked, self.url = {}, set(), [], ""

    def push(self, kind, name, files):
        """Add a commit, and return its hash."""
        history = self.commits.setdefault((kind, name), {})
        files = dict(sorted(files.items()))
        commit = hashlib.sha1(repr([len(history), *files.items()]).encode()).hexdigest()
        history[commit] = files
        return commit

    def answer(self, path, whole):
        """Return the status, body and headers for a path; whole: a tree with all below it."""
        api = path.startswith("/api/")
        parts = path.removeprefix("/api").strip("/").split("/")
        kind = parts.pop(0) if api or parts[0] == "datasets" else "models"
        name, rest = "/".join(parts[:2]), parts[2:]
        history = self.commits.get((kind, name))
        if history is None:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        revision = rest[1] if len(rest) > 1 else "main"
        commit = list(history)[-1] if revision == "main" else revision
        if commit not in history:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        files = history[commit]
        if api and rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            listed = [file for file in files if file.startswith(f"{below}/" if below else "")]
            if below and not listed:
                return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
            found = [_entry(file, files[file]) for file in listed]
            if not whole:
                found = _children(found, below)
            return 200, json.dumps(found).encode(), {}
        if api:
            found = {"id": name, "sha": commit, "private": False, "tags": [], "downloads": 0}
            return (
                200,
                json.dumps(found | {"siblings": [{"rfilename": x} for x in files]}).encode(),
                {},
            )
        content = files.get("/".join(rest[2:]))
        if name in self.gated:
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        if content is None:
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return 200, content, {"X-Repo-Commit": commit, "ETag": etag}


def _entry(file, content):
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": file, "size": len(content), "oid": oid}


def _children(entries, below):
    """The files right below a folder, and the folders there."""
    depth = len(below.split("/")) if below else 0
    parts = [entry["path"].split("/") for entry in entries]
    folders = {"/".join(each[: depth + 1]) for each in parts if len(each) > depth + 1}
    there = [x for x, each in zip(entries, parts, strict=True) if len(each) == depth + 1]
    oid = "0" * 40
    return there + [{"type": "directory", "path": x, "size": 0, "oid": oid} for x in folders]


@contextmanager
def served(hub):
    """Serve a hub on a free port of this host."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path, _, query = self.path.replace("%2F", "/").partition("?")
            hub.asked.append(path)
            status, body, headers = hub.answer(path, "recursive=true" in query.lower())
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            path, _, commit = self.path.partition("/paths-info/")
            kind, _, name = path.removeprefix("/api/").partition("/")
            files = hub.commits[kind, name][commit]
            found = [_entry(x, files[x]) for x in asked.get("paths", ()) if x in files]
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
