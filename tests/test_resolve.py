"""`resolve`: every choice has a stated rule, every impossible combination a message with the numbers."""

from __future__ import annotations

import dataclasses

import pytest

from quire.args import EngineArgs, ServerArgs, defaults, make_args, rare_names, settings_of
from quire.config import DeviceInfo
from quire.cost.fidelity import KV_CODES
from quire.errors import ConfigError
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.resolve import blocks_for_sequence, parse_bytes, resolve, step_bytes
from quire.rope_spec import RopeSpec

GIB = 2**30
DEVICE = DeviceInfo("cpu", "test", 2, 16 * GIB, 8 * GIB, isa="avx512", native=True)


def spec_of(
    windows: tuple[int | None, ...] = (None, None), positions: int = 4096, hidden: int = 64
) -> ModelSpec:
    layers = tuple(
        LayerSpec(
            AttentionSpec(4, 2, 16, 16, 0.25, RopeSpec(10000.0, 16), window=window),
            MlpSpec(128),
        )
        for window in windows
    )
    return ModelSpec("llama", "LlamaForCausalLM", 512, hidden, layers, 1e-5, positions, dtype="float16")


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * GIB), ("1.5 gib", 3 * GIB // 2), ("2GB", 2 * 10**9), (4096, 4096), ("512MiB", GIB // 2)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4 Gigs", "-1", "0", "GiB"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_memory"):
        parse_bytes(text)


def test_float16_runs_as_bfloat16_on_a_cpu() -> None:
    assert resolve(EngineArgs(), spec_of(), DEVICE).model.dtype == "bfloat16"
    assert resolve(EngineArgs(dtype="float32"), spec_of(), DEVICE).model.kv_dtype == "float32"


def test_default_kv_is_half_of_the_rest_or_what_can_be_used() -> None:
    small = resolve(EngineArgs(), spec_of(), DEVICE)
    most = EngineArgs().max_num_seqs * blocks_for_sequence(spec_of(), 4096, 16, 2048)
    assert small.cache.num_blocks == most  # a tiny model cannot use half of the memory
    tight = dataclasses.replace(DEVICE, memory_available_bytes=64 * 2**20)
    config = resolve(EngineArgs(), spec_of(), tight)
    page = config.kv_layout.block_bytes(16, "bfloat16")
    left = (
        tight.memory_available_bytes
        - spec_of().weight_bytes("bfloat16")
        - step_bytes(EngineArgs(), spec_of())
    )
    assert config.cache.num_blocks == left // 2 // page


def test_asking_for_more_memory_than_there_is_names_both() -> None:
    with pytest.raises(ConfigError, match=r"9\.00 GiB .* 8\.00 GiB"):
        resolve(EngineArgs(kv_memory="9GiB"), spec_of(), DEVICE)


def test_a_context_that_does_not_fit_is_lowered_or_refused() -> None:
    spec = spec_of(positions=100_000)
    lowered = resolve(EngineArgs(num_kv_blocks=64), spec, DEVICE)
    assert blocks_for_sequence(spec, lowered.model.max_model_len, 16, 2048) <= 64
    assert lowered.model.max_model_len > 64 * 16 * 3 // 4
    with pytest.raises(ConfigError, match=r"max_model_len = 100000 needs \d+ KV blocks"):
        resolve(EngineArgs(num_kv_blocks=64, max_model_len=100_000), spec, DEVICE)
    with pytest.raises(ConfigError, match="more than the model's 100000"):
        resolve(EngineArgs(max_model_len=100_001), spec, DEVICE)


def test_windows_become_cache_groups() -> None:
    config = resolve(EngineArgs(max_model_len=2048), spec_of((64, None, 64, None)), DEVICE)
    assert config.cache.windows == (None, 64)
    # A window that the context never fills is full attention: one group.
    assert resolve(EngineArgs(max_model_len=64), spec_of((64, None)), DEVICE).cache.windows == (None,)


def test_no_chunks_and_a_small_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 512"):
        resolve(EngineArgs(enable_chunked_prefill=False, max_num_batched_tokens=512), spec_of(), DEVICE)


def test_different_models_have_different_block_hashes() -> None:
    keys = {
        resolve(EngineArgs(), spec_of(), DEVICE, path="/a").cache.model_key,
        resolve(EngineArgs(), spec_of(), DEVICE, path="/b").cache.model_key,
        resolve(EngineArgs(dtype="float32"), spec_of(), DEVICE, path="/a").cache.model_key,
        resolve(EngineArgs(seed=1), spec_of(), DEVICE, path="/a").cache.model_key,
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seq": 4}, "unknown setting 'max_num_seq' \\(did you mean 'max_num_seqs'"),
        ({"max_num_seqs": "4"}, "max_num_seqs = '4' must be of type int"),
        ({"max_num_seqs": True}, "max_num_seqs = True must be of type int"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0 must be at least 1"),
        ({"gate": "open"}, "gate = 'open' must be one of static, dynamic, continuous"),
        ({"gpu_memory_utilization": 1.5}, "must be at most 1.0"),
    ],
)
def test_bad_settings_name_key_value_and_allowed(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_args(EngineArgs, values, origin="test")


def test_at_most_forty_flags_each_with_help() -> None:
    names = defaults(EngineArgs).keys() | defaults(ServerArgs).keys()
    assert names > rare_names()
    assert len(names - rare_names()) + 2 <= 40  # --config and --help-all too
    for kind in (EngineArgs, ServerArgs):
        for spec in settings_of(kind).values():
            assert spec.help.endswith(".") or "[" in spec.help, spec.name


def test_the_isa_level_is_the_best_unless_forced_lower() -> None:
    def level(asked: str, **device: object) -> str:
        machine = dataclasses.replace(DEVICE, **device)  # type: ignore[arg-type]
        return resolve(EngineArgs(cpu_isa=asked), spec_of(), machine).runner.kernels

    assert level("auto") == "avx512"
    assert level("avx2") == "avx2"
    assert level("auto", isa="amx") == "amx"
    assert level("avx512", isa="amx") == "avx512"
    assert level("auto", isa="neon") == "neon"
    assert level("neon", isa="neon_i8mm") == "neon"
    with pytest.raises(ConfigError, match="'avx2' is more than this CPU has: at most 'neon'"):
        level("avx2", isa="neon")
    assert level("auto", native=False) == "reference"
    assert level("reference") == "reference"
    with pytest.raises(ConfigError, match="more than this CPU has: at most 'avx2'"):
        level("avx512", isa="avx2")
    with pytest.raises(ConfigError, match="more than this CPU has: at most 'avx512'"):
        level("amx")
    with pytest.raises(ConfigError, match="not built"):
        level("avx2", native=False)


def test_an_int8_cache_holds_more_blocks_and_says_what_it_needs() -> None:
    spec = spec_of()
    plain = resolve(EngineArgs(dtype="bfloat16", kv_memory="64MiB"), spec, DEVICE)
    small = resolve(EngineArgs(dtype="bfloat16", kv_memory="64MiB", kv_dtype="int8"), spec, DEVICE)
    assert small.model.kv_dtype == "int8"
    assert small.cache.num_blocks > 1.5 * plain.cache.num_blocks
    assert small.cache.model_key != plain.cache.model_key
    assert plain.model.remarks == ()
    (remark,) = small.model.remarks
    assert f"K and V in int8 add {KV_CODES['int8']} nats" in remark
    (remark,) = resolve(EngineArgs(dtype="bfloat16", kv_dtype="int4"), spec, DEVICE).model.remarks
    assert f"K and V in int4 add {KV_CODES['int4']} nats" in remark
    with pytest.raises(ConfigError, match="multiple of 16, not 8"):
        resolve(EngineArgs(dtype="bfloat16", kv_dtype="int8", block_size=8), spec, DEVICE)
    with pytest.raises(ConfigError, match="bfloat16, not float32"):
        resolve(EngineArgs(dtype="float32", kv_dtype="int8"), spec, DEVICE)
