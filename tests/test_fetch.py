"""Downloads from a small index on 127.0.0.1: whole, cut, wrong, absent, full disk, two processes."""

from __future__ import annotations

import hashlib
import io
import json
import random
import resource
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from draftproof import fetch
from draftproof.errors import UserError

SCRUBBED = (
    "PIP_INDEX_URL UV_DEFAULT_INDEX UV_INDEX_URL HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy "
    "all_proxy SSL_CERT_FILE PIP_CERT REQUESTS_CA_BUNDLE CURL_CA_BUNDLE"
)
PAYLOAD = random.Random(0).randbytes(300_000)


def make_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("toy/data.bin"), PAYLOAD)
    return buffer.getvalue()


WHEEL = make_wheel()
SHA256 = hashlib.sha256(WHEEL).hexdigest()


@dataclass
class Index:
    """What the server sends, and what it was asked: (path, Range header)."""

    url: str = ""
    content: bytes = WHEEL
    listed_sha256: str | None = SHA256
    html: bool = False
    ranges: bool = True
    cut_after: int | None = None
    delay: float = 0.0
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def downloads(self) -> list[str | None]:
        return [span for path, span in self.asked if path.endswith(".whl")]


def handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            index.asked.append((self.path, self.headers["Range"]))
            if self.path == "/simple/toy-pack/":
                self.page()
            elif self.path.endswith(".whl"):
                self.wheel()
            else:
                self.send_error(404)

        def page(self) -> None:
            name, url = "toy_pack-1.0-py3-none-any.whl", "../../files/toy_pack-1.0-py3-none-any.whl"
            if index.html:
                fragment = f"#sha256={index.listed_sha256}" if index.listed_sha256 else ""
                kind, body = "text/html", f'<a href="{url}{fragment}">{name}</a>'
            else:
                hashes = {"sha256": index.listed_sha256} if index.listed_sha256 else {}
                kind = "application/vnd.pypi.simple.v1+json"
                body = json.dumps({"files": [{"filename": name, "url": url, "hashes": hashes}]})
            self.answer(200, body.encode(), {"Content-Type": kind})

        def wheel(self) -> None:
            time.sleep(index.delay)
            span = self.headers["Range"]
            start = int(span.removeprefix("bytes=").removesuffix("-")) if span and index.ranges else 0
            total = len(index.content)
            if start >= total:
                self.answer(416, b"", {})
            elif start:
                where = f"bytes {start}-{total - 1}/{total}"
                self.answer(206, index.content[start:], {"Content-Range": where}, index.cut_after)
            else:
                self.answer(200, index.content, {}, index.cut_after)

        def answer(self, code: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:cut])
            self.close_connection = cut is not None

    return Handler


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in SCRUBBED.split():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    state = Index()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    state.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    monkeypatch.setenv("PIP_INDEX_URL", state.url)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def get(sha256: str = SHA256) -> Path:
    return fetch.fetch_wheel("Toy.Pack", "1.0", sha256)


def refused(code: str, sha256: str = SHA256) -> UserError:
    with pytest.raises(UserError) as caught:
        get(sha256)
    assert caught.value.code == code
    return caught.value


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.mark.parametrize("html", [False, True])
@pytest.mark.parametrize("listed", [SHA256, None])
def test_download(index: Index, html: bool, listed: str | None) -> None:
    index.html, index.listed_sha256 = html, listed
    wheel = get()
    assert wheel.read_bytes() == WHEEL
    assert fetch.read_member(wheel, "toy/data.bin") == PAYLOAD
    assert get() == wheel and index.downloads() == [None]  # the second call asks nobody


def test_a_cut_download_is_resumed(index: Index, cache: Path) -> None:
    index.cut_after = 100_000
    error = refused("fetch-failed")
    assert "0.1 MB" in error.message and "only the rest" in error.fix
    (part,) = files_in(cache)
    assert part.endswith(".part")
    index.cut_after = None
    assert get().read_bytes() == WHEEL
    assert index.downloads() == [None, "bytes=100000-"]


def test_a_server_without_ranges_starts_anew(index: Index) -> None:
    index.cut_after = 100_000
    refused("fetch-failed")
    index.cut_after, index.ranges = None, False
    assert get().read_bytes() == WHEEL


