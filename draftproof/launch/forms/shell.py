"""The plan as a command line for a POSIX shell (bash, dash, zsh), opened by the commands that write its files.

Fish is no POSIX shell: in its single quotes a backslash before a backslash or a quote is an escape. Where a value holds
neither `\\\\` nor a backslash before a quote or at its end, the line happens to work there too; otherwise save it and
run it with `sh FILE`.
"""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Mapping

from draftproof.launch.plan import Plan

_CHUNK = 60_000  # bytes of a file in one command, a multiple of 3; Linux takes no argument over 128 KiB


def render(plan: Plan) -> str:
    """`env NAME=VALUE … program argument …`, one word a line. `env` makes the shell look for a program: no alias, no
    builtin, no keyword."""
    words = [*(f"{name}={value}" for name, value in plan.env.items()), *plan.argv]
    line = " \\\n  ".join(["env", *(quote(word) for word in words)])
    return " &&\n".join([*write_commands(plan.files), line]) + "\n"


def quote(text: str) -> str:
    """shlex.quote, and quotes around what it leaves bare although zsh (`=ls`) or fish (`%self`) would expand it."""
    quoted = shlex.quote(text)
    return f"'{text}'" if quoted == text and text[0] in "=%" else quoted


def write_commands(files: Mapping[str, bytes]) -> list[str]:
    """Commands that write the files. The contents travel as base64, so that no shell reads them."""
    commands = []
    for path, data in files.items():
        commands.append(f"mkdir -p -- {quote(os.path.dirname(path) or '.')}")
        for start in range(0, max(len(data), 1), _CHUNK):
            text = base64.b64encode(data[start : start + _CHUNK]).decode()
            commands.append(f"printf %s '{text}' | base64 -d {'>>' if start else '>'} {quote(path)}")
    return commands
