"""Fields of llama.cpp's and TGI's own forms, as ``/openapi.json`` describes them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from quire.api.dialects.openai.fields import CompletionRequest
from quire.http.wire import AnyObject, Text


class InfillRequest(CompletionRequest):
    """Body of ``/infill``."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[
        list[dict[str, Any]] | None, Field(description="a list of objects with filename and text")
    ] = None


class TgiRequest(CompletionRequest):
    """Body of ``/generate`` and ``/generate_stream``. Fields of its own win over those of ``parameters``."""

    inputs: Text
    parameters: AnyObject | None = None
