"""What the user asked a launch for, and the engine arguments it grows into: every one with its reason, none twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from draftproof.check.flags import FLAGS, read_flags
from draftproof.check.merge import conflict
from draftproof.check.options import Options
from draftproof.errors import UserError
from draftproof.launch.plan import Reason


@dataclass(frozen=True)
class Ask:
    """`target` and `drafter` as the engine shall see them on its machine: a path or a hub id; `drafter` is None for
    MTP. `program` begins the argument list. `extra` are the engine's own flags after `--`, `env` the user's
    variables. None means: not asked for, the engine's default."""

    engine: str
    target: str
    drafter: str | None
    program: tuple[str, ...]
    options: Options
    bind: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    chat_template: str | None = None
    extra: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


DEFAULTS: Final = Options()


class Arguments:
    """An argument list in the making. `user` holds the flags the user passed through, by meaning."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.user = read_flags(FLAGS[ask.engine], ask.extra)
        self.argv: list[str] = list(ask.program)
        self.env: dict[str, str] = dict(ask.env)
        self.why: list[Reason] = []

    def add(self, name: str, flag: str, value: object, why: str) -> None:
        """`flag value`, unless the user passed the same flag: then it must say the same. `name` is the meaning in
        `check/flags.py`."""
        if name in self.user:
            written, theirs = self.user[name]
            if str(theirs) != str(value):
                raise conflict(flag, value, "your flag " + written, theirs)
            return
        self.argv += [flag, str(value)]
        self.why.append(Reason(flag, str(value), why))

    def as_asked(self, flags: Mapping[str, str]) -> None:
        """Every field of the ask or of its options that differs from its default, by its meaning, under its flag."""
        for name, flag in flags.items():
            value = getattr(self.ask if hasattr(self.ask, name) else self.ask.options, name)
            if value and value != getattr(DEFAULTS, name, None):
                self.add(name, flag, value, "as asked")

    def switch(self, name: str, flag: str, why: str) -> None:
        if name not in self.user:
            self.argv.append(flag)
            self.why.append(Reason(flag, "", why))

    def variable(self, name: str, value: str, why: str) -> None:
        if self.env.get(name, value) != value:
            raise conflict(name, value, "--env", self.env[name])
        self.env[name] = value
        self.why.append(Reason(name, value, why))

    def must_not(self, name: str, because: str) -> None:
        """Refuse a flag of the user's that this plan sets in another way."""
        if name in self.user:
            flag = self.user[name][0]
            raise UserError("flag-conflict", f"{flag} contradicts this launch: {because}", f"remove {flag}")