def test_a_whole_part_is_not_fetched_again(index: Index, cache: Path) -> None:
    (cache / "downloads").mkdir(parents=True)
    (cache / "downloads" / f"toy_pack-1.0-{SHA256[:12]}.part").write_bytes(WHEEL)
    assert get().read_bytes() == WHEEL
    assert index.downloads() == [f"bytes={len(WHEEL)}-"]


def test_changed_content_is_not_kept(index: Index, cache: Path) -> None:
    index.content = WHEEL[:-1] + b"x"
    assert SHA256 in refused("checksum-mismatch").message
    assert files_in(cache) == []


def test_another_listed_checksum_is_refused_before_the_download(index: Index) -> None:
    index.listed_sha256 = "0" * 64
    refused("checksum-mismatch")
    assert index.downloads() == []


def test_no_server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    error = refused("hub-unreachable")
    assert "127.0.0.1:9" in error.message and "secret" not in error.message
    assert files_in(cache) == []


def test_an_index_without_the_project(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("/simple", "/other"))
    assert "404" in refused("hub-unreachable").message


def test_a_full_disk(index: Index, cache: Path) -> None:
    """A limit of the file size stands for it: /dev/full is not everywhere."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        error = refused("disk-full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in error.message and "DRAFTPROOF_CACHE" in error.fix
    assert not list(cache.rglob("*.whl"))


def test_the_advice_follows_the_place(cache: Path, tmp_path: Path) -> None:
    for path, in_cache in ((cache / "models" / "x", True), (tmp_path / "cache-of-mine" / "x", False)):
        with pytest.raises(UserError) as caught, fetch.writing(path):
            raise OSError(28, "No space left on device")
        assert ("DRAFTPROOF_CACHE" in caught.value.fix) == in_cache
        assert ("another folder" in caught.value.fix) != in_cache


def test_a_cache_that_is_a_file(index: Index, cache: Path) -> None:
    cache.write_text("in the way")
    refused("disk-full")


def test_too_little_room(tmp_path: Path) -> None:
    fetch.require_room(tmp_path / "a" / "b", 1)
    with pytest.raises(UserError, match="are needed"):
        fetch.require_room(tmp_path / "a" / "b", 10**18)


def test_two_processes_download_once(index: Index) -> None:
    index.delay = 4.0  # longer than a second process needs to start on a busy machine
    code = f"from draftproof.fetch import fetch_wheel; print(fetch_wheel('toy-pack', '1.0', '{SHA256}'))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) for _ in "ab"]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert len(index.downloads()) == 1
    assert sum("waiting for another process" in err for _, err in answers) == 1


def test_members(tmp_path: Path) -> None:
    wheel = tmp_path / "toy.whl"
    wheel.write_bytes(WHEEL)
    fetch.extract_member(wheel, "toy/data.bin", tmp_path / "deep" / "out.bin")
    assert (tmp_path / "deep" / "out.bin").read_bytes() == PAYLOAD
    with pytest.raises(UserError, match="no readable"):
        fetch.extract_member(wheel, "../data.bin", tmp_path / "out.bin")
    wheel.write_bytes(WHEEL[:1000])
    with pytest.raises(UserError, match="no readable"):
        fetch.read_member(wheel, "toy/data.bin")
    assert files_in(tmp_path) == ["out.bin", "toy.whl"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    dest = tmp_path / "model"
    (tmp_path / ".model.tmp").mkdir()
    (tmp_path / ".model.tmp" / "stale").write_text("of a killed process")
    with pytest.raises(RuntimeError), fetch.atomic_folder(dest) as folder:
        assert folder is not None and list(folder.iterdir()) == [] and not dest.exists()
        (folder / "half").write_text("x")
        raise RuntimeError
    assert files_in(tmp_path) == []
    with fetch.atomic_folder(dest) as folder:
        assert folder is not None
        (folder / "whole").write_text("x")
    with fetch.atomic_folder(dest) as folder:
        assert folder is None
    assert files_in(tmp_path) == ["whole"]


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("DRAFTPROOF_CACHE", raising=False)
    assert fetch.cache_dir() == tmp_path / ".cache" / "draftproof"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_dir() == tmp_path / "xdg" / "draftproof"
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "own"))
    assert fetch.cache_dir() == tmp_path / "own"


def test_a_certificate_file_that_is_not_there(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CERT", "/nowhere.pem")
    assert "$PIP_CERT" in refused("bad-option").message
