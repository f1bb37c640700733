"""The dialects of the API, a folder each, and the one list of them (`quire.api.dialect`)."""

from __future__ import annotations

from quire.api.dialect import Dialect, Handled
from quire.api.late import Late

_HERE = "quire.api.dialects"
_STORED = f"{_HERE}.responses.stored:StoredResponses"
_OLLAMA = f"{_HERE}.ollama.models:OllamaModels"

OPENAI = Dialect(
    "openai",
    read={
        "/v1/completions": Late(f"{_HERE}.openai.completions:completion_job"),
        "/v1/chat/completions": Late(f"{_HERE}.openai.chat:chat_job"),
        "/v1/embeddings": Late(f"{_HERE}.openai.pooling:embeddings_job"),
        **dict.fromkeys(("/v1/score", "/score"), Late(f"{_HERE}.openai.pooling:score_job")),
        **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), Late(f"{_HERE}.openai.pooling:rerank_job")),
    },
    compute={
        "/tokenize": Late(f"{_HERE}.openai.text_tools:tokenize"),
        "/detokenize": Late(f"{_HERE}.openai.text_tools:detokenize"),
        "/v1/chat/completions/render": Late(f"{_HERE}.openai.text_tools:render"),
    },
    loaded_at_start=("/v1/completions", "/v1/chat/completions"),
)
ANTHROPIC = Dialect(
    "anthropic",
    read={"/v1/messages": Late(f"{_HERE}.anthropic.messages:messages_job")},
    compute={"/v1/messages/count_tokens": Late(f"{_HERE}.anthropic.messages:count_tokens")},
)
RESPONSES = Dialect(
    "responses",
    read={"/v1/responses": Late(f"{_HERE}.responses.endpoints:responses_job")},
    compute={"/v1/responses/input_tokens": Late(f"{_HERE}.responses.endpoints:count_input")},
    handled=(
        Handled("/v1/responses/{response_id}", f"{_STORED}.one", ("GET", "DELETE")),
        Handled("/v1/responses/{response_id}/input_items", f"{_STORED}.input_items"),
        Handled("/v1/responses/{response_id}/cancel", f"{_STORED}.cancel", ("POST",)),
    ),
)
NATIVE = Dialect(
    "native",
    read={
        "/completion": Late(f"{_HERE}.native.llama_cpp:llama_completion_job"),
        "/infill": Late(f"{_HERE}.native.llama_cpp:llama_infill_job"),
        "/generate": Late(f"{_HERE}.native.tgi:tgi_job"),
        "/generate_stream": Late(f"{_HERE}.native.tgi:tgi_stream_job"),
    },
)
OLLAMA = Dialect(
    "ollama",
    read={
        "/api/chat": Late(f"{_HERE}.ollama.endpoints:ollama_chat_job"),
        "/api/generate": Late(f"{_HERE}.ollama.endpoints:ollama_generate_job"),
        "/api/embed": Late(f"{_HERE}.ollama.endpoints:embed_job"),
        "/api/embeddings": Late(f"{_HERE}.ollama.endpoints:embeddings_job"),
    },
    compute={"/api/show": Late(f"{_HERE}.ollama.models:show")},
    handled=(
        *(Handled(f"/api/{name}", f"{_OLLAMA}.{name}") for name in ("tags", "ps", "version")),
        *(
            Handled(f"/api/{name}", f"{_OLLAMA}.manage", ("POST",), is_described=False)
            for name in ("pull", "push", "create", "copy")
        ),
        Handled("/api/delete", f"{_OLLAMA}.manage", ("DELETE",), is_described=False),
        Handled("/api/blobs/{digest}", f"{_OLLAMA}.manage", ("GET", "POST"), is_described=False),
    ),
    stage=f"{_HERE}.ollama.loads:ModelLoads",
)
_OF_TEI = {
    "/": "root",
    "/embed": "tei_embed",
    "/embed_all": "token_rows",
    "/embed_sparse": "sparse",
    "/predict": "predict",
}
_OF_TEI |= {"/similarity": "similarity", "/classify": "classify", "/v2/embed": "cohere_embed"}
TEI = Dialect(
    "tei",
    read={path: Late(f"{_HERE}.tei.endpoints:{name}_job") for path, name in _OF_TEI.items()},
    handled=(Handled("/info", f"{_HERE}.tei.info:Info.show"),),
)
# Routes are tried in this order: the busy ones come first.
DIALECTS = (OPENAI, ANTHROPIC, RESPONSES, NATIVE, OLLAMA, TEI)
