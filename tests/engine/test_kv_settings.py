"""Settings of a tier that are refused, by name."""

from __future__ import annotations

import pytest
from tests.engine.toy import engine_config

from quire.args import EngineArgs
from quire.engine.kv_root import with_tier
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "param", "text"),
    [
        ({"kv_disk": "/var/cache"}, "kv_disk", "must be DIR:SIZE"),
        (
            {"kv_disk": "/var/cache:1GiB", "kv_remote": "http://h:1"},
            "kv_remote",
            "must be redis://HOST:PORT/DB",
        ),
        ({"kv_remote": "http://h:1"}, "kv_remote", "must be redis://HOST:PORT/DB"),
        ({"kv_remote": ""}, "kv_remote", "must be redis://HOST:PORT/DB"),
        ({"kv_share": "127.0.0.1:4GiB"}, "kv_share", "must be HOST:PORT:SIZE"),
        ({"kv_share": "127.0.0.1:4GiB", "kv_disk": "/a:1GiB"}, "kv_share", "must be HOST:PORT:SIZE"),
        ({"kv_peers": "127.0.0.1:1"}, "kv_peers", "needs kv_share"),
        ({"kv_remote": "redis://:secret@h:1/0"}, "kv_remote", "QUIRE_KV_REMOTE_PASSWORD"),
    ],
)
def test_a_setting_that_is_refused(settings: dict[str, str], param: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        with_tier(engine_config(), EngineArgs("toy", **settings), ())
    assert caught.value.param == param
    assert "secret" not in str(caught.value)


def test_a_server_is_part_of_the_configuration_and_not_of_the_root() -> None:
    config = engine_config()
    one, other = (with_tier(config, EngineArgs("toy", kv_remote=f"redis://{name}:1/0"), ()) for name in "ab")
    assert one.cache.tiers == (("redis://a:1/0", 0),)
    assert one.cache.model_key == other.cache.model_key != config.cache.model_key


def test_peers_are_part_of_the_configuration_and_not_of_the_root() -> None:
    config = engine_config()
    args = EngineArgs("toy", kv_share="[::1]:9500:1GiB", kv_peers="a:1, b:2")
    one, other = (with_tier(config, args, ()) for _ in range(2))
    assert one.cache.tiers == (("[::1]:9500", 1 << 30),)
    assert one.cache.peers == ("a:1", "b:2")
    assert one.cache.engine_id != other.cache.engine_id
    assert one.cache.model_key == other.cache.model_key


def test_an_engine_may_have_all_tiers() -> None:
    args = EngineArgs("toy", kv_disk="/a:1GiB", kv_remote="redis://h:1/0", kv_share="h:9500:2GiB")
    cache = with_tier(engine_config(), args, ()).cache
    assert cache.tiers == (("h:9500", 2 << 30), ("/a", 1 << 30), ("redis://h:1/0", 0))
