"""`BrowserGuard`: keeps web pages of other sites out, whatever method, path or form of body they try.

A browser sends requests for any page that it shows. It names the page's origin in ``Origin`` (or at least says
``Sec-Fetch-Site: cross-site``), and it names the server in ``Host`` as the page did. A page whose own name resolves to
this machine (DNS rebinding) has an origin that equals the host, so its name is what gives it away.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.errors import ConfigError, clip
from quire.http.body import header, send_json
from quire.http.front import PATHS
from quire.http.listen import is_loopback
from quire.http.refusals import Refusal

# Pages that this machine serves, and programs whose windows are web pages: no web site has such an origin. A browser's
# extensions read other sites, so they are to be named.
LOCAL_ORIGINS = (
    r"https?://(([a-z0-9-]+\.)*localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(:\d+)?"
    r"|(app|file|tauri|vscode-file|vscode-webview)://[^/\s]*"
)
# Under these names containers reach a server of the machine that they run on. No name of the internet ends so.
_OF_CONTAINERS = ("host.docker.internal", "host.containers.internal")
_ANY = "*"
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_PROBES = frozenset(
    path.decode() for path in PATHS
)  # the process in front answers them without a look at headers
_EXPOSED = ["x-request-id", "x-quire-ignored-fields", "x-quire-predicted-ttft-ms", "retry-after"]


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """Which origins may call and under which names. ``hosts`` None: under any."""

    origins: tuple[str, ...] = ()  # empty: those of this machine; "*": every one
    hosts: tuple[str, ...] | None = None

    @property
    def origin_pattern(self) -> str:
        """A regular expression of the allowed origins, apart from the server's own."""
        if not self.origins:
            return LOCAL_ORIGINS
        return "|".join(re.escape(origin).replace(r"\*", "[^/]*") for origin in self.origins)

    def allows_origin(self, origin: str) -> bool:
        return _ANY in self.origins or re.fullmatch(self.origin_pattern, origin) is not None

    def allows_host(self, host: str) -> bool:
        """Whether a ``Host`` header may name this server; an empty one, as old clients send, may."""
        if self.hosts is None:
            return True
        name = _without_port(host).lower()
        if _is_address(name) or "." not in name or name in ("localhost.", *_OF_CONTAINERS):
            return True
        return name.removesuffix(".").endswith(".localhost") or any(
            name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed
            for allowed in self.hosts
        )


def allowed_hosts(
    address: str, allowed: Sequence[str], param: str = "--allowed-hosts"
) -> tuple[str, ...] | None:
    """Return `BrowserRules.hosts` of a server that listens on ``address``; ``allowed`` is the setting.

    Other machines use names of their own, so a server that they reach checks names only where it is told them.

    Raises:
        ConfigError: one of ``allowed`` is no name.
    """
    names = tuple(name.lower() for name in allowed)
    for name in names:
        if name != _ANY and _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{param} {name!r} must be a name without scheme and port, such as api.example.com, "
                "*.example.com, or * for every name.",
                param="allowed_hosts",
            )
    if _ANY in names or not (names or is_loopback(address)):
        return None
    return names


def open_note(address: str, allowed: Sequence[str], *, has_keys: bool, option: str) -> str | None:
    """Return the line that a start says where other machines reach a server that asks for no key."""
    if has_keys or allowed or is_loopback(address):
        return None
    return (
        f"open     to every machine that reaches {address}, under any name and without a key "
        f"(keys: {option}; names: --allowed-hosts)"
    )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class BrowserGuard:
    """ASGI middleware, the outermost one: answers 403 to foreign pages, and to names that are not this server's."""

    def __init__(self, app: ASGIApp, rules: BrowserRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._host_problem(scope) or self._origin_problem(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send_json(send, refusal.status, refusal.body(scope["path"]))
        else:
            await receive()  # websocket.connect
            await send({"type": "websocket.http.response.start", "status": refusal.status, "headers": []})
            await send({"type": "websocket.http.response.body", "body": refusal.body(scope["path"])})

    def _host_problem(self, scope: Scope) -> Refusal | None:
        return None if scope["path"] in _PROBES else host_problem(scope, self._rules)

    def _origin_problem(self, scope: Scope) -> Refusal | None:
        """Return why the page that sends the request may not; None if no page does, or an allowed one."""
        origin = _text(scope, b"origin")
        if origin is None:
            if (
                _text(scope, b"sec-fetch-site") != "cross-site"
                or _ANY in self._rules.origins
                or _is_visit(scope)
            ):
                return None
            shown, option = "Pages of other sites", "--cors-origins (or cors_origins) names those that may."
        elif _is_own(scope, origin) or self._rules.allows_origin(origin):
            return None
        else:
            shown = f"Pages of {clip(origin)!r}"
            option = "--cors-origins (or cors_origins of a gateway) names origins that may."
        return Refusal(403, f"{shown} may not call this server: {option}", code="origin_not_allowed")


def host_problem(scope: Scope, rules: BrowserRules) -> Refusal | None:
    """Return why a request may not use the name that its ``Host`` has, or None."""
    foreign = [
        host
        for name, value in scope["headers"]
        if name == b"host" and not rules.allows_host(host := value.decode("latin-1"))
    ]
    if not foreign:
        return None
    name = clip(_without_port(foreign[0]))
    text = (
        f"The name {name!r} in Host is none of this server's, and a page of the web could have it: use an address or "
        "localhost, or start the server with --allowed-hosts (allowed_hosts of a gateway) that has the name."
    )
    return Refusal(403, text, code="host_not_allowed")


def _is_own(scope: Scope, origin: str) -> bool:
    """Whether this server has the page. A proxy in front gives the name that it was called by."""
    try:
        place = urlsplit(origin).netloc
    except ValueError:
        return False
    # A page cannot set the second header before a preflight has allowed it, and that one is refused.
    return bool(place) and place in (_text(scope, b"host"), _text(scope, b"x-forwarded-host"))


def _is_visit(scope: Scope) -> bool:
    """Whether a person follows a link to this server: the page with the link gets nothing of the answer."""
    return (
        scope.get("method") in ("GET", "HEAD")
        and _text(scope, b"sec-fetch-mode") == "navigate"
        and _text(scope, b"sec-fetch-dest") == "document"
    )


def _text(scope: Scope, name: bytes) -> str | None:
    value = header(scope, name)
    return None if value is None else value.decode("latin-1")


class NoBrowsers:
    """ASGI middleware that refuses requests made by a web page, whichever it is."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] | None = None) -> None:
        self._app = app
        self._rules = BrowserRules(hosts=hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = host_problem(scope, self._rules)
            if any(header(scope, name) is not None for name in (b"origin", b"sec-fetch-site")):
                text = "The admin surface does not answer web pages: use curl, or a script."
                refusal = Refusal(403, text, code="forbidden")
            if refusal is not None:
                await send_json(send, refusal.status, refusal.body())
                return
        await self._app(scope, receive, send)


def guarded(app: ASGIApp, rules: BrowserRules) -> ASGIApp:
    """Return ``app`` inside of `guards`."""
    for layer in reversed(guards(rules)):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


def guards(rules: BrowserRules) -> list[Middleware]:
    """Return the middleware of a server with an API: the guard, and what lets allowed pages read the answers.

    Outside of keys: a preflight has none, and a refusal needs the headers too.
    """
    return [
        Middleware(BrowserGuard, rules=rules),
        Middleware(
            CORSMiddleware,
            allow_origins=(_ANY,) if _ANY in rules.origins else (),
            allow_origin_regex=rules.origin_pattern,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        ),
    ]
