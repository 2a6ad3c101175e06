"""A name becomes a folder on disk: an embedded model, a local folder, or a hub id.

Everything but the embedded models is used where it lies. Nothing is ever executed: `auto_map` is ignored, as
`trust_remote_code` is never passed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from draftproof.errors import UserError
from draftproof.models.embedded import (
    EMBEDDED_DRAFTER,
    EMBEDDED_TARGET,
    TOY_DRAFTER,
    TOY_TARGET,
    embedded_target,
    engine_installed,
    shipped,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CONFIG_FILES = ["*.json", "*.jinja"]
HUB_FILES = [*CONFIG_FILES, "*.safetensors", "*.model", "*.txt"]


TARGETS = (EMBEDDED_TARGET, TOY_TARGET)
DRAFTERS = (EMBEDDED_DRAFTER, TOY_DRAFTER)


def resolve_target(name: str) -> Path:
    """The folder of a target: an embedded name of TARGETS, a local folder, or `org/name` on the hub."""
    return _embedded(name) if name in TARGETS else _folder_or_hub(name)


def resolve_drafter(name: str) -> Path:
    """The folder of a drafter: an embedded name of DRAFTERS, a local folder, or `org/name` on the hub."""
    return _embedded(name) if name in DRAFTERS else _folder_or_hub(name)


def resolve_config(name: str) -> Path:
    """A folder with the configs of a target or drafter; of a hub id no weights are fetched. A config.json may be
    named itself."""
    if name in (*TARGETS, *DRAFTERS):
        return _embedded(name)
    if (path := _existing(name)) is not None and path.is_file():
        return path
    return _folder_or_hub(name, CONFIG_FILES)


def _embedded(name: str) -> Path:
    return embedded_target() if name == EMBEDDED_TARGET else shipped(name)


def _folder_or_hub(name: str, files: Sequence[str] = tuple(HUB_FILES)) -> Path:
    if (path := _existing(name)) is not None:
        return _model_folder(path)
    if HUB_ID.fullmatch(name):
        return _model_folder(_snapshot(name, files))
    raise UserError(
        "not-found",
        f"there is no folder {name!r}",
        f"give a folder with a config.json, a hub id (org/name), or one of {', '.join((*TARGETS, *DRAFTERS))}",
    )


def _existing(name: str) -> Path | None:
    """The path of that name if it is there; a name that the system refuses (too long, ~nobody) is not."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):
        return None


def _model_folder(path: Path) -> Path:
    if not path.is_dir():
        raise UserError("not-a-model", f"{path} is a file, not a folder", "name the folder that holds it")
    if not (path / "config.json").is_file():
        raise UserError("not-a-model", f"{path} holds no config.json", "name the folder of a Hugging Face checkpoint")
    return path


def _snapshot(repo: str, files: Sequence[str]) -> Path:
    """The hub's own cache; files that could carry code are not even downloaded."""
    with engine_installed():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    try:
        return Path(snapshot_download(repo, allow_patterns=list(files)))
    except HFValidationError as error:
        raise UserError(
            "not-found",
            f"there is no folder {repo} here, and the hub allows no such name: {error}",
            "check the spelling",
        ) from error
    except GatedRepoError as error:
        raise UserError(
            "hub-unreachable",
            f"{repo} is gated on the hub",
            f"accept its terms at https://huggingface.co/{repo} and set HF_TOKEN",
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            "not-found",
            f"there is neither a folder {repo} here nor such a repository on the hub (or it is private)",
            "check the spelling; for a private repository set HF_TOKEN",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise _hub_unreachable(repo, error) from error
    except OSError as error:
        raise UserError(
            "disk-full",
            f"{repo} could not be stored: {error}",
            "free some space, or set HF_HOME to a folder with room",
        ) from error


def _hub_unreachable(repo: str, error: Exception) -> UserError:
    why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else str(error).splitlines()[0]
    return UserError(
        "hub-unreachable",
        f"there is no folder {repo} here, it is not in the hub's cache, and the hub did not give it: {why}",
        "connect to the network (unset HF_HUB_OFFLINE), or name a local folder",
    )
