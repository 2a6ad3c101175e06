"""Judging the facts of one installation (`probe_install.py` prints them): no process, no file is touched here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from draftproof.config.finding import Finding, error, note, warning

Facts = Mapping[str, Any]
REINSTALL: Final = "make a new environment and install the engine there; installing over this one keeps stale files"


@dataclass(frozen=True)
class Package:
    """An engine that is a Python package. `paths` are files a drafter needs, each with the first release in which it
    is known to be there; an older release without it is not faulty."""

    name: str
    paths: Mapping[str, str]
    extensions: tuple[str, ...] = ()


PACKAGES: Final[Mapping[str, Package]] = {
    "vllm": Package(
        "vllm",
        {
            "config/speculative.py": "0.20",
            "model_executor/models/registry.py": "0.20",
            "model_executor/models/qwen3_dflash.py": "0.20",
            "v1/spec_decode/dflash.py": "0.20",
            "v1/worker/gpu/spec_decode/dflash/speculator.py": "0.24",
            "model_executor/models/qwen3_dflash2.py": "0.28",
            "v1/worker/gpu/spec_decode/dflash2/speculator.py": "0.28",
            "v1/worker/gpu/spec_decode/mtp/speculator.py": "0.32",
            "model_executor/models/qwen3_5_mtp.py": "0.32",
        },
    ),
    "sglang": Package(
        "sglang",
        {"srt/models/dflash.py": "0.5.23", "srt/speculative/dflash_*.py": "0.5.23"},
        ("sgl_kernel",),
    ),
}


def findings_of(facts: Facts) -> list[Finding]:
    """Every disagreement in the facts; none for a healthy release."""
    if not facts["distributions"] and not _has_modules(facts):
        return [*_absent(facts), *_leftovers(facts)]
    twice = _two_versions(facts)
    found = [*twice, *_leftovers(facts), *_metadata_only(facts), *_files(facts)]
    found += [] if twice else _version(facts)
    return [*found, *_compiled(facts), *_paths(facts), *_unreleased(facts)]


def version_of(facts: Facts) -> str | None:
    """The owner's metadata version, else what the modules say, else that of metadata alone."""
    owner = _owner(facts)
    stated = [one["version"] for one in facts["distributions"]]
    return (owner["version"] if owner else facts["module_version"]) or next(iter(stated), None)


def commit_of(facts: Facts) -> str | None:
    local = re.search(r"\+(?:.*\.)?g([0-9a-f]{6,40})\b", version_of(facts) or "")
    built = [one["commit"] for one in facts["distributions"] if one["commit"]]
    return built[0] if built else facts["module_commit"] or (local[1] if local else None)


def _has_modules(facts: Facts) -> bool:
    return facts["location"] is not None and not facts["namespace"]


def _owners(facts: Facts) -> list[Facts]:
    """Distributions with modules: by their RECORD, or by being installed from an editable folder."""
    return [one for one in facts["distributions"] if one["files"] or one["editable"]]


def _owner(facts: Facts) -> Facts | None:
    return next(iter(_owners(facts)), None)


def _companions(facts: Facts) -> list[Facts]:
    """Whole metadata without modules beside a distribution that has them."""
    bare = [one for one in facts["distributions"] if not one["files"] and not one["editable"] and one["record"]]
    return bare if _owners(facts) else []


def _absent(facts: Facts) -> list[Finding]:
    where, engine = facts["prefix"], facts["engine"]
    message = f"{engine} is not installed in this environment"
    fix = f"name the interpreter of the environment in which {engine} runs"
    return [error("engine-not-installed", message, engine, "nothing", where, fix)]


def _two_versions(facts: Facts) -> list[Finding]:
    names = [one["name"].lower().replace("_", "-") for one in facts["distributions"]]
    double = [one for one, name in zip(facts["distributions"], names, strict=True) if names.count(name) > 1]
    owners = _owners(facts)
    twice = double or (owners if len(owners) > 1 else [])
    if not twice:
        return []
    seen = ", ".join(f"{one['name']} {one['version']}" for one in twice)
    message = f"two distributions claim the modules of {facts['package']}: which files are whose cannot be told"
    where = "; ".join(one["folder"] for one in twice)
    return [error("install-two-versions", message, "one", seen, where, REINSTALL)]


