"""`quire autoscale`: what the policies decide, what the simulator makes of it, and what starts and ends replicas."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.live import Scripted, gateway, says

from quire.cost.cost_model import CostModel
from quire.errors import ConfigError
from quire.slo import Slo
from quire_gateway.autoscale import Bounds, Decision, PredictedLoad, Seen, Utilisation
from quire_gateway.scalers import Kubernetes, LocalPool, ScaleError, Webhook
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.cli.autoscale import AutoscaleArgs, look, policy_of, run, scaler_of
from quire_lab.plan.replica import PlannedReplica
from quire_lab.sim.run import simulate, summary_of
from quire_lab.sim.setup import set_up
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Arrivals, Fixed

pytestmark = pytest.mark.anyio
SLO = Slo.parse("ttft=1s,tpot=100ms")
# 20 ms a step and 0.1 ms a prompt token: a replica completes some 10 requests/s of 100 + 20 tokens within the SLO.
STEPS = CostModel(fixed_s=0.02, per_pair_s=0.0, per_seq_s=0.002)
REPLICA = PlannedReplica(STEPS, 100_000, 64, 2048, SLO)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def seen(time_s: float, arrivals: float, ready: int, *, late: float = 0.0, busy_s: float = 0.0) -> Seen:
    ended = int(arrivals - late)
    return Seen(time_s, int(arrivals), ended, 100 * ended, 20 * ended, busy_s, ready)


def predicted(**bounds: Any) -> PredictedLoad:
    return PredictedLoad(REPLICA, Bounds(**{"most": 50, "down_after_s": 300.0, **bounds}), start_up_s=60.0)


def follow(policy: Callable[[Seen], Decision], rate: Callable[[float], float], end_s: int) -> list[int]:
    """Look every 10 s; replicas are ready at once. Return the number of replicas at each look."""
    arrivals, replicas, found = 0.0, 2, []
    for now in range(0, end_s, 10):
        arrivals += 10 * rate(now)
        replicas = policy(seen(now, arrivals, replicas)).replicas
        found.append(replicas)
    return found


def test_replicas_are_what_the_planner_says_of_a_steady_load() -> None:
    policy = predicted(down_after_s=60.0)
    capacity = policy.capacity(100, 20)
    assert 1 < capacity < 50
    needed = follow(policy, lambda now: 4.5 * capacity, 900)[-1]
    assert needed in (5, 6)


def test_a_rising_load_gets_replicas_before_it_is_there() -> None:
    policy = predicted()
    capacity = policy.capacity(100, 20)
    counts = follow(policy, lambda now: capacity * (1 + now / 200), 600)
    behind = [count for now, count in zip(range(0, 600, 10), counts, strict=True) if now >= 300
              and count < 1 + (now + 60) / 200 - 0.2]  # fmt: skip
    assert not behind


def test_replicas_are_taken_away_only_after_a_while() -> None:
    policy = predicted(down_after_s=200.0)
    capacity = policy.capacity(100, 20)
    counts = follow(policy, lambda now: capacity * (6 if now < 300 else 1), 1200)
    assert min(counts[30:50]) >= 6
    assert counts[-1] <= 2


def test_a_wave_does_not_make_replicas_come_and_go() -> None:
    policy = predicted(down_after_s=300.0)
    capacity = policy.capacity(100, 20)
    counts = follow(policy, lambda now: capacity * (4 if now // 60 % 2 else 2), 1800)
    assert sum(a != b for a, b in pairwise(counts[60:])) <= 2


def test_requests_that_wait_ask_for_more_than_the_rate_does() -> None:
    def decide(late: float) -> int:
        policy = predicted()
        capacity = policy.capacity(100, 20)
        for now in range(0, 200, 10):
            decision = policy(seen(now, 2 * capacity * now, 2, late=late if now == 190 else 0.0))
        return decision.replicas

    assert decide(late=3000.0) > decide(late=0.0) + 1


def test_bounds_hold_and_cold_starts_are_learned() -> None:
    policy = predicted(most=3)
    assert max(follow(policy, lambda now: 1000.0, 300)) == 3
    policy = predicted()
    capacity = policy.capacity(100, 20)
    for now in range(0, 400, 10):
        policy(seen(now, 10 * capacity * now, 1 if now < 200 else 40))
    assert policy.start_up_s > 90


def test_utilisation_is_the_rule_of_the_pod_autoscaler() -> None:
    policy = Utilisation(0.5, Bounds(most=20, down_after_s=0.0))
    policy(seen(0.0, 0, 4))
    assert policy(seen(10.0, 0, 4, busy_s=30.0)).replicas == 6  # 75 % busy: 4 · 0.75 / 0.5
    assert policy(seen(20.0, 0, 6, busy_s=60.0)).replicas == 6  # 50 %
    assert policy(seen(30.0, 0, 6, busy_s=75.0)).replicas == 3


def test_the_simulator_runs_the_policy_and_counts_replica_hours() -> None:
    base: dict[str, Any] = {"hardware": "l4", "model": "llama-3.1-8b", "replicas": 1, "start_up_s": 10.0}
    workload = Synthetic(250, Fixed(1500), Fixed(30), Arrivals(1.0, ramp_to=8.0)).build(seed=1)
    found = {}
    for name in ("off", "predicted", "utilisation"):
        args = SimulateArgs(**base, autoscale=name, max_replicas=12, interval_s=5.0)  # type: ignore[arg-type]
        setup = set_up(args, ServeBenchArgs(slo=str(SLO)), {})
        result = simulate(setup.config, setup.step_time, workload, scaling=setup.scaling)
        assert len(result.records) == 250
        assert name == "utilisation" or result == simulate(
            setup.config, setup.step_time, workload, scaling=setup.scaling
        )
        found[name] = summary_of(result, SLO, workload)["simulation"]
    assert found["off"]["peak_replicas"] == 1
    assert found["off"]["replica_hours"] == pytest.approx(found["off"]["end_s"] / 3600, rel=0.05)
    assert found["predicted"]["peak_replicas"] > 2
    assert found["predicted"]["attainment"] > found["off"]["attainment"] + 0.1


@asynccontextmanager
async def served(app: web.Application) -> AsyncGenerator[str, None]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert site._server is not None
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


def api_server(asked: list[Any]) -> web.Application:
    """The scale subresource of the Deployment quire in the namespace llm, as the API server answers it."""
    path = "/apis/apps/v1/namespaces/llm/deployments/quire/scale"

    async def scale(request: web.Request) -> web.Response:
        if request.headers.get("authorization") != "Bearer t0ken":
            return web.json_response({"kind": "Status", "message": "forbidden"}, status=403)
        if request.method == "PATCH":
            asked.append((request.content_type, await request.json()))
        spec = {"replicas": asked[-1][1]["spec"]["replicas"]} if asked else {}
        return web.json_response({"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": spec})

    app = web.Application()
    app.router.add_get(path, scale)
    app.router.add_patch(path, scale)
    return app


async def test_kubernetes_is_asked_by_the_scale_subresource(tmp_path: Path) -> None:
    asked: list[Any] = []
    (tmp_path / "token").write_text("t0ken\n")
    (tmp_path / "namespace").write_text("llm")
    async with served(api_server(asked)) as url:
        scaler = Kubernetes("deployments/quire", None, url, tmp_path)
        assert await scaler.current() == 0
        await scaler.scale(3)
        assert await scaler.current() == 3
        (tmp_path / "token").write_text("another")  # it is read again
        with pytest.raises(ScaleError, match=r"answered 403: .*forbidden"):
            await scaler.scale(4)
        await scaler.close()
    assert asked == [("application/merge-patch+json", {"spec": {"replicas": 3}})]
    with pytest.raises(ConfigError, match="must be deployments/NAME"):
        Kubernetes("pods/quire", None, url)
    with pytest.raises(ConfigError, match="no KUBERNETES_SERVICE_HOST"):
        Kubernetes("deployments/quire", "llm", None, tmp_path)


async def test_a_webhook_gets_the_number_and_the_one_before() -> None:
    got: list[Any] = []

    async def hook(request: web.Request) -> web.Response:
        got.append((request.headers["authorization"], await request.json()))
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/scale", hook)
    async with served(app) as url:
        scaler = Webhook(f"{url}/scale", "k")
        await scaler.scale(2)
        await scaler.scale(5)
        await scaler.close()
    scaler = Webhook(f"{url}/scale", None)  # it is gone
    with pytest.raises(ScaleError, match="/scale"):
        await scaler.scale(1)
    await scaler.close()
    assert got == [
        ("Bearer k", {"replicas": 2, "previous": None}),
        ("Bearer k", {"replicas": 5, "previous": 2}),
    ]


async def test_a_local_pool_starts_ends_and_replaces_processes() -> None:
    pool = LocalPool(f"{sys.executable} -c 'import time; time.sleep(600)'")
    await pool.scale(3)
    assert await pool.current() == 3
    pool.processes[0].kill()
    await pool.processes[0].wait()
    assert await pool.current() == 2
    await pool.scale(1)
    assert await pool.current() == 1
    await pool.close()
    assert await pool.current() == 0
    with pytest.raises(ScaleError, match="cannot be run"):
        await LocalPool("/no/such/program").scale(1)


async def test_the_gateways_metrics_are_read_and_acted_on() -> None:
    backend = Scripted(says("four"))
    async with gateway(backend) as live:
        for _ in range(3):
            await live.post({"model": "m", "prompt": "x"})
        found = await look(live.session, live.url, 7.0)
        assert found == Seen(7.0, 3, 3, 15, 12, 0.0, 1)
        asked: list[int] = []

        class Recorded:
            async def current(self) -> int | None:
                return asked[-1] if asked else 0

            async def scale(self, replicas: int) -> None:
                asked.append(replicas)

            async def close(self) -> None:
                return None

        args = AutoscaleArgs(gateway=live.url, interval_s=0.02, min_replicas=2)
        policy = PredictedLoad(REPLICA, Bounds(least=2, most=9, down_after_s=300.0), start_up_s=1.0)
        task = asyncio.create_task(run(args, policy, Recorded(), time.monotonic))
        await live.until(lambda: bool(asked))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asked[0] == 2
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ScaleError, match="/metrics"):
            await look(session, live.url, 0.0)


def test_what_an_executor_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match="--executor kubernetes needs --target"):
        scaler_of(AutoscaleArgs(executor="kubernetes"))
    with pytest.raises(ConfigError, match="--executor local needs --command"):
        scaler_of(AutoscaleArgs())
    with pytest.raises(ConfigError, match="either --profile FILE"):
        policy_of(AutoscaleArgs())
    assert callable(policy_of(AutoscaleArgs(hardware="l4", model="llama-3.1-8b")))


async def test_ray_runs_the_command_in_actors() -> None:
    pytest.importorskip("ray", reason="the extra Ray is not installed")
    scaler = scaler_of(AutoscaleArgs(executor="ray", command="sleep 600", ray_cpus=0.1))
    await scaler.scale(2)
    assert await scaler.current() == 2
    await scaler.scale(1)
    assert await scaler.current() == 1
    await scaler.close()
