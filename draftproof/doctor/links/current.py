"""Did the server read what lies on disk now? Every later comparison is with the files of today."""

from __future__ import annotations

from collections.abc import Mapping

from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import GET, lack
from draftproof.doctor.facts import Facts, FileFacts, FileState

CODE = "doctor-current"
TITLE = "the server read the files that are there now"
EXPLAINS = (
    "doctor-config", "doctor-taps", "doctor-windows", "doctor-causality", "doctor-rope", "doctor-heads",
    "doctor-block", "doctor-acceptance",
)  # fmt: skip
NEEDS = ("files",)
PROVES = (
    "The hashes are those that `draftproof launch` recorded; without a record, no file was written or replaced since "
    "the server started (mtime and ctime)."
)
REFUTES = "A file has another hash or size than recorded, has gone, is new, or was written after the server started."
FIX = "restart the server, so that it reads the files of today; if they should not have changed, fetch them again"


def required(facts: Facts) -> bool:
    return True


def judge(facts: Facts) -> Finding:
    files = facts.files
    if files is None or not files.now:
        return lack(CODE, facts, "files")
    if files.recorded is not None:
        return _against_record(files, files.recorded)
    if files.started is None:
        return cannot_tell(CODE, "neither a launch record nor the server's start is known", "files", GET["record"])
    return _against_start(files, files.started)


def _against_record(files: FileFacts, recorded: Mapping[str, FileState]) -> Finding:
    for path in sorted(recorded.keys() | files.now.keys()):
        was, now = recorded.get(path), files.now.get(path)
        if was is None or now is None or not _same(was, now):
            message = "a checkpoint file is not what it was at the launch"
            return refuted(CODE, message, _show(was), _show(now), path, FIX)
    unsure = [path for path, now in files.now.items() if now.sha256 is None or recorded[path].sha256 is None]
    if unsure:
        message = f"{len(unsure)} files have no hash on both sides; size and time are the same, which a copy can keep"
        return cannot_tell(CODE, message, unsure[0], "let doctor hash the files")
    seen = f"{len(files.now)} equal hashes"
    return proved(CODE, "the files are those of the launch", "as recorded", seen, "launch record")


def _against_start(files: FileFacts, started: float) -> Finding:
    for path, now in files.now.items():
        if files.loaded is not None and started < now.mtime <= files.loaded:
            message = "a checkpoint file was written while the server started, before or after it was read"
            return cannot_tell(CODE, message, path, "restart the server, so that every file is older")
        if now.mtime > started:
            late = f"written {now.mtime - started:.0f} s after the start"
            return refuted(CODE, "a checkpoint file was written after the server started", "older", late, path, FIX)
    moved = [path for path, now in files.now.items() if now.ctime is None or now.ctime > started]
    if moved:
        message = "no file was written since the start, but one may have been replaced with its old time kept"
        return cannot_tell(CODE, message, moved[0], GET["record"])
    seen = f"{len(files.now)} files, all older"
    return proved(CODE, "no file was written or replaced since the start", "older than the server", seen, "files")


def _same(was: FileState, now: FileState) -> bool:
    if was.sha256 is not None and now.sha256 is not None:
        return was.sha256 == now.sha256
    return (was.size, was.mtime) == (now.size, now.mtime)


def _show(state: FileState | None) -> str:
    if state is None:
        return "no file"
    return f"{state.size} bytes, sha256 {state.sha256[:12]}" if state.sha256 else f"{state.size} bytes"
