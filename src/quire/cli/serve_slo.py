"""``quire serve --slo``: the step-time model of the SLO's controller, from a profile or measured at start-up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.api.forecast import TtftForecast
from quire.args import ServerArgs
from quire.config import EngineConfig, SloConfig
from quire.cost.cost_model import CostModel
from quire.cost.efficiency import cpu_efficiency
from quire.cost.hardware import this_machine
from quire.cost.kept_profiles import kept, machine_of, profiled_settings
from quire.cost.profile import load_profile
from quire.cost.roofline import Roofline, decoder_work, sampled
from quire.errors import ConfigError
from quire.kv_layout import KV_CODE_BITS
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.slo import Slo

log = Log("server")


def with_slo(config: EngineConfig, args: ServerArgs) -> EngineConfig:
    """Return ``config`` with ``--slo`` and ``--profile`` applied; unchanged without ``--slo``.

    Raises:
        ConfigError: the SLO or the profile cannot be read, or the controller could not work with the other settings.
    """
    if args.slo is None:
        if args.profile is not None:
            raise ConfigError("--profile is read only for --slo: give --slo too, such as --slo tpot=50ms")
        return config
    slo = Slo.parse(args.slo)
    if slo.e2el_s is not None:
        raise ConfigError(f"--slo {args.slo!r}: e2el depends on how long answers are; give ttft and tpot")
    if not config.scheduler.enable_chunked_prefill:
        raise ConfigError("--slo needs chunked prefill, and enable_chunked_prefill is off: leave it on")
    model = _profiled(config, args.profile) or _measured(config)
    return replace(config, slo=SloConfig(json.dumps(model.to_json()), slo.ttft_s, slo.tpot_s))


def forecast_of(config: EngineConfig, stats: Callable[[], EngineStats]) -> TtftForecast | None:
    """Return the forecast of the TTFT of requests to an engine with these ``stats``; None without ``--slo``."""
    return None if config.slo is None else TtftForecast(Slo(config.slo.ttft_s, config.slo.tpot_s), stats)


def _profiled(config: EngineConfig, path: str | None) -> CostModel | None:
    """Return the step times of the file at ``path``, else of the profile that was kept for these settings, if any."""
    if path is not None:
        return load_profile(Path(path)).step_time
    hit = kept(config.model.name, machine_of(config), profiled_settings(config))
    if hit is None:
        return None
    log.info("slo_profile", path=str(hit[0]), measured=hit[1].measured_at)
    return hit[1].step_time


def _measured(config: EngineConfig) -> CostModel:
    """Return a roofline of this machine, measured now. The controller corrects it by measured step times."""
    if not config.device.native:
        raise ConfigError(
            "--slo without --profile measures this machine with the native extension, which is not built"
        )
    precision = (config.model.quantize or "bf16").partition("-")[0]
    if precision not in ("int8", "int4"):
        precision = "fp32" if config.model.dtype == "float32" else "bf16"
    kv_dtype = "int8" if config.model.kv_dtype in KV_CODE_BITS else "bf16"
    hardware = this_machine(config.device, config.runner.num_threads)
    roofline = Roofline(decoder_work(config.model.spec, precision, kv_dtype), hardware, cpu_efficiency())
    return sampled(roofline, config.scheduler.max_num_batched_tokens)
