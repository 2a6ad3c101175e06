"""Over a real sshd on loopback, for users with each login shell. Needs root (it makes users), sshd and the shells."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftproof.errors import UserError
from draftproof.launch.machine import Remote, _program
from draftproof.launch.session import LaunchAsk, prepare_launch
from draftproof.launch.start import launch, start, status, stop
from tests.config.cases import FIXTURES
from tests.launch import SERVER, WORDS, free_port, in_session, plan_of, until

SHELLS = ("bash", "dash", "zsh", "fish")
SSHD = "/usr/sbin/sshd"
NEEDED = [name for name in (*SHELLS, "ssh-keygen", "ssh", "useradd", SSHD) if shutil.which(name) is None]

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(bool(NEEDED), reason=f"not on this machine: {', '.join(NEEDED)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="makes users, so it needs root"),
]
# What each shell reads in `SHELL -c COMMAND` under sshd; dash reads nothing, so sshd's own rc file speaks for it.
RC = {"bash": ".bashrc", "zsh": ".zshenv", "fish": ".config/fish/config.fish", "dash": ".ssh/rc"}
NOISE = "echo 'welcome {\"result\": 1}'\necho 'a problem' >&2\nprintf 'no newline'\n"


@dataclass(frozen=True)
class Host:
    """A running sshd: its folder (readable for all), its port and the options that reach it."""

    base: Path
    server: str
    options: tuple[str, ...]

    def login(self, user: str) -> Remote:
        return Remote(f"{user}@127.0.0.1", self.options)


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    base = Path(tempfile.mkdtemp(prefix="draftproof-ssh-"))
    base.chmod(0o755)
    server = base / "it's $HOME {a,b} \\ é" / "server.py"
    server.parent.mkdir()
    shutil.copy(SERVER, server)
    server.chmod(0o644)
    for key in ("host", "user", "stranger"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(base / key))
    shutil.copy(base / "user.pub", base / "authorized")
    port = free_port()
    known = base / "known"
    known.write_text(f"[127.0.0.1]:{port} {(base / 'host.pub').read_text()}")
    (base / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {base}/host\nAuthorizedKeysFile {base}/authorized\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPidFile none\n"
        "PermitUserEnvironment yes\nMaxStartups 100\n"
    )
    made = _privilege_separation_folder()
    with (base / "sshd.log").open("wb") as log:
        daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(base / "config")], stderr=log)
    options = ("-F", "/dev/null", "-p", str(port), "-i", str(base / "user"), "-o", "IdentitiesOnly=yes")
    found = Host(base, str(server), (*options, "-o", f"UserKnownHostsFile={known}", "-o", "IdentityAgent=none"))
    try:
        until(lambda: b"listening" in (base / "sshd.log").read_bytes())
        yield found
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(base)
        if made:
            made.rmdir()


def _privilege_separation_folder() -> Path | None:
    folder = Path("/run/sshd")
    if folder.exists():
        return None
    folder.mkdir(mode=0o755)
    return folder


@contextlib.contextmanager
def account(host: Host, shell: str, kind: str = "") -> Iterator[str]:
    """A user whose home has a name that no shell would leave alone and whose rc file talks."""
    name = f"dp{os.getpid()}{kind or shell}"
    home = host.base / f"home of {name} it's $HOME {{a,b}} \\ `x` é"
    run("useradd", "-m", "-d", str(home), "-p", "*", "-s", shutil.which(shell) or "", name)
    try:
        rc = home / RC[shell]
        rc.parent.mkdir(parents=True, exist_ok=True)
        rc.write_text(NOISE)
        yield name
    finally:
        _end_all_of(name)
        run("userdel", "-r", name)


def _end_all_of(name: str) -> None:
    """Every process of a user that this test made; userdel refuses while one is left."""
    uid = pwd.getpwnam(name).pw_uid

    def gone() -> bool:
        for pid in (left := _pids_of(uid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    until(gone)


@pytest.fixture(scope="module", params=SHELLS)
def shell(request: pytest.FixtureRequest, host: Host) -> Iterator[Remote]:
    with account(host, request.param) as name:
        yield host.login(name)


@pytest.fixture(scope="module")
def bash(host: Host) -> Iterator[Remote]:
    with account(host, "bash", "other") as name:
        yield host.login(name)


def home_of(machine: Remote) -> Path:
    return Path(pwd.getpwnam(machine.host.partition("@")[0]).pw_dir)


def plan(host: Host, *words: str, **more: Any) -> Any:
    return plan_of(*words, server=host.server, python="python3", **more)


def test_everything_arrives_byte_for_byte(shell: Remote, host: Host) -> None:
    env = {"ODD": WORDS[0], "EMPTY": "", "BYTE": "\udcff", "STATE": "{state}"}
    checkpoint = home_of(shell) / "weights $x {1,2}'s"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    asked = plan(
        host,
        *("--dump", "{state}/dump", *WORDS),
        env=env,
        files={"{state}/chat.jinja": "{{ 'é' }}".encode()},
        checkpoints=(str(checkpoint),),
    )
    lines: list[str] = []
    ready = launch(shell, asked, "one", 20, lines.append)
    assert ready.state == "running" and ready.health == 200 and ready.machine == shell.host
    state = home_of(shell) / ".local/state/draftproof/launches/one"
    assert ready.folder == str(state) and stat.S_IMODE(state.stat().st_mode) == 0o700
    dump = json.loads((state / "dump").read_text())
    folder = os.fsencode(state)
    assert [bytes.fromhex(word) for word in dump["argv"]] == [
        os.fsencode(word).replace(b"{state}", folder) for word in asked.argv[1:]
    ]
    environ = {bytes.fromhex(key): bytes.fromhex(value) for key, value in dump["environ"].items()}
    for name, value in env.items():
        assert environ[name.encode()] == os.fsencode(value).replace(b"{state}", folder)
    assert (state / "chat.jinja").read_text() == "{{ 'é' }}"
    assert str(checkpoint) in json.loads((state / "record.json").read_text())["hashes"]
    assert shell.call("read", path=str(checkpoint))["sizes"] == {"config.json": 2}
    assert stop(shell, "one").state == "killed" and not in_session(ready.pid)
    assert any("Loading safetensors" in line for line in lines)


def test_two_launches_survive_a_killed_connection(bash: Remote, host: Host) -> None:
    """The connection of a `follow` is cut off: its far end goes away, the engines stay, and each is stopped alone."""
    first = start(bash, plan(host, "--child"), "first", print)
    second = start(bash, plan(host, "--child"), "second", print)
    until(lambda: len(in_session(first.pid)) == len(in_session(second.pid)) == 2)
    uid = home_of(bash).stat().st_uid
    before = _pids_of(uid)
    with tempfile.TemporaryFile() as program:
        program.write(_program({"marker": "m:", "verb": "follow", "payload": {"name": "first", "offset": 0}}))
        program.seek(0)
        client = subprocess.Popen(bash.command(), stdin=program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert client.stdout is not None
        told = client.stdout
        until(lambda: b"m:" in told.readline())
        assert _pids_of(uid) - before
        client.kill()
        client.wait()
        told.close()
    until(lambda: not _pids_of(uid) - before)
    assert [one.state for one in status(bash)] == ["running", "running"]
    stop(bash, "first")
    assert not in_session(first.pid) and len(in_session(second.pid)) == 2
    assert [one.state for one in status(bash)] == ["killed", "running"]
    stop(bash, "second")
    assert not in_session(second.pid)


def _pids_of(uid: int) -> set[int]:
    found = set()
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == uid:
                found.add(pid)
    return found


def fault(machine: Remote, verb: str, **payload: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        machine.call(verb, **payload)
    return caught.value


def test_connections_that_fail(bash: Remote, host: Host) -> None:
    stranger = tuple(word.replace(f"{host.base}/user", f"{host.base}/stranger") for word in host.options)
    wrong_key = fault(Remote(bash.host, stranger), "facts")
    assert wrong_key.code == "host-unreachable" and "Permission denied (publickey)" in wrong_key.message
    assert "ssh-copy-id" in wrong_key.fix
    unknown = tuple(word.replace(f"{host.base}/known", "/dev/null") for word in host.options)
    new_host = fault(Remote(bash.host, unknown), "facts")
    assert new_host.code == "host-unreachable" and "Host key verification failed" in new_host.message
    assert "compare the machine's key" in new_host.fix
    nobody = fault(host.login("no-such-user"), "facts")
    assert nobody.code == "host-unreachable" and "Permission denied" in nobody.message


def test_folders_that_cannot_be_used(bash: Remote, host: Host) -> None:
    closed = host.base / "closed"
    closed.mkdir(mode=0o700)
    (closed / "config.json").write_text("{}")
    for path, word in (
        (closed, "permission denied"),
        (closed / "config.json", "permission denied"),
        (host.base / "none", "does not exist"),
        (host.base / "config", "is not a folder"),
    ):
        error = fault(bash, "read", path=str(path))
        assert error.code == "remote-folder" and str(path) in error.message and word in error.message
    denied = fault(bash, "hash", paths=[str(host.base / "host")])
    assert denied.code == "remote-folder" and "permission denied" in denied.message
    state = home_of(bash) / ".local"
    hidden = home_of(bash) / ".local.hidden"
    if state.exists():
        state.rename(hidden)
    state.mkdir(mode=0o755)  # root's, so the user cannot write into it
    try:
        error = fault(bash, "start", name="one", plan=plan(host).as_dict(), version="1")
        assert error.code == "remote-folder" and str(state) in error.message
    finally:
        state.rmdir()
        if hidden.exists():
            hidden.rename(state)


def test_no_python_there(shell: Remote) -> None:
    environment = home_of(shell) / ".ssh" / "environment"
    environment.parent.mkdir(exist_ok=True)
    environment.write_text("PATH=/nowhere\n")
    error = fault(shell, "facts")
    environment.unlink()
    assert error.code == "host-unfit" and "no python3" in error.message and "python3" in error.message


def test_the_plan_of_a_pair_arrives(shell: Remote, host: Host) -> None:
    """The real plan of the founding pair, its checkpoints under a folder with an awkward name, read and launched over
    the same connection; a stand-in takes vLLM's place and tells what it was given."""
    program = host.base / "vllm it's {1,2}"
    program.write_text("#!/usr/bin/env python3\n" + SERVER.read_text())
    program.chmod(0o755)
    folder = home_of(shell) / 'models "$x" {a,b}'
    for kind, name in (("targets", "Qwen3.6-27B"), ("configs", "Qwen3.6-27B-DFlash")):
        shutil.copytree(FIXTURES / kind / name, folder / name, dirs_exist_ok=True)
    port = free_port()
    ask = LaunchAsk(
        "vllm", str(folder / "Qwen3.6-27B"), str(folder / "Qwen3.6-27B-DFlash"), shell, {}, "127.0.0.1", port,
        release="0.33.0", executable=str(program), extra=("--dump", "{state}/dump"),
    )  # fmt: skip
    prepared = prepare_launch(ask, Path)
    try:
        ready = launch(shell, prepared.plan, "pair", 20, lambda text: None)
        words = [bytes.fromhex(word).decode() for word in json.loads(Path(ready.folder, "dump").read_text())["argv"]]
    finally:
        stop(shell, "pair")
    arrived = words[words.index("--speculative-config") + 1]
    print(f"\n{Path(pwd.getpwnam(shell.host.partition('@')[0]).pw_shell).name}: {arrived}")
    wanted = {"method": "dflash", "model": str(folder / "Qwen3.6-27B-DFlash"), "num_speculative_tokens": 15}
    assert json.loads(arrived) == wanted
    assert [word.replace("{state}", ready.folder) for word in prepared.plan.argv[1:]] == words[1:]
    record = json.loads(Path(ready.folder, "record.json").read_text())
    assert "config.json" in record["hashes"][str(folder / "Qwen3.6-27B-DFlash")]
