"""The books of several gateways in one Redis: one script, so one decision is one atomic step.

While Redis does not answer, each gateway enforces the limits by itself (so n gateways together grant at most n times a
limit); what requests used of budgets meanwhile is added to Redis once it answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from quire.clock import RETRY_S, Clock
from quire.extras import needs
from quire.metrics.log import Log
from quire_gateway.limits import LEASE_S, Charge, Decision, MemoryStore, decide

MAX_CALLS = 16  # at once; more wait
log = Log("limits")

# KEYS: the books of each charge. ARGV: request id, lease in s, what to do; then per charge: period, capacity, amount.
# Returns whether all charges fit, and what was used of each quota before them, as text (Redis cuts numbers to
# integers).
#
#     take     adds the amounts if all of them fit
#     settle   adds the amounts to rates, and replaces what the request holds of budgets by them; ends its leases
#     if-held  the same if the request still holds its budgets, else nothing
#
# What requests hold of a budget is part of its level. Beside it, `:held` has the amounts by request, and `:until` the
# ends of their leases; the script gives back what is past its end. The names of the books share a hash tag, so that a
# cluster keeps them in one slot.
SCRIPT = """
local time = redis.call('TIME')
local now, id, todo = tonumber(time[1]) + tonumber(time[2]) / 1e6, ARGV[1], ARGV[3]
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
    local past = redis.call('ZRANGEBYSCORE', key .. ':until', '-inf', now)
    for _, each in ipairs(past) do
      level = math.max(0, level - tonumber(redis.call('HGET', key .. ':held', each) or '0'))
      redis.call('HDEL', key .. ':held', each)
      redis.call('ZREM', key .. ':until', each)
    end
    if #past > 0 then redis.call('SET', key, string.format('%.0f', level), 'KEEPTTL') end
  end
  used[i] = level
  if level + amount > capacity then fits = false end
end
if fits or todo ~= 'take' then
  for i, key in ipairs(KEYS) do
    local period, amount = ARGV[3 * i + 1], tonumber(ARGV[3 * i + 3])
    if period == 'minute' then
      local level = string.format('%.6f', math.max(0, used[i] + amount))
      redis.call('HSET', key, 'used', level, 'at', string.format('%.6f', now))
      redis.call('EXPIRE', key, 120)
    elseif period == 'concurrent' then
      if todo ~= 'take' then redis.call('ZREM', key, id)
      else redis.call('ZADD', key, now + tonumber(ARGV[2]), id) end
      redis.call('EXPIRE', key, 2 * tonumber(ARGV[2]))
    else
      local ttl = period == 'day' and 172800 or 5356800
      local held = redis.call('HGET', key .. ':held', id)
      if todo == 'if-held' and not held then amount = 0 end
      if todo == 'take' and id ~= '' then
        redis.call('HSET', key .. ':held', id, ARGV[3 * i + 3])
        redis.call('ZADD', key .. ':until', now + tonumber(ARGV[2]), id)
        redis.call('EXPIRE', key .. ':held', ttl)
        redis.call('EXPIRE', key .. ':until', ttl)
      elseif held then
        amount = amount - tonumber(held)
        redis.call('HDEL', key .. ':held', id)
        redis.call('ZREM', key .. ':until', id)
      end
      redis.call('SET', key, string.format('%.0f', math.max(0, used[i] + amount)))
      redis.call('EXPIRE', key, ttl)
    end
  end
