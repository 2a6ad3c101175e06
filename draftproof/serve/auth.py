"""API keys: `Authorization: Bearer KEY`, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

from starlette.requests import Request

from draftproof.serve.errors import ApiError


def authorised(keys: Sequence[str]) -> Callable[[Request], None]:
    """A dependency that refuses with 401 whoever has none of the keys; without keys everybody may ask."""
    wanted = [key.encode() for key in keys]

    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in wanted]  # all of them, always
        if wanted and not (scheme.lower() == "bearer" and any(known)):
            message = "this server wants an API key: Authorization: Bearer KEY" if not given else "the API key is wrong"
            raise ApiError(401, message, code="invalid_api_key")

    return check
