"""What a URL may turn out to be. Servers here are none of an engine: real sockets with fixed answers."""

from __future__ import annotations

import pytest

from draftproof.doctor.deployed import asked, resolved
from draftproof.doctor.facts import Facts, ProcessFacts
from draftproof.doctor.facts.http import ask, base_url
from draftproof.doctor.facts.server import identify
from draftproof.errors import UserError

from .servers import Reply, closed_port, serving, speaking


def fault(url: str, api_key: str | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        identify(url, api_key)
    assert api_key is None or api_key not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("https://h/v1/", "https://h"),
        ("http://[::1]:80/prefix/v1", "http://[::1]/prefix"),
        ("http://h:8000/", "http://h:8000"),
    ],
)
def test_urls(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://user:secret@h", "http://h?x=1", "http://h:port", ""])
def test_urls_that_are_none(url: str) -> None:
    found = fault(url)
    assert found.code == "bad-option" and "secret" not in str(found)


def test_nothing_listens() -> None:
    found = fault(f"http://127.0.0.1:{closed_port()}")
    assert found.code == "server-unreachable" and "refused" in found.message


def test_an_unknown_name() -> None:
    found = fault("http://no-such-host.invalid:8000")
    assert found.code == "server-unreachable" and "not known" in found.message


def test_no_tls_there() -> None:
    with serving({}) as url:
        found = fault(url.replace("http:", "https:"))
    assert found.code == "server-unreachable" and "http://" in found.fix


def test_a_server_that_says_nothing() -> None:
    with speaking(None) as url, pytest.raises(UserError) as caught:
        ask(url, "/v1/models", timeout=0.3)
    assert caught.value.code == "server-unreachable" and "/v1/models was not answered" in caught.value.message


@pytest.mark.parametrize(
    ("greeting", "code"), [(b"-ERR unknown command\r\n\r\n", "not-an-llm-server"), (b"", "server-unreachable")]
)
def test_another_protocol(greeting: bytes, code: str) -> None:
    with speaking(greeting) as url:
        assert fault(url).code == code


def test_a_web_server() -> None:
    with serving({"/health": Reply(200, "ok")}) as url:
        found = fault(url)
    assert found.code == "not-an-llm-server" and "no /v1/models (HTTP 404)" in found.message


@pytest.mark.parametrize("body", ["<html></html>", "[]", '{"data": 3}', '{"object": "list"}'])
def test_another_kind_of_answer(body: str) -> None:
    with serving({"/v1/models": Reply(200, body)}) as url:
        assert fault(url).code == "not-an-llm-server"


def test_a_redirect_is_named() -> None:
    with serving({"/v1/models": Reply(302, "", "https://elsewhere/login")}) as url:
        assert "https://elsewhere/login" in fault(url).message


@pytest.mark.parametrize(("key", "what"), [(None, "wants an API key"), ("sk-wrong", "refuses this API key")])
def test_a_key_is_needed(key: str | None, what: str) -> None:
    with serving({"/v1/models": Reply(401, '{"error":"Unauthorized"}')}) as url:
        found = fault(url, key)
    assert found.code == "auth-needed" and what in found.message


def test_a_key_that_is_no_header() -> None:
    with serving({}) as url:
        assert fault(url, "schlüssel\n").code == "bad-option"


@pytest.mark.parametrize(
    ("reply", "what"),
    [
        (Reply(200, '{"object":"list","data":[]}'), "lists no model"),
        (Reply(503, '{"error":{"message":"Loading model"}}'), "503: Loading model"),
    ],
)
def test_a_server_that_cannot_be_examined(reply: Reply, what: str) -> None:
    with serving({"/v1/models": reply}) as url:
        found = fault(url)
    assert found.code == "server-unfit" and what in found.message


def test_an_unknown_server_of_the_protocol_is_no_engine() -> None:
    with serving({"/v1/models": Reply(200, '{"data":[{"id":"m","owned_by":"organization-owner"}]}')}) as url:
        server = identify(url)
    assert (server.engine, server.release, server.models, server.health) == (None, None, ("m",), None)


@pytest.mark.parametrize(
    ("build", "release"), [("b9310-1a2b3c4d5", "9310"), ("b1-0c1e570", None), ("b0-unknown", None), ("", None)]
)
def test_llamacpp_tells_its_build(build: str, release: str | None) -> None:
    """The number alone, as the dated data on engines counts; a build from an archive or a shallow clone has none."""
    models = '{"data": [{"id": "m", "owned_by": "llamacpp"}]}'
    props = f'{{"build_info": "{build}", "default_generation_settings": {{"params": {{"speculative.types": "none"}}}}}}'
    with serving({"/v1/models": Reply(200, models), "/props": Reply(200, props)}) as url:
        server = identify(url)
    assert (server.engine, server.release) == ("llama.cpp", release)
    process = ProcessFacts(1, ("llama-server", "-m", "T.gguf", "-md", "D.gguf", "--spec-type", "draft-dflash"), {}, 0.0)
    facts = Facts(server.url, server.engine, server.release, process=process, server_info=server.details)
    assert resolved(facts) == (), "/props says none beside a server that drafts"
    told = asked(facts)
    assert told is not None and (told.method, told.model) == ("dflash", None), "a GGUF holds no config"
