"""`Disaggregation`: the stage of prompts that one engine computes and another answers. It is on with ``--kv-share``.

    {"kv_transfer_params": {"do_remote_decode": true}}     the prompt's blocks are computed for peers, and nothing is
                                                           sampled; the answer carries the params of the second call
    {"kv_transfer_params": {"do_remote_prefill": true, …}} what the peer `remote_engine_id` has computed of the prompt
                                                           is taken from it, and the rest is computed

The names are vLLM's. The second call says which of the peers that settings name has the blocks: ``remote_host`` and
``remote_port`` are told and never read. Blocks go by the hashes of the prompt's own tokens, so a call that names the
wrong peer, or blocks that are not there, costs a computation and changes no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.types import Message, Scope, Send

from quire.api.endpoint import CallStage, Client, GenerateEndpoint
from quire.api.generation import Generation
from quire.config import CacheConfig
from quire.errors import RequestError
from quire.http.call import call_of, put_call
from quire.http.wire import Boolean, Integer, Text, Wire, not_allowed, parse
from quire.request import KvTerms

FIELD = "kv_transfer_params"
PATHS = ("/v1/completions", "/v1/chat/completions")
# What a call that samples nothing has no use for.
_OF_SAMPLES = (
    "max_completion_tokens", "min_tokens", "n", "best_of", "use_beam_search", "logprobs", "top_logprobs",
    "prompt_logprobs", "echo", "stream_options",
)  # fmt: skip


class KvTransferParams(Wire):
    """``kv_transfer_params``."""

    do_remote_decode: Boolean = False
    do_remote_prefill: Boolean = False
    remote_engine_id: Text | None = None
    remote_block_ids: Annotated[list[int] | None, Field(description="a list of numbers of blocks")] = None
    remote_host: Text | None = None
    remote_port: Integer | None = None
    max_load_tokens: Integer | None = None


class Disaggregation(CallStage):
    """The stage of one app."""

    def __init__(self, cache: CacheConfig) -> None:
        """``cache``: of an engine that shares its blocks."""
        host, _, port = cache.tiers[0][0].rpartition(":")
        self._source = {"remote_host": host.strip("[]"), "remote_port": int(port)}
        self._engine_id, self._block_size = cache.engine_id, cache.block_size

    async def run(self, endpoint: GenerateEndpoint, body: Any, client: Client) -> bool:
        """Read the params, and leave the rest of the request as it is.

        Raises:
            RequestError: names the field that is wrong.
        """
        if endpoint.path not in PATHS or not isinstance(body, dict) or not body.get(FIELD):
            return False
        params = read_params(body.pop(FIELD))
        if params.do_remote_decode:
            for name in _OF_SAMPLES:
                body.pop(name, None)
            body.update(max_tokens=1, stream=False)
        if client.pieces:
            client.pieces = [msgspec.json.encode(body)]
        num_tokens = len(params.remote_block_ids or ()) * self._block_size
        kv = KvTerms(
            params.do_remote_decode, params.remote_engine_id or "", num_tokens, params.max_load_tokens
        )
        put_call(client.scope, replace(call_of(client.scope), kv=kv))
        return False

    def telling(self, send: Send, scope: Scope, body: Any, generation: Generation) -> Send:
        """Return a `send` that adds the params of the second call to the answer of the first.

        Raises:
            RequestError: the first call has several prompts.
        """
        kv = generation.call.kv
        if kv is None or not kv.gives:
            return send
        if len(generation.job.prompts) != 1:
            raise RequestError("kv_transfer_params.do_remote_decode is for one prompt.", param=FIELD)

        def params() -> dict[str, Any]:
            num_blocks = generation.usage.prompt_tokens // self._block_size
            return {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self._engine_id,
                "remote_block_ids": list(range(num_blocks)),
                **self._source,
            }

        return Told(send, params)


class Told:
    """The `send` of an answer with the params of the second call."""

    def __init__(self, send: Send, params: Callable[[], dict[str, Any]]) -> None:
        """``params``: called once the answer is there."""
        self._send, self._params = send, params
        self._start: Message = {}

    async def __call__(self, message: Message) -> None:
        """Send a message; the head waits for the body, whose length it says."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        body = message["body"]
        if self._start["status"] == 200 and body.endswith(b"}"):
            body = b'%b,"%b":%b}' % (body[:-1], FIELD.encode(), msgspec.json.encode(self._params()))
        headers = [
            (name, str(len(body)).encode() if name == b"content-length" else value)
            for name, value in self._start["headers"]
        ]
        await self._send({**self._start, "headers": headers})
        await self._send({**message, "body": body})


def read_params(value: Any) -> KvTransferParams:
    """Check ``kv_transfer_params``.

    Raises:
        RequestError: names the field that is wrong.
    """
    if not isinstance(value, dict):
        raise not_allowed(FIELD, value, "an object", "invalid_type")
    params = parse(KvTransferParams, value, prefix=f"{FIELD}.")
    if params.do_remote_decode and params.do_remote_prefill:
        raise RequestError(
            f"{FIELD}: do_remote_decode and do_remote_prefill are the two calls of one prompt: send one of them.",
            param=FIELD,
        )
    if params.max_load_tokens is not None and params.max_load_tokens < 0:
        raise not_allowed(f"{FIELD}.max_load_tokens", params.max_load_tokens, "an integer ≥ 0")
    return params
