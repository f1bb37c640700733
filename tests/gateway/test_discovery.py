"""Backends that come and go: files, DNS names, replicas that register; stored responses; the head's limit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.gateway.live import Received, Scripted, answer, backends, gateway, says
from tests.gateway.test_proxy import ASK, HEAD, _raw, run
from tests.gateway.test_tenants import make_keys

from quire.http.heartbeat import Heartbeat


def test_a_watched_file_names_the_backends(tmp_path: Path) -> None:
    async def main() -> None:
        one, two, path = Scripted(says("1")), Scripted(says("2")), tmp_path / "urls"
        async with backends(one, two):
            path.write_text(f"# replicas\n{one.url}\n")
            async with gateway(ready=False, backends=[{"file": str(path), "name": "pool"}]) as live:
                fleet = live.state.fleet
                await live.until(lambda: [b.is_ready for b in fleet] == [True])
                assert (await live.post(ASK))[0] == 200
                path.write_text(f"{two.url}\n")
                await live.until(lambda: [b.url for b in fleet if b.is_ready] == [two.url])
                assert json.loads((await live.post(ASK))[1])["text"] == "2"
                path.write_text("not a url\n")  # the last good state stays
                await asyncio.sleep(0.2)
                path.unlink()
                await asyncio.sleep(0.2)
                assert [b.name for b in fleet] == [f"pool/{two.url.removeprefix('http://')}"]
                assert (await live.post(ASK))[0] == 200

    run(main())


def test_dns_that_is_gone_leaves_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        one = Scripted(says("1"))
        async with backends(one):
            port = one.url.rpartition(":")[2]
            source = {"dns": f"localhost:{port}"}
            async with gateway(ready=False, backends=[source]) as live:
                await live.until(lambda: any(b.is_ready for b in live.state.fleet))

                async def fails(*args: object, **named: object) -> object:
                    raise OSError("Name or service not known")

                monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
                await asyncio.sleep(0.2)
                assert any(b.url == f"http://127.0.0.1:{port}" for b in live.state.fleet)
                monkeypatch.undo()
                assert (await live.post(ASK))[0] == 200

    run(main())


def test_each_address_of_a_headless_service_is_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        one = Scripted(says("1"))
        async with backends(one):
            port = int(one.url.rpartition(":")[2])
            addresses = ["127.0.0.1"]

            async def resolves(host: str, wanted: int, **named: object) -> list[tuple[object, ...]]:
                assert host == "quire.default.svc"
                return [(0, 0, 0, "", (address, wanted)) for address in addresses]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolves)
            source = {"dns": f"quire.default.svc:{port}", "region": "eu", "models": ["m"]}
            quick = {"interval_s": 0.05}
            async with gateway(ready=False, backends=[source], health=quick) as live:
                await live.until(lambda: [b.url for b in live.state.fleet] == [one.url])
                addresses += ["127.0.0.2", "::1"]  # pods become ready …
                await live.until(lambda: len(list(live.state.fleet)) == 3)
                assert {b.url for b in live.state.fleet} == {
                    one.url, f"http://127.0.0.2:{port}", f"http://[::1]:{port}",
                }  # fmt: skip
                assert {b.args.region for b in live.state.fleet} == {"eu"}
                addresses.remove("127.0.0.1")  # … and go
                await live.until(lambda: one.url not in {b.url for b in live.state.fleet})
                monkeypatch.undo()

    run(main())


def test_a_replica_registers_and_is_forgotten_when_silent() -> None:
    async def main() -> None:
        one = Scripted(says("1"))
        async with backends(one), gateway(ready=False, admin_key="secret") as live:
            beat = {"name": "r1", "url": one.url, "models": ["m"], "ttl_s": 1.0}
            url = live.url + "/admin/backends"
            async with live.session.post(url, json=beat) as response:
                assert response.status == 401
            key = {"authorization": "Bearer secret"}
            async with live.session.post(url, json=beat, headers=key) as response:
                assert (await response.json())["source"] == "registered"
            await live.until(lambda: any(b.is_ready for b in live.state.fleet))
            async with live.session.post(
                url, json=beat | {"region": "eu", "role": "prefill"}, headers=key
            ) as response:
                card = await response.json()
                assert (card["region"], card["role"]) == ("eu", "prefill")
            assert (await live.post(ASK))[0] == 200
            await live.until(lambda: not list(live.state.fleet))
            for wrong in ({"url": "ftp://x"}, {"ttl_s": 0.0}, {"models": "m"}, {"extra": 1}, {"role": "x"}):
                async with live.session.post(url, json=beat | wrong, headers=key) as response:
                    assert response.status == 400
                    assert next(iter(wrong)) in await response.text()

    run(main())


def test_heartbeats_come_from_the_server_s_own_client() -> None:
    async def main() -> None:
        one = Scripted(says("1"))
        async with backends(one), gateway(ready=False, admin_key="secret") as live:
            said: dict[str, object] | None = {"name": "r1", "url": one.url, "models": ["m"]}
            heartbeat = Heartbeat(live.url, "secret", lambda: said, interval_s=0.05)
            heartbeat.start()
            await live.until(lambda: any(b.is_ready for b in live.state.fleet))
            said = None  # it drains
            await live.until(lambda: not list(live.state.fleet))
            await heartbeat.close()

    run(main())


def test_a_stored_response_is_asked_of_its_owner() -> None:
    def holder(name: str) -> Scripted:
        async def script(request: Received, writer: asyncio.StreamWriter) -> None:
            if request.method == "POST":
                body = json.dumps({"id": f"resp_{name}", "usage": {"input_tokens": 1, "output_tokens": 1}})
                await answer(writer, 200, body.encode())
            elif request.path.startswith(f"/v1/responses/resp_{name}"):
                await answer(writer, 200, json.dumps({"held_by": name}).encode())
            else:
                await answer(writer, 404, b"{}")

        return Scripted(script)

    async def main() -> None:
        one, two = holder("one"), holder("two")
        async with gateway(one, two, routing={"policy": "round-robin"}) as live:
            ids = [json.loads((await live.post({"model": "m"}, "/v1/responses"))[1])["id"] for _ in range(2)]
            assert sorted(ids) == ["resp_one", "resp_two"]
            for name in ("one", "two"):
                path = f"/v1/responses/resp_{name}/input_items?limit=3"
                async with live.session.get(live.url + path) as response:
                    assert await response.json() == {"held_by": name}
                for _ in range(3):  # the next turn goes where the last one is stored
                    body = {"model": "m", "previous_response_id": f"resp_{name}"}
                    assert json.loads((await live.post(body, "/v1/responses"))[1])["id"] == f"resp_{name}"
            live.state.holders._names.clear()  # as after a restart
            async with live.session.delete(live.url + "/v1/responses/resp_two") as response:
                assert await response.json() == {"held_by": "two"}
            async with live.session.get(live.url + "/v1/responses/resp_three") as response:
                assert response.status == 404

    run(main())


def test_a_stored_response_is_asked_for_its_tenant(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={})

    async def main() -> None:
        replica = Scripted(says("hey"), card={"fingerprint": "f"})
        settings = {"key_file": str(tmp_path / "keys"), "gateway_key": "between-us"}

        async def shows(request: Received, writer: asyncio.StreamWriter) -> None:
            await answer(writer, 200, b"{}")

        replica.script = shows
        async with gateway(replica, **settings) as live:
            headers = {"authorization": keys["alice"]}
            async with live.session.get(live.url + "/v1/responses/resp_1", headers=headers) as response:
                assert response.status == 200
            (got,) = [each.headers for each in replica.received if each.path == "/v1/responses/resp_1"]
            assert got["x-quire-gateway-key"] == "between-us"
            assert got["x-quire-account"].endswith(" 1 lab alice")

    run(main())


def test_a_head_beyond_its_limit_is_refused() -> None:
    async def main() -> None:
        backend = Scripted(says("x"))
        async with gateway(backend) as live:
            assert (await _raw(live, HEAD + b"x-long: " + b"x" * 200_000)).startswith(b"HTTP/1.1 431")
            many = b"".join(b"x-%d: 1\r\n" % i for i in range(15_000))
            assert (await _raw(live, HEAD + many)).startswith(b"HTTP/1.1 431")
            fits = HEAD + b"connection: close\r\nx-long: " + b"x" * 30_000
            body = json.dumps(ASK).encode()
            whole = await _raw(live, fits + b"\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            assert whole.startswith(b"HTTP/1.1 200")

    run(main())
