"""`draftproof doctor`, `watch` and `profile` on the command line: bad input is one message."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftproof.cli import main

from .servers import Reply, closed_port, serving, speaking

Call = Callable[..., tuple[int, str, str]]
LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
HTML = Reply(200, "<html><body>It works!</body></html>")
VLLM = Reply(200, json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "vllm"}]}))
COMMANDS = ("doctor", "watch")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in (
        "DRAFTPROOF_API_KEY",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftproof", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def refused(told: tuple[int, str, str], code: str, *names: str) -> None:
    """Exit code 2, exactly one message with its next step, nothing on stdout."""
    status, out, err = told
    assert status == 2 and err.count("draftproof: [") == 1 and f"draftproof: [{code}]" in err, told
    assert "next step:" in err and "Traceback" not in err and not out, told
    assert all(name in err for name in names), err


@pytest.mark.parametrize("url", ["ftp://h", "http://", "", "http://h:port", "http://h?x=1", "http://[::1"])
def test_a_url_that_is_none(call: Call, url: str) -> None:
    for command in COMMANDS:
        refused(call(command, url), "bad-option", url or "''")


def test_a_password_in_the_url_is_not_repeated(call: Call) -> None:
    for command in COMMANDS:
        told = call(command, "http://user:hunter2@127.0.0.1:1")
        refused(told, "bad-option")
        assert "hunter2" not in told[2]


def test_a_server_that_is_down(call: Call) -> None:
    for command in COMMANDS:
        refused(call(command, f"127.0.0.1:{closed_port()}"), "server-unreachable", "refused")


def test_a_host_that_nobody_knows(call: Call) -> None:
    refused(call("doctor", "http://no-such-host.invalid:8000"), "server-unreachable", "not known")


@pytest.mark.parametrize(
    ("replies", "code", "name"),
    [
        ({}, "not-an-llm-server", "404"),
        ({"/": HTML, "/health": HTML, "/v1/models": HTML}, "not-an-llm-server", "list of models"),
        ({"/v1/models": Reply(302, "", "/login")}, "not-an-llm-server", "/login"),
        ({"/v1/models": Reply(401, '{"error": "Unauthorized"}')}, "auth-needed", "wants an API key"),
        ({"/v1/models": Reply(503, "loading")}, "server-unfit", "loading"),
        ({"/v1/models": Reply(200, '{"data": []}')}, "server-unfit", "no model"),
    ],
    ids=["404", "html", "redirect", "401", "503", "no model"],
)
def test_a_server_that_cannot_be_examined(call: Call, replies: dict[str, Reply], code: str, name: str) -> None:
    with serving(replies) as url:
        for command in COMMANDS:
            refused(call(command, url), code, url, name)


def test_a_port_of_another_protocol(call: Call) -> None:
    with speaking(b"-ERR unknown command\r\n\r\n") as url:
        refused(call("doctor", url), "not-an-llm-server", "HTTP")


def test_a_wrong_key_is_not_repeated(call: Call) -> None:
    with serving({"/v1/models": Reply(401, "{}")}) as url:
        told = call("doctor", url, "--api-key", "hunter2")
    refused(told, "auth-needed", "refuses this API key")
    assert "hunter2" not in told[2]


def test_a_server_without_counters_cannot_be_watched(call: Call) -> None:
    with serving({"/v1/models": VLLM}) as url:
        refused(call("watch", url), "server-unfit", "counters")


def test_bands_that_are_none(call: Call) -> None:
    counters = (LOGS / "vllm-0.32-metrics-after.txt").read_text()
    with serving({"/v1/models": VLLM, "/metrics": Reply(200, counters)}) as url:
        for band in ("high:low", "3:2", "nan:nan"):
            refused(call("watch", url, "--expect", band), "bad-option", "--expect", repr(band))


@pytest.mark.parametrize("words", [("--ticks", "0"), ("--every", "0"), ("--every", "soon")])
def test_a_number_that_is_none(call: Call, words: tuple[str, str]) -> None:
    status, out, err = call("watch", "127.0.0.1:1", *words)
    assert status == 2 and words[0] in err and "Traceback" not in err and not out


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (("--profile", "p.json", "--no-oracle"), "bad-option", ("--no-oracle",)),
        (("--ssh-option", "-v"), "bad-option", ("--host",)),
        (("--host", "-oProxyCommand=x"), "bad-option", ("ProxyCommand",)),
        (("--texts", "nowhere.json"), "not-found", ("nowhere.json",)),
    ],
    ids=str,
)
def test_options_of_doctor(call: Call, words: tuple[str, ...], code: str, names: tuple[str, ...]) -> None:
    refused(call("doctor", f"127.0.0.1:{closed_port()}", *words), code, *names)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"prompt_ids": []}', '{"prompt_ids": [[]]}', '{"prompt_ids": [[1, -1]]}', "\x00"]
)
def test_texts_of_doctor_that_are_none(call: Call, tmp_path: Path, text: str) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(text)
    refused(call("doctor", f"127.0.0.1:{closed_port()}", "--texts", texts), "bad-texts", str(texts), "prompt_ids")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, "not-found"),
        ("{", "bad-texts"),
        ('{"prompt_ids": [[1, 2]]}', "bad-texts"),
        ('{"prompt_ids": [[1, 2]], "continuation_ids": []}', "bad-texts"),
        ('{"prompt_ids": [[1, 2]], "continuation_ids": [["a"]]}', "bad-texts"),
    ],
)
def test_texts_of_profile(call: Call, tmp_path: Path, text: str | None, code: str) -> None:
    texts, out = tmp_path / "texts.json", tmp_path / "profile.json"
    if text is not None:
        texts.write_text(text)
    refused(call("profile", out, "--texts", texts), code, str(texts))
    assert not out.exists()


def test_profile_of_a_pair_that_is_not_there(call: Call, tmp_path: Path) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text('{"prompt_ids": [[1, 2]], "continuation_ids": [[3, 4]]}')
    told = call(
        "profile", tmp_path / "profile.json", "--texts", texts, "--target", tmp_path / "nowhere", "--drafter", tmp_path
    )
    refused(told, "not-found", "nowhere")
