"""`continued`: a request that goes on after what another engine has delivered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.errors import RequestError
from quire.request import Request, TokenEvent


def continued(request: Request, delivered: Sequence[TokenEvent], vocab_size: int) -> Request:
    """Return a request that goes on behind the events that another engine has delivered.

    Raises:
        RequestError: an event cannot be one of this request.
    """
    num_samples, limit = request.sampling.num_samples, request.sampling.max_tokens
    outputs: list[list[int]] = [[] for _ in range(num_samples)]
    finished: set[int] = set()
    for event in delivered:
        index, ids = event.sample_index, event.token_ids
        if not 0 <= index < num_samples or index in finished:
            raise _not_its_own(f"choice {index} does not exist, or has ended before")
        if not all(0 <= token_id < vocab_size for token_id in ids):
            raise _not_its_own(f"choice {index} has a token id outside of the vocabulary")
        if event.stop_token_id is not None and event.token_ids[-1:] != (event.stop_token_id,):
            raise _not_its_own(f"choice {index} does not end with its stop token")
        outputs[index].extend(ids)
        if limit is not None and len(outputs[index]) > limit:
            raise _not_its_own(f"choice {index} has more than max_tokens = {limit} tokens")
        if event.finish_reason is not None:
            finished.add(index)
    return replace(
        request, output_token_ids=tuple(map(tuple, outputs)), finished_samples=tuple(sorted(finished))
    )


def _not_its_own(why: str) -> RequestError:
    return RequestError(f"delivered is not the output of this request: {why}.", param="delivered")
