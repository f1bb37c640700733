"""`ContiguousPool`: memory as servers had it before paging, one contiguous range per request, as long as it may get."""

from __future__ import annotations


class ContiguousPool:
    """First-fit allocation of ranges of ``num_tokens`` places; neighbouring free ranges become one."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.free: list[tuple[int, int]] = [(0, num_tokens)]  # (start, end), ascending
        self.ranges: dict[int, tuple[int, int]] = {}  # owner → (start, end)

    def reserve(self, owner: int, length: int) -> bool:
        """Reserve ``length`` places in one range; False where no free range is so long."""
        assert owner not in self.ranges
        for place, (start, end) in enumerate(self.free):
            if end - start >= length:
                self.ranges[owner] = (start, start + length)
                self.free[place : place + 1] = [(start + length, end)] if end - start > length else []
                return True
        return False

    def release(self, owner: int) -> None:
        """Give the range of ``owner`` back."""
        joined: list[tuple[int, int]] = []
        for start, end in sorted([*self.free, self.ranges.pop(owner)]):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self.free = joined

    @property
    def num_free(self) -> int:
        """Free places, in ranges of any length."""
        return sum(end - start for start, end in self.free)
