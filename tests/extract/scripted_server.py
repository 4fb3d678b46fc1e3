"""A plain HTTP server whose answers a test decides, one function call each."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, Any], tuple[int, Any]]


@contextmanager
def scripted(answer: Answer) -> Iterator[str]:
    """Base address (up to /v1) of a server that answers `answer(path, body)`: a status and an object."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            self._reply(json.loads(self.rfile.read(size)) if size else None)

        def do_GET(self) -> None:
            self._reply(None)

        def _reply(self, body: Any) -> None:
            status, data = answer(self.path, body)
            content = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
