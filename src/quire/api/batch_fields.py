"""Every field of OpenAI's create-batch request, classified as `field_tables` does."""

from __future__ import annotations

from quire.api.fields import Rule, used

BATCH: dict[str, Rule] = used(
    "input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"
)
EXPIRES_AFTER: dict[str, Rule] = used("anchor", "seconds")
