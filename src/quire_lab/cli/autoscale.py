"""`quire autoscale`: reads a gateway's metrics, decides how many replicas the load needs, and has them started."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from quire.cli.flags import AutoscaleArgs
from quire.errors import ConfigError
from quire.http.client_errors import connection_problem
from quire.metrics.log import Log, configure
from quire_gateway.autoscale import Policy, Seen
from quire_gateway.scalers import Kubernetes, LocalPool, Ray, ScaleError, Scaler, Webhook
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.sim.setup import set_up

log = Log("autoscale")
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
_ENDED = ("ok", "left", "broken")  # outcomes of requests that reached a replica


def autoscale(args: AutoscaleArgs) -> int:
    """Run until a signal; return the exit status.

    Raises:
        ConfigError: a setting is wrong, or one is missing that the executor needs.
    """
    style: Any = args.log_format
    configure(args.log_level, style=style)
    policy, scaler = policy_of(args), scaler_of(args)
    asyncio.run(_until_signal(args, policy, scaler))
    return 0


def policy_of(args: AutoscaleArgs) -> Policy:
    """Return the policy, which is the simulator's of ``--autoscale predicted``."""
    simulated = SimulateArgs(
        profile=args.profile,
        hardware=args.hardware,
        model=args.model,
        tensor_parallel_size=args.tensor_parallel,
        weights=args.weights,
        replicas=args.min_replicas,
        start_up_s=args.start_up_s,
        autoscale="predicted",
        min_replicas=args.min_replicas,
        max_replicas=args.max_replicas,
        interval_s=args.interval_s,
        down_after_s=args.down_after_s,
        headroom=args.headroom,
    )
    scaling = set_up(simulated, ServeBenchArgs(slo=args.slo), {}).scaling
    assert scaling is not None
    return scaling[0]


def scaler_of(args: AutoscaleArgs) -> Scaler:
    """Return what ``--executor`` names."""

    def needed(name: str) -> str:
        value = getattr(args, name)
        if not value:
            raise ConfigError(f"--executor {args.executor} needs --{name}")
        return str(value)

    match args.executor:
        case "local":
            return LocalPool(needed("command"))
        case "kubernetes":
            return Kubernetes(needed("target"), args.namespace, args.server)
        case "webhook":
            return Webhook(needed("webhook"), args.webhook_key)
    return Ray(needed("command"), args.ray_address, args.ray_cpus, args.ray_gpus)


async def _until_signal(args: AutoscaleArgs, policy: Policy, scaler: Scaler) -> None:
    task = asyncio.ensure_future(run(args, policy, scaler, time.monotonic))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await asyncio.gather(task, return_exceptions=True)
    await scaler.close()


async def run(args: AutoscaleArgs, policy: Policy, scaler: Scaler, now: Callable[[], float]) -> None:
    """Look at the gateway every ``interval_s`` and scale, until cancelled. What fails is logged and tried again."""
    count = None
    async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        while True:
            try:
                if count is None:
                    count = await scaler.current()
                    if count is not None and count < args.min_replicas:
                        await scaler.scale(args.min_replicas)
                        log.info("scaled", replicas=args.min_replicas, before=count, why="the fewest allowed")
                decision = policy(await look(session, args.gateway, now()))
                current = await scaler.current()
                if decision.replicas != current:
                    await scaler.scale(decision.replicas)
                    log.info("scaled", replicas=decision.replicas, before=current, why=decision.why)
                else:
                    log.debug("kept", replicas=current, why=decision.why)
            except ScaleError as error:
                log.error("look_failed", error=str(error))
            await asyncio.sleep(args.interval_s)


async def look(session: aiohttp.ClientSession, gateway: str, now_s: float) -> Seen:
    """Return what a gateway's ``/metrics`` says.

    Raises:
        ScaleError: it does not answer, or is no gateway.
    """
    url = f"{gateway.rstrip('/')}/metrics"
    try:
        async with session.get(url) as response:
            text = await response.text()
            if response.status != 200:
                raise ScaleError(f"{url} answered {response.status}")
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ScaleError(f"{url} {connection_problem(error)}") from error
    except ValueError as error:
        raise ScaleError(f"{url} has no metrics: {error}") from error

    def total(name: str, **labels: tuple[str, ...]) -> float:
        return sum(s.value for s in samples
                   if s.name == name and all(s.labels.get(k) in values for k, values in labels.items()))  # fmt: skip

    tokens = {
        kind: total("quire:gateway_tokens_total", kind=(kind,)) for kind in ("prompt", "cached", "output")
    }
    if not any(s.name == "vllm:healthy_pods_total" for s in samples) and "quire:gateway" not in text:
        raise ScaleError(f"{url} has no metrics of a gateway")
    ended = total("quire:gateway_requests_total", outcome=_ENDED)
    return Seen(
        time_s=now_s,
        num_arrivals=int(ended + total("vllm:num_requests_running")),
        num_ended=int(ended),
        num_prompt_tokens=int(tokens["prompt"] - tokens["cached"]),
        num_output_tokens=int(tokens["output"]),
        busy_s=0.0,
        num_ready=int(total("vllm:healthy_pods_total")),
    )
