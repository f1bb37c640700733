"""The roofline by hand, and what must hold of any estimate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.families.published import PUBLISHED

from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.cost.efficiency import ENGINES, IDEAL, Efficiency, efficiency_of
from quire.cost.hardware import UNITS, find_hardware, hardware_table
from quire.cost.presets import preset_spec
from quire.cost.roofline import Roofline, decoder_work
from quire.cost.split import Split
from quire.errors import ConfigError
from quire.families import spec_from_config
from quire.slo import Slo
from quire_lab.plan.estimate import Load, Replica

H100 = find_hardware("h100")
LLAMA8 = preset_spec("llama-3.1-8b")
DEFAULT = efficiency_of("default", H100, LLAMA8, "bf16")


def replica(efficiency: Efficiency = IDEAL, split: Split | None = None) -> Replica:
    return Replica(Roofline(decoder_work(LLAMA8, split=split), H100, efficiency), 256, 8192)


def test_a_decode_step_reads_the_weights_and_the_cache() -> None:
    step = StepFeatures(4, 4, 4, 4 * 1000, 0, 0)
    weights = 2 * (8_030_261_248 - 128256 * 4096)  # a decode reads a row of the embedding table
    assert Roofline(decoder_work(LLAMA8), H100, IDEAL).seconds(step) == pytest.approx(
        (weights + 4000 * 131_072) / 3.35e12
    )


def test_recurrent_states_are_read_and_written() -> None:
    spec = spec_from_config(PUBLISHED["Qwen3.5-9B"][0])
    work = decoder_work(spec)
    step = StepFeatures(4, 4, 4, 0, 0, 0)
    without = Roofline(replace(work, state_bytes=0), H100, IDEAL).seconds(step)
    seconds = Roofline(work, H100, IDEAL).seconds(step)
    assert seconds - without == pytest.approx(4 * 2 * spec.state_bytes_per_sequence / 3.35e12)
    kept = Roofline(work, H100, IDEAL).parts(StepFeatures(12, 4, 12, 0, 0, 0)).attention
    assert kept == pytest.approx((4 + 12) * spec.state_bytes_per_sequence / 3.35e12)


def test_a_prompt_multiplies() -> None:
    step = StepFeatures(4096, 1, 1, 0, 4096, chunk_pairs(0, 4096))
    linears = 2 * (8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096) * 4096 / 989e12
    attention = 4 * 32 * 128 * 32 * chunk_pairs(0, 4096) / 989e12
    head, cache = 2 * 128256 * 4096 / 3.35e12, 4096 * 131_072 / 3.35e12
    seconds = Roofline(decoder_work(LLAMA8), H100, IDEAL).seconds(step)
    assert seconds == pytest.approx(linears + attention + head + cache)


def test_two_devices_halve_the_work_and_reduce_twice_a_layer() -> None:
    step = StepFeatures(1, 1, 1, 0, 0, 0)
    one = Roofline(decoder_work(LLAMA8), H100, IDEAL).parts(step)
    two = Roofline(decoder_work(LLAMA8, split=Split(tp=2)), H100, replace(IDEAL, link_s=1e-5)).parts(step)
    assert two.linears == pytest.approx(one.linears / 2, rel=1e-3)
    logits = 1e-5 + LLAMA8.vocab_size / 2 * 4 / 450e9
    assert two.links == pytest.approx((1 + 2 * 32) * (1e-5 + 2 * 0.5 * 4096 * 2 / 450e9) + logits)


def test_experts_are_read_as_they_are_touched() -> None:
    mixtral = Roofline(decoder_work(preset_spec("mixtral-8x7b")), H100, IDEAL)
    size = 32 * 8 * 3 * 4096 * 14336 * 2
    for rows, share in ((1, 2 / 8), (2, 1 - (6 / 8) ** 2), (1000, 1.0)):
        step = StepFeatures(rows, rows, rows, 0, 0, 0)
        compute = 2 * (size / 2) * 2 / 8 * rows / 989e12
        assert mixtral.parts(step).experts == pytest.approx(max(share * size / 3.35e12, compute))


def test_a_step_of_nothing_takes_no_time() -> None:
    assert Roofline(decoder_work(LLAMA8), H100, DEFAULT).seconds(StepFeatures(0, 0, 0, 0, 0, 0)) == 0


@pytest.mark.parametrize("rate", [0.1, 5.0, 12.0])
def test_open_loop_obeys_little(rate: float) -> None:
    load = Load(1024, 256, rate=rate)
    e = replica(DEFAULT).open(load)
    assert not e.saturated
    assert e.concurrency == pytest.approx(rate * load.osl * e.tpot_s, rel=0.05)  # whole sequences
    assert e.ttft_s > e.prefill_s


def test_closed_loop_obeys_little() -> None:
    load = Load(1024, 256, concurrency=32)
    e = replica(DEFAULT).closed(load)
    assert e.rate * (e.ttft_s + e.tpot_s * (load.osl - 1)) == pytest.approx(32, rel=1e-6)


def test_slo_breaks_beyond_the_knee_and_queue_beyond_the_device() -> None:
    r, load, slo = replica(DEFAULT), Load(1024, 256), Slo(0.3, 0.02)
    knee = r.knee(load, slo)
    assert r.open(replace(load, rate=0.99 * knee)).meets(slo)
    assert not r.open(replace(load, rate=1.01 * knee)).meets(slo)
    flooded = r.open(replace(load, rate=1000.0))
    assert flooded.saturated
    assert math.isinf(flooded.ttft_s)
    assert r.knee(load, Slo(1e-6, 1e-6)) == 0.0


def test_the_table_is_whole() -> None:
    table = hardware_table()
    assert {"rtx-4090", "b200", "gb200", "tpu-v5e", "tpu-v6e", "trainium2", "mi300x", "xeon-6980p"} <= set(
        table
    )
    for hw in table.values():
        assert hw.source
        assert hw.flops.get("bf16", 1) > 0
        assert set(hw.flops) <= set(UNITS)
        assert hw.kind == "cpu" or hw.link_bandwidth
        assert hw.price is None or (hw.price.source and hw.price.date)
    assert (
        table["a100"].rate("fp8") == table["a100"].flops["bf16"]
    )  # no such unit: expanded, multiplied in bf16
    with pytest.raises(ConfigError, match="h100"):
        find_hardware("h1000")


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3"])
@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp4", "int4", "int8"])
def test_every_engine_has_constants_and_more_rows_take_no_less_time(model: str, precision: str) -> None:
    spec = preset_spec(model)
    work = decoder_work(spec, precision, split=Split(tp=8))
    rows = (1, 64, 128, 200, 400, 512, 800, 2048, 8192)
    for gpu in ("h100", "b200", "b300", "gb200", "a100", "mi300x"):
        hardware = find_hardware(gpu)
        for engine in (e for e in ENGINES if e != "cpu"):
            steps = Roofline(work, hardware, efficiency_of(engine, hardware, spec, precision))
            times = [steps.seconds(StepFeatures(n, 1, 1, 0, n, 0)) for n in rows]
            assert times == sorted(times), (engine, gpu)
            assert times[0] > 0, (engine, gpu)


def test_shares_are_those_of_their_rows() -> None:
    e = replace(IDEAL, compute=(0.2, 0.4, 0.6))
    assert [e.share(n) for n in (1, 128, 512, 2048, 9999)] == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.6])
    assert e.share(256) == pytest.approx(math.sqrt(0.2 * 0.4))
    with pytest.raises(ConfigError, match="compute"):
        replace(IDEAL, compute=(0.5, 0.5))  # type: ignore[arg-type]


def test_the_nearest_set_takes_the_place_of_one_that_was_not_measured() -> None:
    b200, llama, moe = find_hardware("b200"), LLAMA8, preset_spec("qwen3-30b-a3b")
    assert efficiency_of("vllm", b200, llama, "bf16") in (
        efficiency_of("vllm", b200, llama, "fp8"), efficiency_of("vllm", b200, llama, "fp4")
    )  # fmt: skip
    assert efficiency_of("vllm", H100, llama, "fp8") != efficiency_of("vllm", H100, moe, "fp8")
    assert efficiency_of("vllm", H100, llama, "fp8") != efficiency_of("sglang", H100, llama, "fp8")
    assert efficiency_of("ideal", H100, llama, "fp8") == IDEAL
    with pytest.raises(ConfigError, match="vllm"):
        efficiency_of("vlm", H100, llama, "bf16")
