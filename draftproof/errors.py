"""The exception tree. A user's mistake, or a file or network that is not as needed, is one `UserError`.

    DraftproofError
      UserError        the caller can mend it: exit code 2, one message, no traceback

Each `UserError` carries a stable code, what happened, and the next step. `CODES` is the closed list of codes;
`docs/errors.md` is generated from it and a test keeps both equal.
"""

from __future__ import annotations

CODES: dict[str, str] = {
    "not-found": "a file or folder that was named does not exist",
    "not-a-model": "a folder holds no config.json, or one that describes no model",
    "bad-json": "a JSON file cannot be parsed, or is not an object",
    "bad-config": "a config value has the wrong type or an impossible value",
    "unknown-key": "a config key is close to a known key but misspelt",
    "mask-id-missing": "the drafter's config names no mask token id",
    "taps-missing": "the drafter's config names no target layer ids",
    "block-size-missing": "the drafter's config names no block size",
    "rope-missing": "the drafter's config names no rotary base",
    "family-not-runnable": "the checkpoint is of a known family that this engine cannot run",
    "dialect-unknown": "the config is of no known drafter packaging",
    "pair-mismatch": "drafter and target do not fit each other",
    "target-unsupported": "the target has a layer kind or attention feature this engine does not implement",
    "target-mismatch": "our attention path and the model's own disagree on this target",
    "weights-missing": "no safetensors weights where the command needs them",
    "weights-truncated": "a safetensors file is shorter than its header says, or has no valid header",
    "weights-invalid": "a tensor is missing, superfluous, misshapen or holds NaN or infinity",
    "weights-unsafe": "a checkpoint asks for code execution or points outside its folder",
    "hub-unreachable": "a file is not on this machine and the network did not give it",
    "fetch-failed": "a download broke off",
    "checksum-mismatch": "a downloaded file is not the file that was asked for",
    "disk-full": "a file could not be written",
    "prompt-empty": "the prompt holds no tokens",
    "prompt-too-long": "prompt and requested tokens do not fit the context",
    "bad-option": "an option has an impossible value, or contradicts another",
    "bad-texts": "a text or prompt file is not in the expected format",
    "dependency-missing": "an optional dependency is not installed",
    "device-unavailable": "the requested device is not on this machine",
}


class DraftproofError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(DraftproofError):
    """Something the caller can mend: `code` (a key of CODES), `message` (what happened), `fix` (the next step)."""

    def __init__(self, code: str, message: str, fix: str) -> None:
        if code not in CODES:
            raise AssertionError(f"error code {code!r} is not listed in draftproof.errors.CODES")
        super().__init__(message)
        self.code = code
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}\n  next step: {self.fix}"