def _leftovers(facts: Facts) -> list[Finding]:
    code, fix, found = "install-leftovers", REINSTALL, []
    if facts["leftovers"]:
        message = "an install or uninstall by pip broke off here: these are the files it had set aside"
        found.append(warning(code, message, "none", f"{len(facts['leftovers'])}", ", ".join(facts["leftovers"]), fix))
    for one in facts["distributions"]:
        lacking = [name for name in ("METADATA", "RECORD") if not one[name.lower()]]
        if lacking:
            message = f"the metadata of {one['name']} is incomplete, so its files cannot be checked"
            found.append(warning(code, message, "METADATA, RECORD", f"no {', '.join(lacking)}", one["folder"], fix))
    if _has_modules(facts) and not _owners(facts) and all(one["record"] for one in facts["distributions"]):
        message = f"modules of {facts['package']} here have no metadata: a broken uninstall, or copied files"
        found.append(warning(code, message, "a .dist-info folder", "none", facts["location"], fix))
    return found


def _metadata_only(facts: Facts) -> list[Finding]:
    code = "install-metadata-only"
    if not _has_modules(facts):
        stated = ", ".join(f"{one['name']} {one['version']}" for one in facts["distributions"])
        message = f"metadata says that {facts['engine']} is installed, but its modules are not there"
        return [error(code, message, f"{facts['package']}/__init__.py", stated, facts["prefix"], REINSTALL)]
    found = []
    for one in _companions(facts):
        message = f"{one['name']} is metadata without modules; they are another distribution's, which is legitimate"
        found.append(note(code, message, "", f"{one['name']} {one['version']}", one["folder"]))
    return found


def _files(facts: Facts) -> list[Finding]:
    code, where = "install-files-changed", facts["location"] or facts["prefix"]
    missing, changed, unlisted = (facts[name] for name in ("missing", "changed", "unlisted"))
    found = []
    if missing["count"] and _has_modules(facts):
        message = f"{missing['count']} installed files are gone"
        found.append(error(code, message, "every file of RECORD", _some(missing), where, REINSTALL))
    if changed["count"]:
        message = f"{changed['count']} files are not those that were installed: patched, or of another version"
        fix = "install again if nobody patched them; what is known of the release may not hold for a patched one"
        found.append(warning(code, message, "as in RECORD", _some(changed), where, fix))
    if unlisted["count"]:
        message = f"{unlisted['count']} .py files belong to no installed version: left by another one, or added by hand"
        found.append(warning(code, message, "none", _some(unlisted), where, REINSTALL))
    return found


def _version(facts: Facts) -> list[Finding]:
    code, found, owner = "install-version-disagrees", [], _owner(facts)
    own, stated = facts["module_version"], owner["version"] if owner else None
    if own and stated and _public(own) != _public(stated):
        message = "the modules say another version than the metadata"
        found.append(error(code, message, stated, own, facts["location"], REINSTALL))
    for one in _companions(facts):
        if owner and _public(one["version"]) != _public(owner["version"]):
            message = f"{one['name']} is metadata without modules and states another version than {owner['name']}"
            fix = f"install the {one['name']} metadata that belongs to {owner['name']} {owner['version']}"
            found.append(warning(code, message, owner["version"], one["version"], one["folder"], fix))
    return found


def _compiled(facts: Facts) -> list[Finding]:
    fix = "install the build made for this torch and CUDA; a missing libcuda.so.1 means a machine without NVIDIA driver"
    return [
        error("install-compiled-fails", f"{name} cannot be imported", "imports", text, facts["location"] or "", fix)
        for name, text in facts.get("load", {}).items()
        if text
    ]


def _paths(facts: Facts) -> list[Finding]:
    version, since = _parsed(version_of(facts)), PACKAGES[facts["engine"]].paths
    if version is None or not _has_modules(facts):
        return []
    gone = [path for path, there in facts["paths"].items() if not there and version >= Version(since[path])]
    message = f"release {version} has these files, and this installation lacks them; a drafter needs them"
    return [error("install-path-missing", message, "there", ", ".join(gone), facts["location"], REINSTALL)] * bool(gone)


def _unreleased(facts: Facts) -> list[Finding]:
    version, commit, owner = _parsed(version_of(facts)), commit_of(facts), _owner(facts)
    marks = ["an editable install"] if owner and owner["editable"] else []
    marks += [f"a build of commit {commit}"] if commit else []
    marks += [f"the pre-release {version}"] if version and version.is_prerelease else []
    if not marks:
        return []
    message = "this is no release: rules that go by release number may not hold"
    fix = "install a release, or check the points of the chain in a run"
    where = owner["folder"] if owner else facts["location"]
    return [warning("install-unreleased", message, "a release", ", ".join(marks), where, fix)]


def _some(listed: Mapping[str, Any]) -> str:
    first = list(listed["first"][:5])
    return ", ".join(first + ([f"and {listed['count'] - len(first)} more"] if listed["count"] > len(first) else []))


def _parsed(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def _public(text: str) -> str:
    version = _parsed(text)
    return version.public if version else text
