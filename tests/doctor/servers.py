"""HTTP servers that are no engine: they answer fixed texts, for what a user may point the doctor at by mistake."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Reply(NamedTuple):
    status: int
    body: str
    location: str | None = None


@contextlib.contextmanager
def serving(replies: Mapping[str, Reply], posted: list[tuple[str, Any]] | None = None) -> Iterator[str]:
    """The URL of a server that answers these paths, and 404 to all others. `posted` takes (path, JSON body)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = replies.get(self.path, Reply(404, "no such page"))
            body = reply.body.encode()
            self.send_response(reply.status)
            if reply.location:
                self.send_header("Location", reply.location)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if posted is not None:
                posted.append((self.path, body))
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def speaking(greeting: bytes | None) -> Iterator[str]:
    """A socket that greets like another protocol, or with None takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    held.append(connection)
                    if greeting is not None:
                        connection.recv(4096)
                        connection.sendall(greeting)
                        connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
