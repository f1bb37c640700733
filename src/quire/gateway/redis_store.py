"""The books of several gateways in one Redis: one script, so one decision is one atomic step.

While Redis does not answer, each gateway enforces the limits by itself (so n gateways together grant at most n times a
limit); what requests used of budgets meanwhile is added to Redis once it answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from quire.clock import Clock
from quire.gateway.limits import LEASE_S, Charge, Decision, MemoryStore, decide
from quire.metrics.log import Log

TIMEOUT_S = 1.0
MAX_CALLS = 16  # at once; more wait
RETRY_S = 1.0  # between two attempts while Redis does not answer
log = Log("limits")

# KEYS: the books of each charge. ARGV: request id, lease in s, whether to check; then per charge: period, capacity,
# amount. Returns whether all charges were made, and what was used of each quota before them, as text (Redis cuts
# numbers to integers). The names of the books share a hash tag, so that a cluster keeps them in one slot.
SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local used, fits = {}, true
for i, key in ipairs(KEYS) do
  local period, capacity, amount = ARGV[3 * i + 1], tonumber(ARGV[3 * i + 2]), tonumber(ARGV[3 * i + 3])
  local level = 0
  if period == 'minute' then
    local old = redis.call('HMGET', key, 'used', 'at')
    if old[1] then level = math.max(0, tonumber(old[1]) - math.max(0, now - tonumber(old[2])) * capacity / 60) end
  elseif period == 'concurrent' then
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
    level = redis.call('ZCARD', key)
  else
    level = tonumber(redis.call('GET', key) or '0')
  end
  used[i] = level
  if level + amount > capacity then fits = false end
end
if fits or ARGV[3] == '0' then
  for i, key in ipairs(KEYS) do
    local period, amount = ARGV[3 * i + 1], tonumber(ARGV[3 * i + 3])
    if period == 'minute' then
      local level = string.format('%.6f', math.max(0, used[i] + amount))
      redis.call('HSET', key, 'used', level, 'at', string.format('%.6f', now))
      redis.call('EXPIRE', key, 120)
    elseif period == 'concurrent' then
      if ARGV[3] == '0' then redis.call('ZREM', key, ARGV[1])
      else redis.call('ZADD', key, now + tonumber(ARGV[2]), ARGV[1]) end
      redis.call('EXPIRE', key, 2 * tonumber(ARGV[2]))
    else
      redis.call('SET', key, string.format('%.0f', math.max(0, used[i] + amount)))
      redis.call('EXPIRE', key, period == 'day' and 172800 or 5356800)
    end
  end
end
for i, level in ipairs(used) do used[i] = string.format('%.6f', level) end
return {fits and 1 or 0, time[1], unpack(used)}
"""


class RedisStore:
    """The books in Redis, and in this process while Redis does not answer."""

    def __init__(self, url: str, clock: Clock, prefix: str = "quire") -> None:
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        )
        self._script = self._redis.register_script(SCRIPT)
        self._clock = clock
        self._prefix = f"{{{prefix}}}:"
        self._own = MemoryStore(clock)
        self._owed: dict[str, Charge] = {}  # what budgets were charged while Redis did not answer
        self._local: set[str] = set()  # requests whose charges only this process has
        self._next_try_s = 0.0
        self._calls = asyncio.Semaphore(MAX_CALLS)

    @property
    def is_degraded(self) -> bool:
        return self._next_try_s > 0.0

    async def take(self, request_id: str, charges: Sequence[Charge]) -> Decision:
        answer = await self._run(request_id, charges, check=True)
        if answer is None:
            decision = await self._own.take(request_id, charges)
            if decision.denied is None:
                self._local.add(request_id)
                self._owe(charges)
            return decision
        return decide(charges, [float(each) for each in answer[2:]], float(answer[1]))

    async def change(self, request_id: str, changes: Sequence[Charge]) -> None:
        if request_id in self._local:
            self._local.discard(request_id)
            await self._own.change(request_id, changes)
            self._owe(changes)
        elif await self._run(request_id, changes, check=False) is None:
            self._owe(changes)

    async def renew(self, request_ids: Sequence[str], keys: Sequence[str]) -> None:
        if self.is_degraded:
            return
        try:
            seconds, micros = await self._redis.time()
            async with self._redis.pipeline(transaction=False) as pipeline:
                for request_id, key in zip(request_ids, keys, strict=True):
                    pipeline.zadd(self._prefix + key, {request_id: seconds + micros / 1e6 + LEASE_S})
                    pipeline.expire(self._prefix + key, int(2 * LEASE_S))
                await pipeline.execute()
        except (RedisError, OSError) as error:
            self._lost(error)

    async def close(self) -> None:
        """Bring Redis up to date if it answers, and close the connections."""
        await self._pay()
        await self._redis.aclose()

    async def _run(self, request_id: str, charges: Sequence[Charge], *, check: bool) -> list[Any] | None:
        """Run the script; None while Redis does not answer."""
        async with self._calls:
            if self.is_degraded and (self._clock.now() < self._next_try_s or not await self._pay()):
                return None
            return await self._call(request_id, charges, check=check)

    async def _call(self, request_id: str, charges: Sequence[Charge], *, check: bool) -> list[Any] | None:
        arguments: list[str | int] = [request_id, int(LEASE_S), int(check)]
        for charge in charges:
            arguments += [charge.quota.period, charge.quota.capacity, charge.amount]
        try:
            answer: list[Any] = await self._script(
                keys=[self._prefix + charge.key for charge in charges], args=arguments
            )
        except (RedisError, OSError) as error:
            self._lost(error)
            return None
        return answer

    def _lost(self, error: Exception) -> None:
        if not self.is_degraded:
            log.warning("redis_gone", error=str(error), rule="each gateway enforces the limits by itself")
        self._next_try_s = self._clock.now() + RETRY_S

    def _owe(self, charges: Sequence[Charge]) -> None:
        for charge in charges:
            if charge.quota.period in ("day", "month"):
                before = self._owed[charge.key].amount if charge.key in self._owed else 0
                self._owed[charge.key] = Charge(charge.quota, charge.key, before + charge.amount)

    async def _pay(self) -> bool:
        """Add to Redis what it missed. Returns whether it answers."""
        owed, self._owed = self._owed, {}
        if await self._call("", list(owed.values()), check=False) is None:
            self._owe(list(owed.values()))
            return False
        if self.is_degraded:
            log.info("redis_back", budgets=len(owed))
            self._next_try_s = 0.0
        return True
