"""``--slo`` from the flag to the engine: what it builds, that it reaches the child, and that no token changes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.toy import engine_config
from tests.fakes.engine import FAKE
from tests.scheduler.harness import Engine, make_scheduler, oracle, request

from quire.args import EngineArgs, ServerArgs
from quire.cli.serve_slo import forecast_of, with_slo
from quire.clock import VirtualClock
from quire.config import SloConfig
from quire.cost import hardware
from quire.cost.cost_model import CostModel, Curve, StepFeatures
from quire.cost.efficiency import efficiency_of
from quire.cost.hardware import Bounds, find_hardware
from quire.cost.kept_profiles import machine_of, profile_path, profiled_settings
from quire.cost.presets import preset_spec
from quire.cost.profile import Profile
from quire.cost.roofline import Roofline, decoder_work, sampled
from quire.engine.build import build_core
from quire.engine.process import Boot, decode, encode
from quire.errors import ConfigError
from quire.metrics.engine_stats import EngineStats
from quire.scheduler.policies.slo import SloController

MODEL = CostModel(1e-3, Curve((0.0, 1.0), (0.0, 1e-3)))
SLO = SloConfig(json.dumps(MODEL.to_json()), 0.5, 0.02)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_tokens_do_not_depend_on_the_controller(in_flight: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=256, max_num_batched_tokens=64, max_model_len=128)
    engine = Engine(scheduler, in_flight=in_flight)
    scheduler.use_step_time(MODEL)
    engine.core.controller = SloController(scheduler.predictor, scheduler.config, rng.uniform(0.0005, 0.003))
    asked = [request(f"r{i}", rng.randrange(1, 100), max_tokens=rng.randrange(1, 20)) for i in range(30)]
    settings = set()
    for one in asked:
        engine.put([one])
        engine.step()
        settings.add((scheduler.config.max_num_batched_tokens, scheduler.config.max_num_seqs))
    engine.run()
    for one in asked:
        assert engine.tokens(one.request_id) == oracle(one)
    assert len(settings) > 1  # the controller changed the setting


def test_an_slo_reaches_the_child_and_builds_a_controller() -> None:
    config = replace(engine_config(), slo=SLO)
    boot = decode(encode(Boot(config, "info")))
    assert boot.config.slo == SLO
    assert build_core(boot.config, FAKE, VirtualClock()).controller is not None
    ttft_alone = replace(config, slo=replace(SLO, tpot_s=None))
    assert build_core(ttft_alone, FAKE, VirtualClock()).controller is None
    assert build_core(engine_config(), FAKE, VirtualClock()).controller is None
    assert forecast_of(config, EngineStats) is not None
    assert forecast_of(engine_config(), EngineStats) is None


def test_a_profile_is_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "profile.json"
    Profile("toy", {}, {}, MODEL).save(path)
    config = with_slo(engine_config(), ServerArgs(slo="ttft=500ms,tpot=20ms", profile=str(path)))
    assert config.slo == SLO


def test_a_profile_that_was_kept_for_these_settings_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = engine_config()
    name, machine, settings = config.model.name, machine_of(config), profiled_settings(config)
    Profile(name, machine, settings, MODEL).save(profile_path(name, machine, settings))
    assert with_slo(config, ServerArgs(slo="ttft=500ms,tpot=20ms")).slo == SLO
    other = replace(config, runner=replace(config.runner, num_threads=7))
    with pytest.raises(ConfigError, match="native"):  # not measured with these: the machine is measured
        with_slo(other, ServerArgs(slo="tpot=20ms"))


def test_without_a_profile_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "measure", lambda threads: Bounds(2e10, {"fma_avx512": 1e12}))
    config = engine_config()
    native = replace(config, device=replace(config.device, native=True, isa="avx512"))
    assert hardware.FLOAT_DOTS["avx512"][-1] == "fma_avx512"
    slo = with_slo(native, ServerArgs(slo="tpot=20ms")).slo
    assert slo is not None
    model = CostModel.from_json(json.loads(slo.cost_model))
    assert 0 < model.seconds(StepFeatures(1, 1, 1, 10, 0, 0)) < 0.01


@pytest.mark.parametrize(
    ("args", "settings", "match"),
    [
        (ServerArgs(profile="x.json"), {}, "--slo"),
        (ServerArgs(slo="tpot=20"), {}, "tpot"),
        (ServerArgs(slo="e2el=2s"), {}, "e2el"),
        (ServerArgs(slo="tpot=20ms"), {"enable_chunked_prefill": False}, "chunked"),
        (ServerArgs(slo="tpot=20ms"), {}, "native"),
        (ServerArgs(slo="tpot=20ms", profile="missing.json"), {}, "missing.json"),
    ],
)
def test_wrong_flags_are_named(args: ServerArgs, settings: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        with_slo(engine_config(**settings), args)


def test_an_operators_limits_are_the_flags_limits() -> None:
    assert with_slo(engine_config(), ServerArgs()) == engine_config()
    assert EngineArgs().max_num_batched_tokens == 2048  # where the controller starts; it never goes higher


def test_a_sampled_roofline_agrees_with_it() -> None:
    spec, hardware = preset_spec("llama-3.1-8b"), find_hardware("h100")
    roofline = Roofline(decoder_work(spec), hardware, efficiency_of("default", hardware, spec, "bf16"))
    model = sampled(roofline, 8192)
    for step in (
        StepFeatures(1, 1, 1, 0, 0, 0),
        StepFeatures(4096, 1, 1, 0, 0, 0),
        StepFeatures(1, 1, 1, 5000, 0, 0),
    ):
        assert model.seconds(step) == pytest.approx(roofline.seconds(step), rel=1e-6)
