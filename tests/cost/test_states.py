"""How many states fit: the defaults, what a user asks for, and what such a model does not run with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.args import EngineArgs
from quire.config import DeviceInfo, EngineConfig
from quire.errors import ConfigError
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.recurrent_spec import RecurrentSpec
from quire.resolve import resolve
from quire.rope_spec import RopeSpec

GIB = 2**30
DEVICE = DeviceInfo("cpu", "test", 2, 16 * GIB, 8 * GIB, isa="avx512", native=True)


def spec_of(num_v_heads: int = 16) -> ModelSpec:
    delta = RecurrentSpec("gated_delta", num_v_heads, num_v_heads, 128, 128, 4, 3 * 128 * num_v_heads)
    attention = AttentionSpec(4, 2, 16, 16, 0.25, RopeSpec(10000.0, 16))
    layers = (LayerSpec(None, MlpSpec(128), recurrent=delta), LayerSpec(attention, MlpSpec(128)))
    return ModelSpec("test", "Test", 512, 64, layers, 1e-5, 4096)


def config_of(spec: ModelSpec, device: DeviceInfo = DEVICE, **settings: object) -> EngineConfig:
    return resolve(EngineArgs(**settings), spec, device)  # type: ignore[arg-type]


def test_each_sequence_has_a_state_and_four_checkpoints_where_memory_allows() -> None:
    cache = config_of(spec_of(), max_num_seqs=8).cache
    assert (cache.num_states, cache.num_checkpoints) == (8, 32)
    assert cache.state_bytes == spec_of().state_bytes_per_sequence


def test_the_default_of_sequences_is_what_fits() -> None:
    config = config_of(spec_of(128), replace(DEVICE, memory_available_bytes=2 * GIB))
    count = config.scheduler.max_num_seqs
    assert 1 <= count < 256
    assert config.cache.num_states == count
    assert config.cache.num_checkpoints >= count
    assert any(f"{count} sequences run at once, not 256" in remark for remark in config.model.remarks)


def test_states_that_do_not_fit_name_how_many_do() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs = 4096 .* at most \d+ sequences fit"):
        config_of(spec_of(128), max_num_seqs=4096)
    with pytest.raises(ConfigError, match=r"which hold \d+ in all: lower state_checkpoints"):
        config_of(spec_of(128), max_num_seqs=8, state_checkpoints=10**6)


def test_checkpoints_are_as_many_as_asked_for_or_none() -> None:
    assert config_of(spec_of(), max_num_seqs=4, state_checkpoints=9).cache.num_checkpoints == 9
    assert config_of(spec_of(), max_num_seqs=4, state_checkpoints="off").cache.num_checkpoints == 0
    assert config_of(spec_of(), max_num_seqs=4, enable_prefix_caching=False).cache.num_checkpoints == 0
    for wrong in (3, "many"):
        with pytest.raises(ConfigError, match=r"state_checkpoints = .* at least max_num_seqs = 4"):
            config_of(spec_of(), max_num_seqs=4, state_checkpoints=wrong)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"speculate": "lookahead"}, "speculate"),
        ({"speculate": "ngram", "spec_tree": 3}, "spec_tree"),
        ({"context_parallel_size": 2}, "context"),
    ],
)
def test_what_recurrent_layers_do_not_run_with_is_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"{text}.* recurrent layers"):
        config_of(spec_of(), **settings)


def test_drafts_have_states_to_go_back_to() -> None:
    cache = config_of(spec_of(), max_num_seqs=4, speculate="ngram", spec_tokens=5).cache
    assert (cache.num_states, cache.num_draft_states) == (4, 20)
    assert cache.num_state_slots == 4 + cache.num_checkpoints + 20
    small = replace(DEVICE, memory_available_bytes=2 * GIB)
    few = config_of(spec_of(128), small, speculate="ngram").cache
    most = config_of(spec_of(128), small).cache
    assert 1 <= few.num_states < most.num_states
    assert few.num_state_slots <= most.num_state_slots


def test_plain_models_have_no_states() -> None:
    plain = replace(spec_of(), layers=spec_of().layers[1:])
    assert config_of(plain).cache.num_states == 0
