"""HTTP by bare sockets: what a client library is too polite to send, and readers that stall or go away."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESET = struct.pack("ii", 1, 0)  # linger for no time: close() sends RST


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; anything else in its place fails the test."""
        told: dict[str, Any] = json.loads(self.body)["error"]
        assert set(told) == {"message", "type", "param", "code"} and told["message"] and isinstance(told["type"], str)
        return told


def request(path: str, body: bytes, *, kind: str = "application/json", **headers: str) -> bytes:
    """The bytes of a POST; headers: name_with_underscores=value, Content-Length included if it shall lie."""
    lines = {"Host": "x", "Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def connect(address: tuple[str, int], *, timeout: float = 60.0, buffer: int | None = None) -> socket.socket:
    """buffer: bytes that wait unread on this side at most."""
    made = socket.socket()
    made.settimeout(timeout)
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    try:
        made.connect(address)
    except OSError:
        made.close()
        raise
    return made


@contextmanager
def connected(address: tuple[str, int], count: int, *, buffer: int | None = None) -> Iterator[list[socket.socket]]:
    """As many connections, closed at the end unless they are already."""
    with ExitStack() as stack:
        yield [stack.enter_context(connect(address, timeout=120, buffer=buffer)) for _ in range(count)]


def ask(address: tuple[str, int], raw: bytes, *, timeout: float = 60.0) -> Reply:
    """Send these bytes, read until the server closes; TimeoutError where it does neither answer nor close."""
    with connect(address, timeout=timeout) as client:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has heard enough; its answer may be there already
            client.sendall(raw)
        return parse(drain(client))


def drain(client: socket.socket) -> bytes:
    """What still comes until the other side ends."""
    parts = []
    try:
        while part := client.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass  # after the answer: bytes of the request were not read
    return b"".join(parts)


def parse(raw: bytes) -> Reply:
    head, gap, body = raw.partition(b"\r\n\r\n")
    assert gap, raw[:300]
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = unchunked(body)
    return Reply(int(first.split()[1]), headers, body)


def unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def vanish(client: socket.socket) -> None:
    """Gone without a word: the other side gets RST, not the end of a conversation."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


def events(body: bytes) -> list[Any]:
    """Of a stream that has come to its end: what each event holds."""
    *lines, last = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert last == "[DONE]", body[-300:]
    return [json.loads(line) for line in lines]
