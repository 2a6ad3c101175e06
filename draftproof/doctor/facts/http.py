"""One HTTP request to a server that may be anything, and every way it can fail as a UserError."""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from draftproof.errors import UserError

TIMEOUT = 10.0  # seconds for a question about the server; generating takes longer


def base_url(url: str) -> str:
    """scheme://host[:port][/prefix], without a slash or `/v1` at the end. UserError bad-option."""
    way = "give the server's address, http://127.0.0.1:8000 say"
    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL as error:
        raise UserError("bad-option", f"{url!r} is no URL: {error}", way) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError("bad-option", f"{url!r} is no http or https URL", way)
    if parsed.userinfo:
        raise UserError("bad-option", f"the URL of {parsed.host} holds a user name or password", "leave them out of it")
    if parsed.query or parsed.fragment:
        raise UserError("bad-option", f"{url!r} holds more than an address", way)
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/")


def ask(
    url: str,
    path: str,
    api_key: str | None = None,
    body: Mapping[str, Any] | None = None,
    timeout: float = TIMEOUT,
) -> httpx.Response:
    """GET, or POST with `body` as JSON. Any status is an answer. UserError server-unreachable, not-an-llm-server (it
    does not speak HTTP)."""
    url = base_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Timeout(timeout, connect=min(timeout, TIMEOUT))
    try:
        with httpx.Client(headers=headers, timeout=limits, transport=_direct(url)) as client:
            return client.get(url + path) if body is None else client.post(url + path, json=dict(body))
    except httpx.HTTPError as error:
        raise _failure(url, path, error, timeout) from error
    except ValueError as error:  # a header that is no ASCII
        raise UserError("bad-option", f"the request cannot be sent: {error}", "check the API key") from error


def json_of(response: httpx.Response) -> Any:
    """The body as JSON, None when it is none."""
    try:
        return json.loads(response.content)
    except ValueError:
        return None


def refuse_auth(url: str, path: str, response: httpx.Response, api_key: str | None) -> None:
    """UserError auth-needed for 401 and 403."""
    if response.status_code in (401, 403):
        what = "refuses this API key" if api_key else "wants an API key"
        message = f"{url}{path} {what} (HTTP {response.status_code})"
        raise UserError("auth-needed", message, "give the key that the server was started with (vLLM: --api-key)")


def said(response: httpx.Response) -> str:
    """What an error answer says, in one line."""
    body = json_of(response)
    for key in ("error", "message", "detail", "object"):
        while isinstance(body, dict) and key in body:
            body = body[key]
    text = body if isinstance(body, str) else response.text
    return " ".join(text.split())[:300]


def _direct(url: str) -> httpx.HTTPTransport | None:
    """This machine is asked without the proxies of the environment."""
    host = httpx.URL(url).host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost" or host.endswith(".localhost")
    return httpx.HTTPTransport() if loopback else None


def _failure(url: str, path: str, error: httpx.HTTPError, timeout: float) -> UserError:
    causes = list(_chain(error))
    if isinstance(error, httpx.ConnectTimeout):
        return _unreachable(url, "no answer to a connection", "check the address, and firewalls in between")
    if isinstance(error, httpx.TimeoutException):
        way = "it may be busy or stuck: look at its log"
        return _unreachable(url, f"connected, but {path} was not answered within {timeout:.0f} s", way)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return _unreachable(url, "the host name is not known", "check the spelling")
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        way = "trust its certificate authority through SSL_CERT_FILE, or use the name the certificate was made for"
        return _unreachable(url, f"its TLS certificate is not trusted: {error}", way)
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return _unreachable(url, f"no TLS there: {error}", "try http:// instead of https://")
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes) or "refused" in str(error):
        return _unreachable(
            url, "connection refused: nothing listens there", "start the server, or check host and port"
        )
    if isinstance(error, (httpx.ReadError, httpx.WriteError)) or "disconnected" in str(error):
        return _unreachable(url, "it closed the connection without an answer", "look at its log, and try https://")
    if isinstance(error, httpx.RemoteProtocolError):
        return UserError("not-an-llm-server", f"{url} does not speak HTTP: {error}", "check the port")
    return _unreachable(url, str(error) or type(error).__name__, "check the address, and HTTP_PROXY, HTTPS_PROXY")


def _unreachable(url: str, what: str, way: str) -> UserError:
    return UserError("server-unreachable", f"{url}: {what}", way)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
