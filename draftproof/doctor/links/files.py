"""Can the checkpoints on disk be read?"""

from __future__ import annotations

from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import GET, drafter_of, lack
from draftproof.doctor.facts import Facts, FileFacts

CODE = "doctor-files"
TITLE = "the checkpoints can be read"
EXPLAINS = ("doctor-current", "doctor-pair", "doctor-heads", "doctor-acceptance")
NEEDS = ("files",)
PROVES = "Every file of both checkpoints could be read where the server runs."
REFUTES = "A file or a folder is missing, cut short, malformed or closed to the user who looks."


def required(facts: Facts) -> bool:
    return True


def judge(facts: Facts) -> Finding:
    files = facts.files
    if files is None:
        return lack(CODE, facts, "files")
    if files.unreadable:
        path, reason = next(iter(files.unreadable.items()))
        more = f", and {len(files.unreadable) - 1} more" if len(files.unreadable) > 1 else ""
        fix = "fetch the checkpoint again, or give the server's user the right to read it; then restart the server"
        return refuted(CODE, f"a checkpoint file cannot be read{more}", "readable", reason, path, fix)
    if not files.now:
        return cannot_tell(CODE, "no checkpoint file was found", "files", GET["files"])
    if drafter_of(facts) is not None and len({path.rpartition("/")[0] for path in files.now}) < 2 and not _gguf(files):
        return cannot_tell(CODE, "only one folder was read, of two checkpoints", next(iter(files.now)), GET["files"])
    size = sum(state.size for state in files.now.values())
    seen = f"{len(files.now)} files, {size / 2**30:.2f} GiB"
    return proved(CODE, "every checkpoint file can be read", "readable", seen, "files")


def _gguf(files: FileFacts) -> bool:
    """Single files, which may lie side by side."""
    return all(path.endswith(".gguf") for path in files.now) and len(files.now) > 1
