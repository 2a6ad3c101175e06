"""What `bench --shape` refuses and prints."""

from __future__ import annotations

from draftproof.bench.shape import CONTEXTS, run_shape
from draftproof.errors import UserError


def bench_shape(
    name: str, contexts: list[int] | None, taus: list[float] | None, device: str, dtype: str, as_json: bool
) -> None:
    from draftproof.bench.shape_report import print_shape
    from draftproof.engine.output import print_json

    if any(tau < 1 for tau in taus or ()):
        raise UserError("bad-option", "--assume-tau is below 1", "a round emits at least one token")
    result = run_shape(name, contexts=tuple(contexts or CONTEXTS), taus=tuple(taus or ()), device=device, dtype=dtype)
    print_json(result) if as_json else print_shape(result)
