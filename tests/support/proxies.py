"""A proxy that the environment names, and what it is asked."""

import contextlib
import socketserver
import threading

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
EXCEPTIONS = ("no_proxy", "NO_PROXY")


REFUSAL = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"


@contextlib.contextmanager
def recording_proxy(answer=REFUSAL):
    """Yield (environment that names the proxy, what it has been sent): it answers this to everything."""
    seen = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            seen.append(self.request.recv(65536).decode("latin-1"))
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{proxy.server_address[1]}"
        try:
            yield dict.fromkeys(PROXIES, url) | {"no_proxy": "elsewhere.example"}, seen
        finally:
            proxy.shutdown()
            thread.join()
