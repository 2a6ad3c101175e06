"""`--prove`: vLLM's own process writes down what it does with the drafter, through a plugin that is laid next to it.

Nothing is installed: the plugin and the few lines of metadata that name its entry point lie in the launch's own folder,
which PYTHONPATH names, so it works on every machine a launch works on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Final

from draftproof.config.engines import covers
from draftproof.errors import UserError
from draftproof.launch.plan import Plan, Reason

NAME: Final = "draftproof_prove"
WHERE: Final = "{state}/prove"
FACTS: Final = "{state}/inside"
BISECT: Final = "DRAFTPROOF_PROVE_BISECT"
METRICS: Final = "--per-request-spec-decode-metrics"
METRICS_SINCE: Final = ">=0.29"
METADATA: Final = "Metadata-Version: 2.1\nName: draftproof-prove\nVersion: 1\n"
ENTRY_POINTS: Final = f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n"


def with_prove(plan: Plan, release: str | None, *, bisect: bool = False) -> Plan:
    """The plan with the plugin beside it; `bisect` lets it hand out tensors of a draft step when the doctor asks.
    `release` None: unknown, so flags that not every release has stay out. UserError bad-option for an engine without
    such plugins."""
    refuse_other_engines(plan.engine)
    env, why = _environment(plan.env)
    if bisect:
        env[BISECT] = "1"
        why += (Reason(BISECT, "1", "the doctor may ask for the tensors of a draft step; a file check each step"),)
    argv = plan.argv
    if release is not None and covers(METRICS_SINCE, release) and not _has(argv, METRICS):
        argv = (*argv, METRICS, "detailed")
        why += (Reason(METRICS, "detailed", "each answer tells how many drafts each of its steps accepted"),)
    return replace(plan, argv=argv, env=env, files={**plan.files, **plugin_files()}, why=(*plan.why, *why))


def refuse_other_engines(engine: str) -> None:
    if engine != "vllm":
        raise UserError("bad-option", f"--prove is for vLLM; {engine} has no plugins that could tell", "leave it out")


def plugin_files() -> dict[str, bytes]:
    """What is laid beside vLLM: path in the launch folder -> content."""
    plugins = files("draftproof") / "plugins"
    return {
        f"{WHERE}/{NAME}.py": (plugins / "vllm.py").read_bytes(),
        f"{WHERE}/{NAME}_bisect.py": (plugins / "vllm_bisect.py").read_bytes(),
        f"{WHERE}/{NAME}-1.dist-info/METADATA": METADATA.encode(),
        f"{WHERE}/{NAME}-1.dist-info/entry_points.txt": ENTRY_POINTS.encode(),
    }


def _environment(given: Mapping[str, str]) -> tuple[dict[str, str], tuple[Reason, ...]]:
    """The user's own values stay, ours beside them."""
    path = ":".join(filter(None, (WHERE, given.get("PYTHONPATH"))))
    note = "in front of yours" if given.get("PYTHONPATH") else "a PYTHONPATH of that machine counts only through --env"
    why = [
        Reason("PYTHONPATH", path, f"there vLLM finds the plugin; {note}"),
        Reason("DRAFTPROOF_PROVE", FACTS, "there the plugin writes what it sees; without it it does nothing"),
    ]
    env = {**given, "PYTHONPATH": path, "DRAFTPROOF_PROVE": FACTS}
    if "VLLM_PLUGINS" in given:
        plugins = ",".join(dict.fromkeys([*filter(None, given["VLLM_PLUGINS"].split(",")), NAME]))
        env["VLLM_PLUGINS"] = plugins
        why.append(Reason("VLLM_PLUGINS", plugins, "your list, and the plugin: vLLM loads no other"))
    return env, tuple(why)


def _has(argv: tuple[str, ...], flag: str) -> bool:
    """vLLM's parser takes underscores for dashes too."""
    return any(word.partition("=")[0].replace("_", "-") == flag for word in argv)
