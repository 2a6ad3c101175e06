"""Which engine is really installed: what an environment's metadata, files and compiled parts say of it.

A release number decides which rules hold, so it has to be that of the code that runs. `probe_install.py` collects the
facts inside the engine's own environment; everything after that is pure, and another machine may supply the facts.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

from draftproof.check.install_findings import PACKAGES, commit_of, findings_of, version_of
from draftproof.config.finding import Finding, error, warning
from draftproof.errors import UserError

__all__ = ["Installed", "findings_of", "installed_binary", "installed_of", "probe_command", "read_installed"]

PROBE_SECONDS: Final = 120
LOAD_SECONDS: Final = 120
# Which compiled parts are tried: the kernels an engine cannot run without. The others are only listed.
KERNELS: Final = re.compile(r"(^|/)(_(moe_)?C(_stable_libtorch|_AVX2|_AVX512)?|_vllm_fa\d_C|common_ops)\.[^/]*so$")
# What CPython says of a library that registers operators and is no Python module: it is loaded all the same.
NO_EXPORT: Final = "dynamic module does not define module export function"
MARK: Final = "draftproof-load:"
# Of the CPU builds vLLM imports one, by what the processor can do; two in one process register each operator twice.
LOAD: Final = f"""
import importlib, json, sys
site, result = sys.argv[1], {{}}
sys.path[:0] = [site] if site else []
def load(name):
    try:
        importlib.import_module(name)
        result[name] = ""
    except BaseException as error:
        result[name] = "" if {NO_EXPORT!r} in str(error) else f"{{type(error).__name__}}: {{error}}"
load("torch")
names = sys.argv[2:] if not result["torch"] else []
if any("_AVX" in name for name in names):
    cpu = getattr(sys.modules["torch"], "cpu", None)
    able = lambda what: bool(getattr(cpu, f"_is_{{what}}_supported", lambda: False)())
    best = "_C" if able("avx512_bf16") else "_C_AVX512" if able("avx512") else "_C_AVX2"
    names = [name for name in names if not name.split(".")[-1].startswith("_C") or name.endswith("." + best)]
for name in names:
    load(name)
print("\\n{MARK}" + json.dumps(result))
"""


@dataclass(frozen=True)
class Installed:
    """`version` is the metadata's, of the distribution that owns the modules (a build number for llama.cpp).
    `compiled` maps each compiled file to "" (loads), the error, or "not tried"."""

    engine: str
    python: str
    version: str | None
    commit: str | None
    location: str | None
    findings: tuple[Finding, ...]
    paths: Mapping[str, bool] = field(default_factory=dict)
    compiled: Mapping[str, str] = field(default_factory=dict)
    torch: str | None = None
    cuda: str | None = None
    triton: str | None = None

    @property
    def platform(self) -> str | None:
        """ "cpu" for an environment whose torch is a CPU build; None: a GPU's, or not known."""
        return "cpu" if self.torch is not None and self.torch.endswith("+cpu") else None

    def require_version(self) -> str:
        """The version to take when the user named none. UserError engine-missing when there is none."""
        if self.version is None:
            raise UserError(
                "engine-missing",
                f"{self.engine} is not installed for {self.python}, and no version was named",
                f"name its environment with --venv DIR, or the release: {self.engine}==X",
            )
        return self.version


def read_installed(engine: str, python: str, *, load: bool = True, site: str | None = None) -> Installed:
    """Inspect `engine` as the interpreter `python` would import it. `load` also imports its kernels, in a process of
    their own (some seconds). `site` restricts the search to one folder. UserError: engine-missing (no such
    interpreter, or it gives no answer), bad-option (an engine that is no Python package)."""
    arguments, source = probe_command(engine, site)
    done = _run([python, *arguments], source, PROBE_SECONDS)
    try:
        facts: dict[str, Any] = json.loads(done.stdout)
    except ValueError as broken:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise _not_runnable(python, f"it gave no answer ({last})") from broken
    facts["interpreter"] = python
    if load and (names := kernel_modules(facts["compiled"])):
        facts["load"] = _load(python, names, site)
    return installed_of(facts)


