"""The filters that ship: keywords and regular expressions, and an HTTP service that decides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from quire.args import defaults
from quire.errors import ConfigError
from quire.units import MIB
from quire_gateway.config import GatewayArgs
from quire_gateway.filter_config import FilterArgs, FilterConfig
from quire_gateway.filters import About, Bound, Filters, Refused, load_hook
from quire_gateway.upstream import Upstream, closing, read_reply

# Fields of a request that hold text for the model, and keys within them that do not.
_TEXT_FIELDS = (
    "system", "instructions", "messages", "input", "prompt", "suffix", "query", "documents", "text_1", "text_2",
    "inputs", "texts",
)  # fmt: skip
_NOT_TEXT = ("role", "type", "id", "tool_call_id", "call_id", "image_url", "source", "signature")
MAX_ANSWER_BYTES = defaults(GatewayArgs)["max_answer_mib"] * MIB


class KeywordFilter:
    """Refuses or redacts words and patterns. Words are whole words of any case; patterns are Python's."""

    def __init__(
        self,
        keywords: Sequence[str],
        patterns: Sequence[str],
        action: Literal["refuse", "redact"],
        replacement: str,
    ) -> None:
        words = [rf"(?<!\w)(?i:{re.escape(word)})(?!\w)" for word in keywords]
        self._pattern = re.compile("|".join(f"(?:{pattern})" for pattern in (*words, *patterns)))
        self._redacts = action == "redact"
        self._replacement = replacement

    async def before(self, about: About, body: dict[str, Any]) -> dict[str, Any] | None:
        """Read every text of the prompt. Prompts of token ids cannot be read, and are refused."""
        changed = dict(body)
        for name in _TEXT_FIELDS:
            if name not in body:
                continue
            if _has_ids(body[name]):
                raise Refused("a prompt of token ids cannot be read; send text.")
            if any(self._pattern.search(text) for text in _texts(body[name])):
                if not self._redacts:
                    raise Refused("the request has a text that is not allowed.")
                changed[name] = _mapped(body[name], lambda text: self._pattern.sub(self._replacement, text))
        return changed if changed != body else None

    async def after(self, about: About, text: str) -> str | None:
        """Read a piece of an answer together with what came before it, so that no cut hides a word."""
        start = len(about.preceding)
        joined = about.preceding + text
        spans = [m.span() for m in self._pattern.finditer(joined) if m.end() > start and m.end() > m.start()]
        if not spans:
            return None
        if not self._redacts:
            raise Refused("the answer has a text that is not allowed.")
        parts, at = [], start
        for first, last in spans:
            parts += [joined[at : max(first, at)], self._replacement]
            at = last
        return "".join(parts) + joined[at:]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _NOT_TEXT:
                yield from _texts(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return ``value`` with ``change`` in place of each of `_texts`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {k: v if k in _NOT_TEXT else _mapped(v, change) for k, v in value.items()}
    return value


def _has_ids(prompt: Any) -> bool:
    """Whether a prompt, or one of several, is a list of token ids."""
    if not isinstance(prompt, list):
        return False
    return any(isinstance(item, int) or (isinstance(item, list) and _has_ids(item)) for item in prompt)


class HttpFilter:
    """Asks a service: POST of JSON; the answer is ``{"action": "pass" | "change" | "refuse", …}``."""

    def __init__(self, url: str, upstream: Callable[[], Upstream]) -> None:
        self._url = url
        self._upstream = upstream

    async def before(self, about: About, body: dict[str, Any]) -> Any:
        return await self._verdict({"when": "before", **_to_json(about), "body": body}, "body")

    async def after(self, about: About, text: str) -> Any:
        more = {"choice": about.choice, "kind": about.kind, "preceding": about.preceding, "text": text}
        return await self._verdict({"when": "after", **_to_json(about), **more}, "text")

    async def _verdict(self, question: dict[str, Any], changed: str) -> Any:
        headers = [("content-type", "application/json")]
        response = await self._upstream().open("POST", self._url, headers, msgspec.json.encode(question))
        with closing(response):
            reply = await read_reply(response, MAX_ANSWER_BYTES)
        verdict: Any = msgspec.json.decode(reply.body) if reply.status == 200 else None
        match verdict:
            case {"action": "pass"}:
                return None
            case {"action": "refuse"}:
                raise Refused(str(verdict.get("message") or "not allowed."))
            case {"action": "change"} if changed in verdict:
                return verdict[changed]
        raise ValueError(f"status {reply.status}, and no verdict: {reply.body[:100]!r}")


def _to_json(about: About) -> dict[str, str]:
    return {name: getattr(about, name) for name in ("request_id", "path", "model", "tenant", "key")}


def make_filters(configs: Sequence[FilterConfig], upstream: Callable[[], Upstream]) -> Filters:
    """Return the chain of a configuration. ``upstream``: the client, once it runs.

    Raises:
        ConfigError: a hook cannot be loaded, or a pattern is none.
    """
    return Filters([Bound(config.args, _hook(config, upstream)) for config in configs])


def _hook(config: FilterConfig, upstream: Callable[[], Upstream]) -> Any:
    args: FilterArgs = config.args
    if args.hook is not None:
        return load_hook(args.hook, config.options, f"filter {args.name!r}: hook")
    if args.url is not None:
        return HttpFilter(args.url, upstream)
    try:
        return KeywordFilter(args.keywords, args.patterns, args.action, args.replacement)
    except re.error as error:
        raise ConfigError(f"filter {args.name!r}: {error.pattern!r} is no pattern: {error}") from error
