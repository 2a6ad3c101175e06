"""The plan as the YAML file that `vllm serve --config` and `python -m sglang.launch_server --config` read.

Both turn the file back into an argument list, key by key (`load_config_file` in vllm/utils/argparse_utils.py,
sglang/srt/utils/server_args_config_parser.py): `true` is the bare flag, a list is several words, a mapping is one word
of JSON, and any other value is `str(value)`. What that rule cannot give back is refused.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from draftproof.errors import UserError
from draftproof.launch.forms.shell import quote
from draftproof.launch.plan import Plan

_MODEL_KEYS = {"vllm": "model", "sglang": "model-path"}
_FLAG = re.compile(r"--[A-Za-z0-9][\w.+-]*", re.ASCII)
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # what argparse takes for a number
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,15})?", re.ASCII)
_UNPRINTED = re.compile(r"[^ -~]")


def render(plan: Plan) -> str:
    """The file, opened by comments: how to start with it, and the variables and files that it cannot carry."""
    if plan.engine not in _MODEL_KEYS:
        raise UserError("bad-option", f"{plan.engine} reads no YAML configuration", "use --print shell or systemd")
    start, rest = _split(plan)
    comments = [f"start with: {' '.join(map(quote, start))} --config FILE.yaml"]
    if plan.env:
        comments += ["this file cannot carry the environment; set before the start:"]
        comments += [f"  {name}={quote(value)}" for name, value in plan.env.items()]
    comments += [f"needs the file {path}" for path in plan.files]
    header = "".join(f"# {_UNPRINTED.sub(_escape, comment)}\n" for comment in comments)
    return header + dump(_mapping(rest, _MODEL_KEYS[plan.engine]))


def dump(tree: Any) -> str:
    """Block style, keys in the given order, ASCII only, so that the reader's locale does not matter."""
    text = yaml.safe_dump(tree, default_flow_style=False, sort_keys=False, allow_unicode=False, width=2**30)
    return str(text)


def _escape(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()


def _split(plan: Plan) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words that start the engine with a configuration file, and the arguments behind the program."""
    argv = plan.argv
    count = 2 if argv[1:2] == ("serve",) else 3 if argv[1:2] == ("-m",) else 1
    start = argv[:count]
    if plan.engine == "sglang" and start[1:] == ("serve",):  # `sglang serve` wants the model on its command line
        start = ("python3", "-m", "sglang.launch_server")
    return start, argv[count:]


def _mapping(words: tuple[str, ...], model_key: str) -> dict[str, Any]:
    if words and not words[0].startswith("-"):
        words = (f"--{model_key}", *words)
    tree: dict[str, Any] = {}
    for flag, values, joined in _groups(words):
        key = flag.removeprefix("--")
        if not _FLAG.fullmatch(flag) or key == "config":
            raise UserError("bad-option", f"a YAML configuration cannot carry {flag!r}", "use --print shell")
        if key in tree:
            raise UserError("bad-option", f"a YAML configuration cannot carry {flag} twice", "use --print shell")
        if joined and (len(values) > 1 or _is_flag(values[0])):
            text = f"{flag}={' '.join(values)}"
            raise UserError("bad-option", f"a YAML configuration cannot carry {text!r}", "use --print shell")
        tree[key] = _value(values)
    return tree


def _groups(words: tuple[str, ...]) -> list[tuple[str, list[str], bool]]:
    """(flag, its values, whether the first came by `=`)."""
    groups: list[tuple[str, list[str], bool]] = []
    for word in words:
        if _is_flag(word):
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else [], bool(equals)))
        else:
            groups[-1][1].append(word) if groups else groups.append((word, [], False))
    return groups


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NEGATIVE.fullmatch(word)


def _value(words: list[str]) -> Any:
    if not words:
        return True
    return _scalar(words[0]) if len(words) == 1 else words


def _scalar(text: str) -> Any:
    """A number or a mapping where the reader gives the same back, else the text."""
    if _NUMBER.fullmatch(text):
        number = float(text) if "." in text else int(text)
        return number if str(yaml.safe_load(dump(number))) == text else text
    if text.startswith("{"):
        try:
            tree = json.loads(text)
            return tree if yaml.safe_load(dump(tree)) == tree else text
        except (ValueError, RecursionError, yaml.YAMLError):
            return text
    return text
