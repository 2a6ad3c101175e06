"""`draftproof launch` from what was typed to a plan: read both checkpoints where they lie, settle the release and the
program, check the pair, fill the arguments."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from draftproof.check.check import Pair, read_pair
from draftproof.check.installed import Installed, installed_of, probe_command
from draftproof.check.merge import merge_options
from draftproof.config.drafter import read_drafter
from draftproof.config.engines import engines
from draftproof.config.target import read_target
from draftproof.errors import UserError
from draftproof.launch import llamacpp, sglang, vllm
from draftproof.launch.ask import Ask
from draftproof.launch.flow import Prepared, prepare, with_file
from draftproof.launch.machine import Machine
from draftproof.launch.names import Checkpoint, Resolve, locate
from draftproof.launch.plan import Reason
from draftproof.launch.prove import refuse_other_engines, with_prove

TEMPLATE: Final = "chat_template.jinja"
PACKAGES: Final = ("vllm", "sglang")


@dataclass(frozen=True)
class LaunchAsk:
    """What was typed. `named` by field of Options, None where not given. `release` None: the one installed where the
    engine runs, else the newest in the data. `target_config` and `drafter_config` belong to GGUF checkpoints."""

    engine: str
    target: str
    drafter: str | None
    machine: Machine
    named: Mapping[str, Any]
    bind: str
    port: int
    release: str | None = None
    venv: str | None = None
    executable: str | None = None
    served_name: str | None = None
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    chat_template: Path | None = None
    target_config: Path | None = None
    drafter_config: Path | None = None
    accept: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    prove: bool = False
    bisect: bool = False


def prepare_launch(ask: LaunchAsk, resolve: Resolve) -> Prepared:
    """UserError for every kind of bad input; nothing is started or written."""
    if ask.prove:
        refuse_other_engines(ask.engine)
    found = installed_there(ask) if ask.release is None and ask.engine in PACKAGES else None
    platform = ask.named.get("platform") or (found.platform if found else None)
    options = merge_options(ask.engine, {**ask.named, "platform": platform}, ask.extra, ask.env)
    if (options.method == "mtp") == (ask.drafter is not None):
        fix = "leave --drafter out with --method mtp" if ask.drafter else "name a drafter, or add --method mtp"
        raise UserError("bad-option", "--method mtp drafts with the target itself; dflash needs a drafter", fix)
    full = Ask(
        engine=ask.engine,
        target=ask.target,
        drafter=ask.drafter,
        program=_program(ask),
        options=options,
        bind=ask.bind,
        port=ask.port,
        served_name=ask.served_name,
        reasoning_parser=ask.reasoning_parser,
        tool_parser=ask.tool_parser,
        chat_template=f"{{state}}/{TEMPLATE}" if ask.chat_template else None,
        extra=ask.extra,
        env=ask.env,
    )
    packaged = ask.engine in PACKAGES
    prepared = _hugging_face(ask, full, resolve, *_release(ask, found)) if packaged else _gguf(ask, full)
    if ask.chat_template:
        prepared = replace(prepared, plan=with_file(prepared.plan, TEMPLATE, ask.chat_template))
    if ask.prove:
        known = prepared.check.applied.release if prepared.check else None
        prepared = replace(prepared, plan=with_prove(prepared.plan, known, bisect=ask.bisect))
    return prepared


def _hugging_face(ask: LaunchAsk, full: Ask, resolve: Resolve, release: str, reason: Reason) -> Prepared:
    with tempfile.TemporaryDirectory() as scratch:
        target = locate(ask.machine, ask.target, Path(scratch), resolve)
        drafter = locate(ask.machine, ask.drafter, Path(scratch), resolve) if ask.drafter else None
        pair = _read(target, drafter)
        named = replace(full, target=target.engine_name, drafter=drafter.engine_name if drafter else None)
        prepared = prepare(named, pair, release, ask.accept)
    return replace(prepared, plan=replace(prepared.plan, why=(reason, *prepared.plan.why)))


def _read(target: Checkpoint, drafter: Checkpoint | None) -> Pair:
    return read_pair(read_drafter(drafter.configs) if drafter else None, read_target(target.configs))


def _gguf(ask: LaunchAsk, full: Ask) -> Prepared:
    """GGUF files: checked like any pair when their Hugging Face configs are named, else only the block is read."""
    if (ask.target_config is None) != (ask.drafter_config is None) and ask.drafter:
        raise UserError(
            "bad-option", "a pair is checked with both configs", "give --target-config and --drafter-config"
        )
    if ask.target_config:
        drafter = read_drafter(ask.drafter_config) if ask.drafter_config else None
        return prepare(full, read_pair(drafter, read_target(ask.target_config)), ask.release, ask.accept)
    if ask.accept:
        raise UserError("bad-option", "--accept means nothing without a check", "give --target-config as well")
    return Prepared(
        llamacpp.plan_llamacpp(full, llamacpp.read_block_size(Path(ask.drafter)) if ask.drafter else None), None
    )


def _program(ask: LaunchAsk) -> tuple[str, ...]:
    default = {"vllm": vllm.PROGRAM, "sglang": sglang.PROGRAM}.get(ask.engine, llamacpp.PROGRAM)
    if ask.executable and ask.venv:
        raise UserError("bad-option", "--executable and --venv both name the program", "give one of them")
    if ask.executable:
        return (ask.executable, *default[1:])
    if ask.venv:
        name = "python" if ask.engine == "sglang" else default[0]
        return (posixpath.join(ask.venv, "bin", name), *default[1:])
    return default


def _release(ask: LaunchAsk, found: Installed | None) -> tuple[str, Reason]:
    """The release whose rules hold, and how it was settled."""
    if ask.release:
        return ask.release, Reason("--release", ask.release, "as asked")
    if found is not None and found.version is not None:
        return found.version, Reason("--release", found.version, f"installed in {found.location or found.python}")
    newest = engines()[ask.engine].newest
    return newest, Reason(
        "--release", newest, f"{ask.engine} is not installed there; the newest release known is assumed"
    )


def installed_there(ask: LaunchAsk) -> Installed | None:
    """What the engine's environment on its machine holds; None when its interpreter is not found there."""
    program = _program(ask)[0]
    where = ask.machine.call("facts", program=program)["program"]
    python = where if ask.engine == "sglang" else where and posixpath.join(posixpath.dirname(where), "python")
    if not python:
        return None
    arguments, source = probe_command(ask.engine)
    answer = ask.machine.call("probe", python=python, arguments=arguments, source=source)
    return installed_of(answer["facts"] | {"interpreter": python}) if answer["facts"] else None
