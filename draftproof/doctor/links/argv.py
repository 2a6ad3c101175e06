"""Did the arguments and the environment arrive as they were sent? Shells and wrappers eat quotes and braces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from draftproof.check.flags import FLAGS, read_flags
from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import GET, lack
from draftproof.doctor.facts import Facts
from draftproof.errors import UserError

CODE = "doctor-argv"
TITLE = "arguments and environment arrived as sent"
EXPLAINS = ("doctor-release", "doctor-config", "doctor-block", "doctor-acceptance", "doctor-cache", "doctor-speed")
NEEDS = ("process",)
PROVES = (
    "Every argument of the running process equals, byte for byte, what `draftproof launch` recorded as sent, the "
    "speculative JSON included, and so does every variable."
)
REFUTES = "An argument or a variable is missing or different, or the speculative JSON cannot be read as JSON."
FIX = "start it without a shell in between: draftproof launch, or the argv, compose or systemd form that it prints"
SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)


def required(facts: Facts) -> bool:
    """Nothing was sent where `launch` did not start the server."""
    return facts.process is not None and facts.process.sent_argv is not None


def judge(facts: Facts) -> Finding:
    process = facts.process
    if process is None:
        return lack(CODE, facts, "process")
    if broken := _unreadable(facts.engine or "", process.argv):
        return refuted(CODE, broken.message, "plain JSON", "see the message", "process: arguments", FIX)
    if process.sent_argv is None:
        message = "no launch record says what was sent; the arguments as they arrived can be read"
        return cannot_tell(CODE, message, "process: arguments", GET["record"])
    if len(process.argv) < 2 <= len(process.sent_argv):
        return cannot_tell(CODE, "the process shows a title in place of its arguments", "process", GET["record"])
    differences = [*_arguments(process.sent_argv, process.argv), *_variables(process.sent_env or {}, process.env)]
    if differences:
        name, sent, came = differences[0]
        more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
        return refuted(CODE, f"{name} did not arrive as sent{more}", sent, came, f"process: {name}", FIX)
    if process.sent_env is None:
        return cannot_tell(CODE, "the arguments arrived; the record holds no environment", "process", GET["record"])
    seen = f"{len(process.sent_argv)} arguments and {len(process.sent_env)} variables, all equal"
    return proved(CODE, "arguments and environment are those that were sent", "as sent", seen, "process")


def _unreadable(engine: str, argv: Sequence[str]) -> UserError | None:
    try:
        read_flags(FLAGS.get(engine, {}), argv)
    except UserError as error:
        return error
    return None


def _arguments(sent: Sequence[str], came: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """An interpreter and the program's full path may stand before what was sent, so the tails are compared."""
    wanted = sent[1:]
    tail = came[len(came) - len(wanted) :] if len(came) > len(wanted) else came[1:]
    if len(tail) != len(wanted):
        yield "the number of arguments", str(len(wanted)), str(len(tail))
    for place, (one, other) in enumerate(zip(wanted, tail, strict=False)):
        if one != other:
            flag = wanted[place - 1] if place and wanted[place - 1].startswith("-") else f"argument {place + 1}"
            hidden = SECRET.search(flag) is not None
            yield flag, "(hidden)" if hidden else one, "(hidden, another)" if hidden else other


def _variables(sent: Mapping[str, str], came: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, value in sent.items():
        if came.get(name) != value:
            hidden = SECRET.search(name) is not None
            other = "not set" if name not in came else "(hidden, another)" if hidden else came[name]
            yield name, "(hidden)" if hidden else value, other
