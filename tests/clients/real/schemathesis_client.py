"""schemathesis: what /openapi.json allows is accepted. Positive cases of every POST, with the served model's name."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import requests
import schemathesis
from check import SCRIPTED, check
from hypothesis import HealthCheck, Phase, given, seed, settings

CASES = 30  # of each operation
SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
KEPT = (
    "messages",
    "prompt",
    "input",
    "tokens",
    "query",
    "documents",
    "text_1",
    "text_2",
    "requests",
    "content",
)

description = schemathesis.openapi.from_url(SCRIPTED + "/openapi.json")
operations = [found.ok() for found in description.get_all_operations()]


def tamed(body: Any) -> Any:
    """The served model, and answers that end."""
    if not isinstance(body, dict):
        return body
    body = {**body, "model": "quill"}
    for name in SHORT:
        if isinstance(body.get(name), int):
            body[name] = max(1, body[name] % 9)
    return body


for operation in operations:
    if operation.method.upper() != "POST" or not operation.body:
        continue

    @check(f"POST {operation.path}")
    def _(operation: Any = operation) -> None:
        refused: Counter[str] = Counter()

        @seed(1)
        @settings(
            max_examples=CASES, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
        def run(case: Any) -> None:
            if isinstance(case.body, (dict, list)):
                path = operation.path
                for name, value in (case.path_parameters or {}).items():
                    path = path.replace("{" + name + "}", str(value))
                answer = requests.post(SCRIPTED + path, json=tamed(case.body), timeout=30)
                if answer.status_code in (400, 422) or answer.status_code >= 500:
                    refused[answer.text[:300]] += 1

        run()
        assert not refused, f"{refused.total()} of {CASES} refused: " + json.dumps(refused.most_common(6))
