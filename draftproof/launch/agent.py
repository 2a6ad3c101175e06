"""The part of `draftproof launch` that runs on the machine where the engine runs. It is never installed there: its
source text, followed by one call of `main` with a base64 request, travels over the stdin of `python3 -`. So it imports
only the standard library, runs on Python 3.8, and everything a user chose is data, never a word of a command line.

It answers in lines of `marker + JSON`: any number of {"progress": …}, then one {"result": …} or {"error": …}.

    ours      a process belongs to a launch when it is of the engine's session, and the session leader is the process
              that was recorded (pid, kernel start time, boot id), or when it carries the launch's random token
    end       the supervisor, a detached process, waits for the engine, writes exit.json and ends what is left of it
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import fnmatch
import getpass
import hashlib
import json
import os
import platform
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import traceback
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # newer than Python 3.8, where annotations are never evaluated
    from collections.abc import Callable, Iterator

    Answer = dict[str, Any]
    Emit = Callable[[Answer], None]

CHUNK = 1 << 20
SMALL_FILE = 32 << 20
SMALL = re.compile(
    r"(config|generation_config|tokenizer_config|tokenizer|special_tokens_map|added_tokens|chat_template)\.json"
    r"|.*\.index\.json|chat_template\.jinja"
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TOKEN = "DRAFTPROOF_LAUNCH"
FILE_ERRORS = {
    errno.ENOENT: "does not exist",
    errno.ENOTDIR: "is not a folder",
    errno.EACCES: "is not accessible: permission denied",
    errno.EPERM: "is not accessible: operation not permitted",
    errno.EROFS: "is on a read-only file system",
    errno.EISDIR: "is a folder, a file was expected",
    errno.ELOOP: "is a chain of links without an end",
}


class Trouble(Exception):  # noqa: N818
    """What the user can mend; the fields become a UserError on the other side."""

    def __init__(self, code: str, message: str, fix: str) -> None:
        super().__init__(message)
        self.answer = {"code": code, "message": message, "fix": fix}


def main(encoded: str) -> None:
    request = json.loads(base64.b64decode(encoded))
    lock = threading.Lock()

    def emit(answer: Answer) -> None:
        with lock:
            sys.stdout.write(request["marker"] + json.dumps(answer) + "\n")
            sys.stdout.flush()

    try:
        need_linux()
        emit({"result": VERBS[request["verb"]](emit, **request["payload"])})
    except Trouble as trouble:
        emit({"error": trouble.answer})
    except BrokenPipeError:  # nobody listens any more
        os._exit(1)
    except OSError as error:
        emit({"error": file_trouble(error).answer})
    except Exception:
        emit({"error": {"code": "", "message": traceback.format_exc(), "fix": ""}})


def need_linux() -> None:
    if sys.platform != "linux" or sys.version_info < (3, 8):
        found = f"{sys.platform} with Python {platform.python_version()}"
        raise Trouble("host-unfit", "this machine is " + found, "launch on Linux with Python 3.8 or newer as python3")


def file_trouble(error: OSError) -> Trouble:
    where = "{} on {}".format(os.fsdecode(error.filename) if error.filename else "a file", socket.gethostname())
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Trouble("disk-full", f"{where}: {error.strerror}", "free some space there and try again")
    what = FILE_ERRORS.get(error.errno or 0, str(error.strerror or error))
    return Trouble("remote-folder", where + " " + what, "check the path and its permissions for " + user())


# ---- facts, read, hash: what is on this machine


def facts(
    emit: Emit,
    program: str | None = None,
    path: str | None = None,
    host: str | None = None,
    port: int | None = None,
) -> Answer:
    """What a launch needs to know beforehand. `path` is the PATH the engine will have, None for this machine's."""
    found: Answer = {
        "user": user(),
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "gpus": gpus(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    if program is not None:
        search = path if path is not None else os.environ.get("PATH", os.defpath)
        found["path"] = search
        found["program"] = shutil.which(program, path=search) if "/" not in program or os.path.isabs(program) else None
    if host is not None and port is not None:
        found["port"] = port_state(host, port)
    return found


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in some containers
        return str(os.getuid())


def gpus() -> list[Answer]:
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in text.decode(errors="replace").splitlines():
        index, name, total, free = (part.strip() for part in line.split(","))
        sizes = [int(mib) << 20 if mib.isdigit() else None for mib in (total, free)]
        found.append({"index": index, "name": name, "total": sizes[0], "free": sizes[1]})
    return found


def port_state(host: str, port: int) -> Answer:
    """Can a server bind here now? An engine that still loads may not listen yet, so our own launches are asked too."""
    for name in launch_names():
        record = read_json(os.path.join(launch_folder(name), "record.json"))
        if record and record["plan"]["port"] == port and alive(record):
            return {"free": False, "errno": "EADDRINUSE", "launch": name}
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, 0, socket.SOCK_STREAM, 0, 1)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return {"free": False, "errno": errno.errorcode.get(error.errno or 0, "") or str(error), "launch": None}
    return {"free": True}


def read(emit: Emit, path: str) -> Answer:
    """Names and sizes of all files of a folder, and the contents of those that describe a checkpoint."""
    os.listdir(path)  # a missing or closed folder is an error, an unreadable subfolder too
    sizes, contents, too_large = {}, {}, []
    for name in regular_files(path):
        full = os.path.join(path, name)
        sizes[name] = os.stat(full).st_size
        if SMALL.fullmatch(name) and sizes[name] <= SMALL_FILE:
            with open(full, "rb") as file:
                contents[name] = base64.b64encode(zlib.compress(file.read(), 1)).decode()
        elif SMALL.fullmatch(name):
            too_large.append(name)
    return {"sizes": sizes, "contents": contents, "too_large": too_large}


def read_files(emit: Emit, folder: str, pattern: str) -> Answer:
    """The files of a folder whose names match, such as inside-*.json; none where there is no such folder."""
    contents, too_large = {}, []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        path = os.path.join(folder, name)
        if not fnmatch.fnmatchcase(name, pattern) or not os.path.isfile(path):
            continue
        if os.path.getsize(path) <= SMALL_FILE:
            with open(path, "rb") as file:
                contents[name] = base64.b64encode(zlib.compress(file.read(), 1)).decode()
        else:
            too_large.append(name)
    return {"contents": contents, "too_large": too_large}


def put_file(emit: Emit, name: str, path: str, data: str, clear: str) -> Answer:
    """Write a file (base64) below a launch's own folder, after removing the files beside it that match `clear`."""
    state, _ = known_record(name)
    full = os.path.normpath(os.path.join(state, path))
    if not full.startswith(state + os.sep):
        raise Trouble("bad-option", f"{path!r} is not below the launch's folder", "name a file inside it")
    folder = os.path.dirname(full)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for old in fnmatch.filter(os.listdir(folder), clear):
        os.unlink(os.path.join(folder, old))
    write_file(full, base64.b64decode(data))
    return {}


def probe(emit: Emit, python: str, arguments: list[str], source: str) -> Answer:
    """What a program that another Python of this machine runs says about itself, as JSON; None without an answer."""
    command = [python, *arguments]
    try:
        done = subprocess.run(
            command, input=source.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120, check=False
        )
        return {"facts": json.loads(done.stdout)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {"facts": None}


def regular_files(folder: str) -> list[str]:
    """Relative names of regular files; links to files are followed (the hub's cache), dot-folders are left out."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for where, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            full = os.path.join(where, name)
            if stat.S_ISREG(os.stat(full).st_mode):
                found.append(os.path.relpath(full, folder))
    return found


def hash_files(emit: Emit, paths: list[str], digests: bool = True, ctimes: bool = False) -> Answer:
    """{path: {file name: sha256, size, mtime_ns}}; a path that is a file holds the one name ''. Without `digests` no
    file is read and sha256 is None. `ctimes` adds ctime_ns, the latest change of the file, its links and folders."""
    jobs = []
    for path in paths:
        names = regular_files(path) if stat.S_ISDIR(os.stat(path).st_mode) else [""]
        jobs += [(path, name, os.path.join(path, name) if name else path) for name in names]
    total = sum(os.stat(full).st_size for _, _, full in jobs)
    lock, done, told = threading.Lock(), [0], [time.monotonic()]

    def count(size: int) -> None:
        with lock:
            done[0] += size
            if time.monotonic() - told[0] > 1:
                told[0] = time.monotonic()
                emit({"progress": {"hashed": done[0], "of": total}})

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found: Answer = {path: {} for path in paths}
        for (path, name, _), digest in [(job, pool.submit(hash_one, job[2], count, digests)) for job in jobs]:
            found[path][name] = digest.result()
    for path, name, full in jobs if ctimes else ():
        found[path][name]["ctime_ns"] = last_change(path, full)
    return {"hashes": found}


def last_change(path: str, full: str) -> int:
    """Also a link that points elsewhere now, or a folder that took another's place, changes what a name means."""
    folder = [path] if path == full else [path, os.path.dirname(full)]
    return max(found.st_ctime_ns for one in (full, *folder) for found in (os.stat(one), os.lstat(one)))


def hash_one(path: str, count: Callable[[int], None], read: bool = True) -> Answer:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        for block in iter(lambda: file.read(CHUNK), b"") if read else ():
            digest.update(block)
            count(len(block))
    return {"sha256": digest.hexdigest() if read else None, "size": info.st_size, "mtime_ns": info.st_mtime_ns}


def tensors(emit: Emit, path: str) -> Answer:
    """Names of the tensors in a checkpoint's safetensors files, from their headers."""
    found: set[str] = set()
    for name in regular_files(path):
        if name.endswith(".safetensors"):
            with open(os.path.join(path, name), "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                found.update(json.loads(file.read(min(size, SMALL_FILE * 4))))
    return {"tensors": sorted(found - {"__metadata__"})}


# ---- the state folder of a launch


def launches_folder() -> str:
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isdir(home):  # fish in a C locale garbles variables that are not ASCII
            home = pwd.getpwuid(os.getuid()).pw_dir
        base = os.path.join(home, ".local", "state")
    return os.path.join(base, "draftproof", "launches")


def launch_folder(name: str) -> str:
    if not NAME.fullmatch(name):
        raise Trouble("bad-option", f"{name!r} is no name for a launch", "use letters, digits, '.', '_', '-'")
    return os.path.join(launches_folder(), name)


def launch_names() -> list[str]:
    try:
        return sorted(filter(NAME.fullmatch, os.listdir(launches_folder())))
    except FileNotFoundError:
        return []


def known_record(name: str) -> tuple[str, Answer]:
    state = launch_folder(name)
    record = read_json(os.path.join(state, "record.json"))
    if record is None:
        there = ", ".join(launch_names()) or "none"
        message = f"no launch named {name} on {socket.gethostname()}"
        raise Trouble("launch-unknown", message, "launches there: " + there)
    return state, record


@contextlib.contextmanager
def locked(state: str) -> Iterator[int]:
    """Held from before a start until its record is written, also by the supervisor's copy; stop waits for it."""
    handle = os.open(os.path.join(state, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def read_json(path: str) -> Answer | None:
    try:
        with open(path, "rb") as file:
            return dict(json.loads(file.read()))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_file(path: str, data: bytes) -> None:
    """All or nothing: a reader sees the old file or the new one."""
    part = f"{path}.{os.getpid()}.part"
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_json(path: str, value: Answer) -> None:
    write_file(path, json.dumps(value, indent=1).encode())


# ---- processes


class Process(NamedTuple):
    pid: int
    state: str
    session: int
    start: int


def process(pid: int) -> Process | None:
    """Of /proc/PID/stat: state, session and start time (fields 3, 6, 22). The name before them may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid, fields[0].decode(), int(fields[3]), int(fields[19]))


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def alive(record: Answer, who: str = "") -> bool:
    """Is the recorded process (the engine, or with who="supervisor_" that) there, and no other with its number?"""
    found = process(record[who + "pid"])
    same = found is not None and found.start == record[who + "start"] and record["boot"] == boot_id()
    return same and found is not None and found.state not in "ZX"


def members(record: Answer, seen: bool) -> list[Process]:
    """All living processes of a launch. `seen`: the leader was seen alive in this call, so that after its end the
    number of its session cannot belong to anyone else as long as a member is left."""
    leader = process(record["pid"])
    ours = record["boot"] == boot_id() and (seen if leader is None else leader.start == record["start"])
    mark = "{}={}".format(TOKEN, record["token"]).encode()
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        one = process(pid)
        if one and one.state not in "ZX" and ((ours and one.session == record["pid"]) or carries(pid, mark)):
            found.append(one)
    return found


def carries(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def send(one: Process, number: int) -> None:
    """A signal to exactly this process: where the kernel has process handles, one is opened before the comparison."""
    handle = None
    with contextlib.suppress(AttributeError, OSError):  # Python 3.8, old kernels, old containers
        handle = os.pidfd_open(one.pid)
    try:
        now = process(one.pid)
        if now is None or now.start != one.start:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if handle is None:
                os.kill(one.pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
    finally:
        if handle is not None:
            os.close(handle)


def wait_gone(record: Answer, seconds: float, seen: bool) -> list[Process]:
    """Members that are left after at most so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        left = members(record, seen)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def end_rest(record: Answer, patience: float, seconds: float, seen: bool) -> None:
    """What outlives its leader may go by itself, after `patience` gets SIGTERM, after `seconds` more SIGKILL."""
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, seconds)):
        for one in wait_gone(record, wait, seen):
            send(one, number)


# ---- listener: who serves on a port


def listener(emit: Emit, port: int) -> Answer:
    """The living launch whose engine shall serve on this port, and the processes that listen there with their
    ancestors, nearest first. Only processes of this user can be looked into: `others` says that one listens which
    cannot."""
    inodes, names = listening(port), launch_names()
    records = [read_json(os.path.join(launch_folder(name), "record.json")) for name in names]
    record = next((one for one in records if one and one["plan"]["port"] == port and alive(one)), None)
    chains = [ancestors(pid) for pid in holders(inodes)]
    return {"record": record, "chains": chains, "others": bool(inodes) and not chains}


def listening(port: int) -> set[str]:
    """Inodes of the sockets in state LISTEN (0A) on this port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError), open(table) as file:
            rows = [line.split() for line in file.readlines()[1:]]
            found |= {row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    return found


def holders(inodes: set[str]) -> list[int]:
    wanted, found = {f"socket:[{inode}]" for inode in inodes}, []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) if inodes else []:
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):  # gone, or another user's
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(os.path.join(folder, name)) in wanted:
                        found.append(pid)
                        break
    return found


def ancestors(pid: int) -> list[Answer]:
    found: list[Answer] = []
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            argv, env = (null_separated(f"/proc/{pid}/{name}") for name in ("cmdline", "environ"))
        except OSError:  # gone, or another user's
            break
        begun = (int(fields[19]) + 1) / os.sysconf("SC_CLK_TCK")  # the tick's end: never before the true start
        started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + begun
        pairs = dict(entry.partition("=")[::2] for entry in env if "=" in entry)
        found.append({"pid": pid, "argv": argv, "env": pairs, "started": started})
        pid = int(fields[1])
    return found


def null_separated(path: str) -> list[str]:
    with open(path, "rb") as file:
        return [part.decode(errors="replace") for part in file.read().split(b"\0")[:-1]]


# ---- start


def start(emit: Emit, name: str, plan: Answer, version: str, hashes: Answer | None = None) -> Answer:
    state = launch_folder(name)
    os.makedirs(state, mode=0o700, exist_ok=True)
    os.chmod(state, 0o700)
    with locked(state) as lock:
        refuse_running(name, state)
        clear(state)
        for path, content in plan["files"].items():
            write_plan_file(path, content, state)
        record = {
            "schema": "draftproof.launch/1",
            "name": name,
            "plan": plan,
            "argv": [word.replace("{state}", state) for word in plan["argv"]],
            "env": {key: value.replace("{state}", state) for key, value in plan["env"].items()},
            "hashes": hashes if hashes is not None else hash_files(emit, plan["checkpoints"])["hashes"],
            "version": version,
            "hostname": socket.gethostname(),
            "user": user(),
            "boot": boot_id(),
            "token": uuid.uuid4().hex,
            "time": time.time(),
        }
        detach(state, record, lock)
    return status_of(*known_record(name), ask=False)


def refuse_running(name: str, state: str) -> None:
    """What a crashed engine left is being ended by its supervisor; that takes seconds and is waited for."""
    record = read_json(os.path.join(state, "record.json"))
    if record and (alive(record) or wait_gone(record, 10, seen=False)):
        message = f"launch {name} already runs on {socket.gethostname()} (pid {record['pid']})"
        raise Trouble("launch-exists", message, "stop it first, or choose another name")


def clear(state: str) -> None:
    """What an earlier launch of this name left; its log is kept once."""
    for old in ("record.json", "exit.json", "stop.json", "ready"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(state, old))
    with contextlib.suppress(FileNotFoundError):
        os.replace(os.path.join(state, "log"), os.path.join(state, "log.previous"))
    shutil.rmtree(os.path.join(state, "inside"), ignore_errors=True)  # of --prove


def write_plan_file(path: str, content: Answer, state: str) -> None:
    inside = path.startswith("{state}")
    path = state + path[len("{state}") :] if inside else path
    if inside:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    write_file(path, bytes.fromhex(content["hex"]) if "hex" in content else content["text"].encode())


def detach(state: str, record: Answer, lock: int) -> None:
    """Fork twice with a session in between: the supervisor has no terminal, no parent here and no ssh connection."""
    listen, report = os.pipe()  # both close on exec
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            try:
                os.close(listen)
                supervise(state, record, lock, report)
            finally:
                os._exit(1)
        os._exit(0)
    os.close(report)
    os.waitpid(child, 0)
    with open(listen, "rb") as file:
        answer = json.loads(file.read() or b'{"failed": "the supervisor ended"}')
    if "failed" in answer:
        program = record["argv"][0]
        message = "{} cannot be started on {}: {}".format(program, socket.gethostname(), answer["failed"])
        raise Trouble("launch-failed", message, f"give the full path of a program that {user()} can run")


def supervise(state: str, record: Answer, lock: int, report: int) -> None:
    try:
        engine = run_engine(state, record)
    except (OSError, ValueError) as error:
        os.write(report, json.dumps({"failed": str(error)}).encode())
        return
    begun, me = process(engine.pid), process(os.getpid())
    if begun is None or me is None:
        raise AssertionError("an unreaped child is always in /proc")
    record.update(pid=engine.pid, pgid=engine.pid, start=begun.start, supervisor_pid=me.pid, supervisor_start=me.start)
    write_json(os.path.join(state, "record.json"), record)
    os.close(lock)
    os.write(report, json.dumps({"pid": engine.pid}).encode())
    os.close(report)
    see_to_the_end(state, record)


def run_engine(state: str, record: Answer) -> subprocess.Popen[bytes]:
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):  # a caller may have ignored them
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of the engine are reaped here
    if "/" in record["argv"][0] and not os.path.isabs(record["argv"][0]):
        raise ValueError("a relative path")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(os.path.join(state, "log"), flags, 0o600)
    env = dict(os.environ, **record["env"])
    env[TOKEN] = record["token"]
    # The state folder as working folder: a hub id such as org/name can never be taken for a folder by that name.
    return subprocess.Popen(
        record["argv"], stdin=null, stdout=log, stderr=log, env=env, cwd=state, start_new_session=True
    )


def see_to_the_end(state: str, record: Answer) -> None:
    """The engine stays a zombie until all of its session is gone, so that its number cannot be given away."""
    while True:
        done = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if done is None or done.si_pid == record["pid"]:
            break
        os.waitpid(done.si_pid, 0)
    key = "returncode" if done is None or done.si_code == os.CLD_EXITED else "signal"
    ended = {key: done.si_status if done else None, "time": time.time(), "token": record["token"]}
    write_json(os.path.join(state, "exit.json"), ended)
    end_rest(record, 1, 5, seen=True)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    os._exit(0)


# ---- status, log, follow, stop


def status(emit: Emit, name: str | None = None) -> Answer:
    if name is not None:
        return {"launches": [status_of(*known_record(name))]}
    found = [(launch_folder(one), read_json(os.path.join(launch_folder(one), "record.json"))) for one in launch_names()]
    with ThreadPoolExecutor(8) as pool:
        return {"launches": list(pool.map(lambda one: status_of(one[0], one[1]), [one for one in found if one[1]]))}


def status_of(state: str, record: Answer, ask: bool = True) -> Answer:
    """starting, running (it answered once), exited, killed, lost (gone without a trace), elsewhere (shared home)."""
    plan, log, ready = record["plan"], os.path.join(state, "log"), os.path.join(state, "ready")
    found: Answer = {"name": record["name"], "engine": plan["engine"], "host": plan["host"], "port": plan["port"]}
    found.update(pid=record["pid"], since=record["time"], hostname=record["hostname"], folder=state, log=log)
    found.update(health=None, stopped=os.path.exists(os.path.join(state, "stop.json")))
    found["log_size"] = os.path.getsize(log) if os.path.exists(log) else 0
    if alive(record):
        found["health"] = health(plan["host"], plan["port"], plan["health"]) if ask else None
        if found["health"] == 200:
            write_file(ready, b"")
        found["state"] = "running" if os.path.exists(ready) else "starting"
        return found
    ended = ending(state, record)
    if ended:
        found.update(ended, state="killed" if "signal" in ended else "exited")
    else:
        found["state"] = "lost" if record["hostname"] == socket.gethostname() else "elsewhere"
    return found


def ending(state: str, record: Answer) -> Answer | None:
    """What the supervisor wrote about this launch's end. It may be a moment behind the end itself."""
    for _ in range(20):
        ended = read_json(os.path.join(state, "exit.json"))
        if ended and ended.pop("token") == record["token"]:
            return ended
        if not alive(record, "supervisor_"):
            return None
        time.sleep(0.1)
    return None


def health(host: str, port: int, path: str) -> Any:
    """The HTTP status, or why there is none. Asked directly: proxies of the environment are not for this machine."""
    import http.client  # here, because it takes a third of the start-up time of every call

    here = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(here, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()


def log_part(state: str, offset: int) -> bytes:
    try:
        with open(os.path.join(state, "log"), "rb") as file:
            file.seek(offset)
            return file.read(CHUNK)
    except FileNotFoundError:
        return b""


def log(emit: Emit, name: str, offset: int = 0, lines: int | None = None) -> Answer:
    """At most 1 MiB from `offset`, or the last `lines` lines of the last MiB."""
    state, _ = known_record(name)
    path = os.path.join(state, "log")
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if lines is not None:
        offset = max(0, size - CHUNK)
    data = log_part(state, offset)
    end = offset + len(data)
    if lines is not None:
        data = b"".join(data.splitlines(True)[-lines:]) if lines else b""
    return {"data": base64.b64encode(data).decode(), "offset": end, "size": size}


def follow(emit: Emit, name: str, offset: int, seconds: float | None = None, ready: bool = False) -> Answer:
    """Send the log as it grows, until the engine ends, or time is up, or with `ready` until it answers 200."""
    state, record = known_record(name)
    deadline = time.monotonic() + seconds if seconds is not None else float("inf")
    while True:
        # The state is read before the log, so that the last lines of an engine that has ended are still sent.
        now = status_of(state, record, ask=ready)
        part = log_part(state, offset)
        while part:
            offset += len(part)
            emit({"progress": {"log": base64.b64encode(part).decode(), "offset": offset}})
            part = log_part(state, offset)
        emit({"progress": {"offset": offset}})  # a sign of life; without a listener this process ends here
        over = time.monotonic() > deadline
        if over or now["state"] not in ("starting", "running") or (ready and now["health"] == 200):
            return dict(now, offset=offset, timed_out=over)
        time.sleep(0.3)


def stop(emit: Emit, name: str, seconds: float = 30) -> Answer:
    """SIGTERM to the engine's process group, after so many seconds SIGKILL to every process of the launch. What the
    engine leaves behind is ended too."""
    state = launch_folder(name)
    if not os.path.isdir(state):
        known_record(name)
    with locked(state):
        state, record = known_record(name)
    ran = alive(record)
    if ran:
        write_json(os.path.join(state, "stop.json"), {"time": time.time()})
        with contextlib.suppress(ProcessLookupError):
            os.killpg(record["pgid"], signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while alive(record) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive(record):
        for one in members(record, seen=True):
            send(one, signal.SIGKILL)
    end_rest(record, 0.2, max(1.0, deadline - time.monotonic()), seen=ran)
    left = wait_gone(record, 10, seen=ran)
    if left:
        pids = ", ".join(str(one.pid) for one in left)
        raise Trouble(
            "launch-failed", "these processes do not end: " + pids, "look at them with ps; state D waits for a device"
        )
    if ran and not ending(state, record):  # the supervisor is gone, so nobody else writes it
        ended = {"signal": int(signal.SIGTERM), "time": time.time(), "token": record["token"]}
        write_json(os.path.join(state, "exit.json"), ended)
    return dict(status_of(state, record, ask=False), ran=ran)


VERBS: dict[str, Callable[..., Answer]] = {
    "facts": facts,
    "read": read,
    "read_files": read_files,
    "put_file": put_file,
    "probe": probe,
    "hash": hash_files,
    "tensors": tensors,
    "listener": listener,
    "start": start,
    "status": status,
    "log": log,
    "follow": follow,
    "stop": stop,
}
