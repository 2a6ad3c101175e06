"""The plan as a systemd service, for the system or for one user. Quoting follows systemd.syntax(7), and for the command
systemd.service(5): double quotes, C escapes, `%%` for a percent sign, `$$` for a dollar sign in commands only."""

from __future__ import annotations

import re

from draftproof.errors import UserError
from draftproof.launch.forms.paths import is_hub_id
from draftproof.launch.forms.shell import write_commands
from draftproof.launch.plan import Plan

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # systemd drops a variable that holds one


def render(plan: Plan) -> str:
    """A unit file. ExecStartPre writes the plan's files; a program without a slash is found in systemd's own PATH."""
    _check(plan)
    lines = [
        "# /etc/systemd/system/NAME.service, or ~/.config/systemd/user/NAME.service for one user",
        "[Unit]",
        f"Description={re.sub(r'[^a-zA-Z0-9._-]', '-', plan.engine)}, started as draftproof planned",
        "After=network.target",
        "",
        "[Service]",
        "Type=exec",
        *(f"Environment={quote(f'{name}={value}')}" for name, value in plan.env.items()),
        *(f"ExecStartPre=/bin/sh -c {_word(command)}" for command in write_commands(plan.files)),
        f"ExecStart={' '.join(_word(word) for word in plan.argv)}",
        "Restart=on-failure",
        "KillMode=mixed",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def quote(text: str) -> str:
    """One word in double quotes."""
    return '"' + "".join(_ESCAPES.get(char) or _CONTROL.sub(_hex, char) for char in text) + '"'


def _word(text: str) -> str:
    return quote(text).replace("$", "$$")


def _hex(match: re.Match[str]) -> str:
    return f"\\x{ord(match.group()):02x}"


def _check(plan: Plan) -> None:
    program = plan.argv[0]
    if program[0] in "@:+!|" or "$" in program or ("/" in program and not program.startswith("/")):
        raise UserError(
            "bad-option", f"systemd cannot start the program {program!r}", "give its absolute path or its plain name"
        )
    for path in (path for path in plan.checkpoints if not path.startswith("/") and not is_hub_id(path)):
        raise UserError("bad-option", f"a service has no current folder to find {path!r} in", "give an absolute path")
    for name, value in plan.env.items():
        if _CONTROL.search(value):
            raise UserError("bad-option", f"systemd refuses control characters in a variable ({name})", "leave it out")
    for text in (*plan.argv, *plan.env.values(), *plan.files):
        if any(ord(char) & 0xFFFE == 0xFFFE or "\ufdd0" <= char <= "\ufdef" for char in text):
            raise UserError("bad-option", f"systemd refuses a Unicode noncharacter in {text!r}", "leave it out")
