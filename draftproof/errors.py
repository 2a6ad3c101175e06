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
    "mtp-missing": "the checkpoint has no multi-token-prediction head",
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
    "bad-schema": "a JSON schema is none, or demands what a grammar cannot enforce",
    "engine-unknown": "an engine was named that the data on engines does not hold",
    "flag-conflict": "one setting was given two values, or a flag contradicts what the pair needs",
    "launch-refuted": "the check refutes this deployment, so it is not started",
    "bad-texts": "a text or prompt file is not in the expected format",
    "dependency-missing": "an optional dependency is not installed",
    "device-unavailable": "the requested device is not on this machine",
    "host-unreachable": "ssh could not connect to the machine, or lost it",
    "host-unfit": "the machine cannot run a launch: no Linux, no python3, or no ssh here",
    "remote-folder": "a file or folder on the machine that runs the engine is missing or not accessible",
    "launch-failed": "the engine could not be started, ended before it answered, or did not answer in time",
    "launch-unknown": "there is no launch of that name on that machine",
    "launch-exists": "a launch of that name already runs on that machine",
    "port-in-use": "the port the engine shall serve on is taken",
    "gpu-memory": "a GPU has less free memory than the engine needs",
    "engine-missing": "an engine, or the interpreter of its environment, is not on this machine",
    "server-unreachable": "nothing answers at the server's address",
    "not-an-llm-server": "what answers at the address is no server of the OpenAI protocol",
    "auth-needed": "the server wants an API key, or another one",
    "server-unfit": "the server answers, but cannot be examined: no model, not ready, or it refuses a request",
    "code-unknown": "no finding, engine rule or error has the code that was asked about",
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
