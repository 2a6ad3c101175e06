"""A plan as text that others can use: JSON, a shell command, an engine's YAML file, a compose file, a systemd unit.

`argv` is the plan itself. Each other form has one file here, which knows the quoting of its reader and refuses by name
what that reader cannot carry.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from dataclasses import replace

from draftproof.errors import UserError
from draftproof.launch.forms import compose, shell, systemd, yaml_config
from draftproof.launch.plan import Plan

FORMS = ("argv", "shell", "yaml", "compose", "systemd")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def render(plan: Plan, form: str, *, state: str = "./draftproof-launch", image: str | None = None) -> str:
    """The plan in one of FORMS. `state` replaces `{state}`; for systemd it is made absolute, for compose it is a folder
    in the container. `image` is the container image of the compose form and belongs to no other.
    Raises UserError bad-option when the form cannot carry the plan."""
    if form not in FORMS:
        raise UserError("bad-option", f"there is no form {form!r}", f"choose one of {', '.join(FORMS)}")
    if image is not None and form != "compose":
        raise UserError("bad-option", f"--image has no meaning for the form {form}", "leave --image out")
    _check(plan)
    plan = _resolve(plan, _folder(state, form))
    if form == "argv":
        return json.dumps(plan.as_dict(), indent=2) + "\n"
    if form == "compose":
        return compose.render(plan, image)
    if form == "shell":
        return shell.render(plan)
    return systemd.render(plan) if form == "systemd" else yaml_config.render(plan)


def _folder(state: str, form: str) -> str:
    if form == "systemd":
        return os.path.abspath(state)
    if form == "compose":
        return posixpath.normpath("/" + state.lstrip("/"))
    return state


def _resolve(plan: Plan, folder: str) -> Plan:
    def put(text: str) -> str:
        return text.replace("{state}", folder)

    return replace(
        plan,
        argv=tuple(put(word) for word in plan.argv),
        env={name: put(value) for name, value in plan.env.items()},
        files={_put_first(path, folder): data for path, data in plan.files.items()},
        why=tuple(replace(reason, value=put(reason.value)) for reason in plan.why),
    )


def _put_first(path: str, folder: str) -> str:
    return folder + path.removeprefix("{state}") if path.startswith("{state}") else path


def _check(plan: Plan) -> None:
    """What no form can carry: NUL, text that is not Unicode, names that a shell cannot hold."""
    if not plan.argv or not plan.argv[0] or plan.argv[0].startswith("-") or "=" in plan.argv[0]:
        raise UserError("bad-option", f"the program {plan.argv[:1]!r} cannot be started by name", "name the program")
    for text in (*plan.argv, *plan.env.values(), *plan.files, *plan.checkpoints):
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise UserError("bad-option", f"{text!r} holds a NUL or is not Unicode text", "rename or reword it")
    for name in plan.env:
        if not _NAME.fullmatch(name):
            fix = "use letters, digits and _ only"
            raise UserError("bad-option", f"{name!r} is no name of an environment variable", fix)