def probe_command(engine: str, site: str | None = None) -> tuple[list[str], str]:
    """Arguments after the interpreter, and the stdin, that make it print its facts; also for another machine."""
    if engine not in PACKAGES:
        raise UserError(
            "bad-option", f"{engine} is not a Python package", f"name its program; packages: {', '.join(PACKAGES)}"
        )
    package = PACKAGES[engine]
    request = {
        "engine": engine,
        "package": package.name,
        "paths": sorted(package.paths),
        "extensions": package.extensions,
        "site": site,
    }
    source = files("draftproof.check").joinpath("probe_install.py").read_text(encoding="utf-8")
    return ["-I", "-", json.dumps(request)], source


def installed_of(facts: Mapping[str, Any]) -> Installed:
    """Facts as the probe prints them, and optionally `interpreter` and `load`, judged."""
    return Installed(
        engine=facts["engine"],
        python=facts.get("interpreter", facts["prefix"]),
        version=version_of(facts),
        commit=commit_of(facts),
        location=None if facts["namespace"] else facts["location"],
        findings=tuple(findings_of(facts)),
        paths=facts["paths"],
        compiled={name: facts.get("load", {}).get(_module(name), "not tried") for name in facts["compiled"]},
        torch=facts["torch"],
        cuda=facts["cuda"],
        triton=facts["triton"],
    )


def kernel_modules(compiled: list[str]) -> list[str]:
    """Import names of the compiled parts that are tried."""
    return [_module(name) for name in compiled if KERNELS.search(name)]


def installed_binary(path: str, engine: str = "llama.cpp") -> Installed:
    """llama.cpp or ik_llama.cpp: `PATH --version` prints its build number and commit on stderr. UserError:
    engine-missing."""
    done = _run([path, "--version"], "", PROBE_SECONDS)
    text = done.stderr + done.stdout
    match = re.search(r"^version:\s*(\d+)(?:\s*\((\w+)\))?", text, re.MULTILINE)
    build, commit = (match[1], match[2]) if match else (None, None)
    return Installed(engine, path, build, commit, path, tuple(_binary_findings(path, done, build)))


def _binary_findings(path: str, done: subprocess.CompletedProcess[str], build: str | None) -> list[Finding]:
    if build is None:
        text = (done.stderr + done.stdout).strip() or f"exit code {done.returncode}"
        fix = "start it by hand with --version; build it again if a library is missing"
        message = f"{path} does not tell its version"
        return [error("install-compiled-fails", message, "version: N (commit)", text[-400:], path, fix)]
    if build == "0":
        message = "the build knows no build number: it was made outside a git checkout"
        return [warning("install-unreleased", message, "a build number", build, path, "build from a git checkout")]
    return []


def _load(python: str, names: list[str], site: str | None) -> dict[str, str]:
    """Import each kernel module in a process of its own: "" or the error; the whole process may crash."""
    try:
        done = _run([python, "-I", "-B", "-c", LOAD, site or "", *names], "", LOAD_SECONDS)
    except UserError as problem:
        return {names[0]: problem.message}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            result: dict[str, str] = json.loads(line[len(MARK) :])
            return result
    last = (done.stderr.strip().splitlines() or [""])[-1]
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {names[0]: f"the process that imports {', '.join(names)} ended with {ended} {last}".rstrip()}


def _module(file: str) -> str:
    folder, _, name = file.rpartition("/")
    return f"{folder.replace('/', '.')}.{name.partition('.')[0]}"


def _run(command: list[str], text: str, seconds: int) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=False, errors="replace"
        )
    except OSError as problem:
        raise _not_runnable(command[0], problem.strerror or str(problem)) from problem
    except subprocess.TimeoutExpired as problem:
        raise _not_runnable(command[0], f"no answer within {seconds} seconds") from problem


def _not_runnable(program: str, why: str) -> UserError:
    fix = "name the engine's environment with --venv DIR, or its release: ENGINE==X"
    return UserError("engine-missing", f"{program} cannot be run: {why}", fix)
