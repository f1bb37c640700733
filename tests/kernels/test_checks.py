"""What the tests of ops share: values that one test goes through."""

from __future__ import annotations

import inspect

import pytest
from tests.kernels.checks import each


def test_every_value_is_tried_and_a_failure_names_its_own() -> None:
    tried = []

    @each("value", [1, 2, 3])
    def check(other: int, value: int) -> None:
        tried.append((other, value))
        assert value < 3

    assert list(inspect.signature(check).parameters) == ["other"]
    with pytest.raises(AssertionError) as caught:
        check(other=7)
    assert tried == [(7, 1), (7, 2), (7, 3)]
    assert caught.value.__notes__ == ["value: 3"]


@pytest.mark.parametrize(("skipping", "tried"), [({1}, [2]), ({1, 2}, None)])
def test_a_value_that_skips_leaves_the_others(skipping: set[int], tried: list[int] | None) -> None:
    run = []

    @each("value", [1, 2])
    def check(value: int) -> None:
        if value in skipping:
            pytest.skip("not here")
        run.append(value)

    if tried is None:
        with pytest.raises(pytest.skip.Exception, match="not here"):
            check()
    else:
        check()
        assert run == tried