end
for i, level in ipairs(used) do used[i] = string.format('%.6f', level) end
return {fits and 1 or 0, time[1], unpack(used)}
"""
Todo = Literal["take", "settle", "if-held"]
_Charges = Sequence[tuple[Charge, int]]  # with the amount


class RedisStore:
    """The books in Redis, and in this process while Redis does not answer."""

    def __init__(self, url: str, clock: Clock, prefix: str = "quire") -> None:
        with needs("redis", "A gateway that keeps its limits in Redis", param="redis"):
            import redis.asyncio
        self._redis = redis.asyncio.Redis.from_url(
            url, socket_timeout=RETRY_S, socket_connect_timeout=RETRY_S
        )
        self._errors = (redis.exceptions.RedisError, OSError)
        self._script = self._redis.register_script(SCRIPT)
        self._clock = clock
        self._prefix = f"{{{prefix}}}:"
        self._own = MemoryStore(clock)
        self._owed: dict[str, tuple[Charge, int]] = {}  # by budget: what requests without Redis have used
        self._unsettled: dict[
            str, tuple[_Charges, Todo]
        ] = {}  # by request: what Redis was not told of its end
        self._local: set[str] = set()  # requests whose charges only this process has
        self._next_try_s = 0.0
        self._calls = asyncio.Semaphore(MAX_CALLS)

    @property
    def is_degraded(self) -> bool:
        return self._next_try_s > 0.0

    async def take(self, request_id: str, charges: Sequence[Charge]) -> Decision:
        pairs = [(charge, charge.amount) for charge in charges]
        answer = await self._run(request_id, pairs, "take")
        if answer is None:
            decision = await self._own.take(request_id, charges)
            if decision.denied is None:
                self._local.add(request_id)
                self._owe(pairs)
            return decision
        return decide(charges, [float(used) for used in answer[2:]], float(answer[1]))

    async def settle(self, request_id: str, charges: Sequence[Charge], used: Sequence[int]) -> None:
        pairs = list(zip(charges, used, strict=True))
        differences = [(charge, amount - charge.amount) for charge, amount in pairs]
        if request_id in self._local:
            self._local.discard(request_id)
            await self._own.settle(request_id, charges, used)
            self._owe(differences)
            return
        changes = [
            pair if pair[0].quota.is_budget else difference
            for pair, difference in zip(pairs, differences, strict=True)
            if difference[1] or pair[0].quota.period != "minute"
        ]
        if changes:
            await self._settle(request_id, changes, "settle")

    async def recover(
        self, request_id: str, charges: Sequence[Charge], used: Sequence[int], *, if_held: bool
    ) -> None:
        pairs = list(zip(charges, used, strict=True))
        await self._settle(request_id, pairs, "if-held" if if_held else "settle")

    async def _settle(self, request_id: str, charges: _Charges, todo: Todo) -> None:
        if await self._run(request_id, charges, todo) is None:
            budgets = [charge for charge in charges if charge[0].quota.is_budget]
            self._unsettled[request_id] = budgets, todo

    async def renew(self, leases: Sequence[tuple[str, Charge]]) -> None:
        if self.is_degraded:
            return
        try:
            seconds, micros = await self._redis.time()
            end_s = seconds + micros / 1e6 + LEASE_S
            async with self._redis.pipeline(transaction=False) as pipeline:
                for request_id, charge in leases:
                    key = self._prefix + charge.key
                    if request_id in self._local:
                        continue
                    if charge.quota.is_budget:  # what was given back stays so until the request is settled
                        pipeline.zadd(f"{key}:until", {request_id: end_s}, xx=True)
                    else:
                        pipeline.zadd(key, {request_id: end_s})
                        pipeline.expire(key, int(2 * LEASE_S))
                await pipeline.execute()
        except self._errors as error:
            self._lost(error)

    async def close(self) -> None:
        """Bring Redis up to date if it answers, and close the connections."""
        await self._pay()
        await self._redis.aclose()

    async def _run(self, request_id: str, charges: _Charges, todo: Todo) -> list[Any] | None:
        """Run the script; None while Redis does not answer."""
        async with self._calls:
            if self.is_degraded and (self._clock.now() < self._next_try_s or not await self._pay()):
                return None
            return await self._call(request_id, charges, todo)

    async def _call(self, request_id: str, charges: _Charges, todo: Todo) -> list[Any] | None:
        arguments: list[str | int] = [request_id, int(LEASE_S), todo]
        for charge, amount in charges:
            arguments += [charge.quota.period, charge.quota.capacity, amount]
        try:
            answer: list[Any] = await self._script(
                keys=[self._prefix + charge.key for charge, _ in charges], args=arguments
            )
        except self._errors as error:
            self._lost(error)
            return None
        return answer

    def _lost(self, error: Exception) -> None:
        if not self.is_degraded:
            log.warning("redis_gone", error=str(error), rule="each gateway enforces the limits by itself")
        self._next_try_s = self._clock.now() + RETRY_S

    def _owe(self, charges: _Charges) -> None:
        for charge, amount in charges:
            if charge.quota.is_budget:
                self._owed[charge.key] = charge, self._owed.get(charge.key, (charge, 0))[1] + amount

    async def _pay(self) -> bool:
        """Tell Redis what it missed. Returns whether it answers."""
        owed, self._owed = self._owed, {}
        if await self._call("", list(owed.values()), "settle") is None:
            self._owe(list(owed.values()))
            return False
        num_requests = len(self._unsettled)
        for request_id, (charges, todo) in list(self._unsettled.items()):
            if await self._call(request_id, charges, todo) is None:
                return False
            self._unsettled.pop(request_id, None)
        if self.is_degraded:
            log.info("redis_back", budgets=len(owed), requests=num_requests)
            self._next_try_s = 0.0
        return True
