"""The gateway's file: what it means, and one clear error for everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire_gateway.config_file import gateway_config, read_config


def test_a_file_becomes_frozen_data(tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(
        """
        port = 0
        api_keys = ["a", "b"]
        [timeouts]
        total_s = 9
        [timeouts.paths."/v1/embeddings"]
        total_s = 2.5
        [[backends]]
        url = "http://one:8000/"
        [[backends]]
        dns = "many.local:8000"
        models = ["m"]
        [[models]]
        name = "chat"
        aliases = ["gpt"]
        split = { v1 = 9, v2 = 1 }
        fallbacks = ["small"]
        fallback_when = "saturated"
        """
    )
    config = read_config(path)
    assert config.server.api_keys == ("a", "b")
    assert config.backends[0].url == "http://one:8000"
    assert config.timeouts_of("/v1/embeddings").total_s == 2.5
    assert config.timeouts_of("/v1/completions").total_s == 9
    assert config.models["gpt"] is config.models["chat"]
    assert config.models["chat"].split == {"v1": 9.0, "v2": 1.0}
    assert config.models["chat"].when == {"failure", "saturated"}


BACKEND = {"url": "http://a:1"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prot": 1}, r"unknown key 'prot' \(did you mean 'port'\?\)"),
        ({"port": 70000}, "port = 70000 must be at most 65535"),
        ({"port": "1"}, "port = '1' must be of type int"),
        ({"routing": 3}, "routing = 3 must be a table"),
        ({"routing": {"policy": "prefix"}}, r"\[routing\]: policy = 'prefix' must be one of random"),
        ({"routing": {"max_load_ratio": 0.5}}, "must be at least 1"),
        ({"timeouts": {"connect": 1}}, r"\[timeouts\]: unknown setting 'connect'.*connect_s"),
        ({"timeouts": {"paths": {"v1": {}}}}, "a path begins with '/'"),
        ({"timeouts": {"paths": {"/v1/score": {"total_s": 0}}}}, "/v1/score.*total_s = 0.0 must be at least"),
        ({"timeouts": {"paths": 1}}, "timeouts.paths = 1 must be tables"),
        ({"backends": {}}, r"must be tables \(\[\[backends\]\]\)"),
        ({"backends": [{}]}, r"backends\[0\]: nothing given; give one of url, dns and file"),
        ({"backends": [{**BACKEND, "dns": "a:1"}]}, "url and dns given"),
        ({"backends": [{"url": "a:1"}]}, "url = 'a:1' must be http://host:port"),
        ({"backends": [{"url": "http://a:99999"}]}, "must be http://host:port"),
        ({"backends": [{"url": "http://a b"}]}, "must be http://host:port"),
        ({"backends": [{"url": "http://u:p@a"}]}, "must be http://host:port"),
        ({"backends": [{"dns": "a:b"}]}, "dns = 'a:b' must be host:port"),
        ({"backends": [{"dns": "name.without.port"}]}, "must be host:port"),
        (
            {"backends": [{**BACKEND, "name": "x"}, {**BACKEND, "name": "x"}]},
            "two backends have the name 'x'",
        ),
        ({"models": [{}]}, "name is required"),
        ({"models": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]}, "'a' belongs to 'a' already"),
        ({"models": [{"name": "a", "split": {}}]}, "split = {} must be a table of weights"),
        ({"models": [{"name": "a", "split": {"b": 0}}]}, "not all of them 0"),
        ({"models": [{"name": "a", "split": {"b": "1"}}]}, "must be a table of weights"),
        ({"models": [{"name": "a", "aliases": ["b"], "fallbacks": ["b"]}]}, "has itself .'b'. as a fallback"),
        (
            {"models": [{"name": "a", "fallback_when": "never"}]},
            "must be a list of failure, saturated, 429, 5xx",
        ),
        ({"models": [{"name": "a", "fallback_when": []}]}, "fallback_when = .. must be a list"),
        ({"models": [{"name": "a", "fallback_when": ["5xx", "context"]}]}, "'context' is none"),
        ({"models": [{"name": "a", "fallback_when": [429]}]}, "429 is none"),
        ({"api_keys": [""]}, "a key is the empty text"),
    ],
)
def test_a_wrong_file_is_one_clear_error(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gateway_config(data)


@pytest.mark.parametrize(("text", "message"), [("port =", "not valid TOML"), (None, "cannot be read")])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "gateway.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"gateway.toml: {message}"):
        read_config(path)
