"""Tools that people point at a server: the lines of ``quire serve --for NAME``, and ``quire launch NAME``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tomllib
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from quire.args import ServerArgs
from quire.errors import ConfigError, nearest

_TIMEOUT_S = 10.0
NO_KEY = "quire"  # for a server without keys: tools ask for one all the same


@dataclass(frozen=True, slots=True)
class Place:
    """What fills the braces of ``clients.toml``."""

    url: str
    model: str
    key: str

    def fill(self, text: str) -> str:
        """Return ``text`` with this server's address, model and key."""
        for name, value in (("url", self.url), ("model", self.model), ("key", self.key)):
            text = text.replace(f"{{{name}}}", value)
        return text


@dataclass(frozen=True, slots=True)
class Tool:
    """A table of ``clients.toml``."""

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # model names, * allowed
    program: str | None = None
    install: str = ""
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    steps: str = ""

    def variables(self, place: Place) -> dict[str, str]:
        """Return the environment that points the tool at a server."""
        return {name: place.fill(value) for name, value in self.environment}

    def command(self, place: Place) -> list[str]:
        """Return the words that start the tool."""
        assert self.program is not None
        return [self.program, *map(place.fill, self.arguments)]

    def lines(self, place: Place) -> str:
        """Return what a person types or sets, for a terminal."""
        if self.program is None:
            shown = place.fill(self.steps.strip("\n")).splitlines()
        else:
            shown = [f"export {name}={shlex.quote(value)}" for name, value in self.variables(place).items()]
            shown.append(shlex.join(self.command(place)))
        return f"{self.title}:\n" + "".join(f"  {line}\n" for line in shown)


@cache
def known_tools() -> Mapping[str, Tool]:
    """Return the tools by name."""
    tables = tomllib.loads((files("quire.cli") / "clients.toml").read_text())
    return {name: _tool(name, table) for name, table in tables.items()}


def _tool(name: str, table: dict[str, Any]) -> Tool:
    lists: dict[str, Any] = {
        key: tuple(table[key]) for key in ("aliases", "names", "arguments") if key in table
    }
    return Tool(name, **table | lists | {"environment": tuple(table.get("environment", {}).items())})


def find_tool(name: str, param: str = "--for") -> Tool:
    """Return the tool of a name or alias.

    Raises:
        ConfigError: it is not known; lists those that are.
    """
    tools = known_tools()
    for tool in tools.values():
        if name in (tool.name, *tool.aliases):
            return tool
    raise ConfigError(f"{param} {name!r} must be one of {', '.join(tools)}{nearest(name, tools)}")


def model_names(clients: Iterable[str]) -> tuple[str, ...]:
    """Return the names of models that ``clients`` send for whatever is served."""
    return tuple(name for client in clients for name in find_tool(client).names)


def guide(args: ServerArgs, url: str, model: str) -> str:
    """Return the lines that point the tools of ``--for`` at ``url``. A key is not printed: logs would keep it."""
    place = Place(url, model, "YOUR_KEY" if args.api_key or args.api_key_file else NO_KEY)
    return "\n".join(find_tool(client).lines(place) for client in args.clients)


def launch(name: str, arguments: Sequence[str], url: str, model: str | None, key: str | None) -> None:
    """Become the tool's program, pointed at the server at ``url``.

    Raises:
        ConfigError: the tool is not known, has no program, or is not installed; or no server answers.
    """
    tool = find_tool(name, "launch")
    url = url.rstrip("/")
    if tool.program is None:
        raise ConfigError(
            f"{tool.title} is set up in its own settings; `quire serve --for {tool.name}` prints them."
        )
    if shutil.which(tool.program) is None:
        raise ConfigError(f"{tool.title} is not installed: no program {tool.program!r}; {tool.install}")
    served = served_models(url, key)
    if model is not None and model not in served:
        raise ConfigError(f"--model {model!r} must be one of {', '.join(served)}{nearest(model, served)}")
    place = Place(url, model or served[0], key or NO_KEY)
    os.execvpe(tool.program, [*tool.command(place), *arguments], os.environ | tool.variables(place))


def served_models(url: str, key: str | None) -> list[str]:
    """Return the names that a server lists.

    Raises:
        ConfigError: no server of this API answers at ``url``.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            names = [model["id"] for model in json.load(answer)["data"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"no server answers at {url} ({error}): start one with `quire serve MODEL`, or give its --url."
        ) from error
    if not names:
        raise ConfigError(f"the server at {url} has no models yet")
    return names
