"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``: shapes and bad input, over a frontend without an engine."""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import replace
from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import TEMPLATE, FakeFrontend

from quire.errors import RequestError
from quire.pooling import SentenceSpec
from quire.request import Pooling


def embed(api: Api, **fields: Any) -> Any:
    response = api.post("/v1/embeddings", {"model": "tiny", "input": "abc", **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_embeddings() -> None:
    api = Api()
    body = embed(api, input=["abc", list(b"de")])
    assert body["object"] == "list"
    assert body["model"] == "tiny"
    assert body["determinism"] == "exact"
    assert [(d["object"], d["index"]) for d in body["data"]] == [("embedding", 0), ("embedding", 1)]
    for item, text in zip(body["data"], (b"abc", b"de"), strict=True):
        raw = api.frontend.pooled(text, Pooling("last"))
        length = math.sqrt(sum(x * x for x in raw))
        assert item["embedding"] == pytest.approx([x / length for x in raw])
    details = {"cached_tokens": 0}
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": details}


def test_embedding_options() -> None:
    api = Api()
    whole = embed(api, normalize=False)["data"][0]["embedding"]
    assert whole == list(api.frontend.pooled(b"abc", Pooling("last")))
    mean = embed(api, normalize=False, pooling="mean")["data"][0]["embedding"]
    assert mean == list(api.frontend.pooled(b"abc", Pooling("mean")))
    packed = embed(api, encoding_format="base64")["data"][0]["embedding"]
    numbers = struct.unpack("<6f", base64.b64decode(packed))
    assert list(numbers) == embed(api)["data"][0]["embedding"]
    cut = embed(api, dimensions=2)["data"][0]["embedding"]
    assert cut == pytest.approx([x / math.hypot(*whole[:2]) for x in whole[:2]])
    cut = embed(api, input="abcdef", truncate_prompt_tokens=3)
    assert cut["usage"]["prompt_tokens_details"]["truncated_tokens"] == 4  # <|end|> before the text
    assert embed(api, input="y" * 256)["usage"]["prompt_tokens"] == 256  # the whole context


def encoder_api(**more: Any) -> Api:
    """An app whose model is an encoder that takes 8 tokens."""
    frontend = FakeFrontend(max_model_len=8)
    prompts = (("query", "q: "), ("document", ""))
    frontend.model = replace(
        frontend.model, writes_text=False, sentence=SentenceSpec("mean", prompts=prompts, **more)
    )
    return Api(frontend)


def test_an_encoder_embeds_as_its_files_say() -> None:
    api = encoder_api(normalize=False, default_prompt="query")
    vector = embed(api, input="abc")["data"][0]["embedding"]
    assert vector == list(api.frontend.pooled(b"q: abc", Pooling("mean")))
    vector = embed(api, input="abc", prompt_name="document")["data"][0]["embedding"]
    assert vector == list(api.frontend.pooled(b"abc", Pooling("mean")))
    error = error_of(
        api.post("/v1/embeddings", {"model": "tiny", "input": "a", "prompt_name": "answer"}), 400
    )
    assert error["param"] == "prompt_name"
    assert "'query', 'document'" in error["message"]
    error = error_of(api.post("/v1/embeddings", {"model": "tiny", "input": "a", "pooling": "last"}), 400)
    assert "trained with 'mean'" in error["message"]


def test_a_long_text_is_cut_where_the_request_says_so() -> None:
    api = encoder_api(normalize=False)
    error = error_of(api.post("/v1/embeddings", {"model": "tiny", "input": "abcdefghijkl"}), 400)
    assert "12 tokens" in error["message"]
    body = embed(api, input="abcdefghijkl", truncate=True)
    assert body["usage"]["prompt_tokens"] == 8
    assert body["usage"]["prompt_tokens_details"]["truncated_tokens"] == 5


def test_a_cross_encoder_ranks() -> None:
    api = encoder_api(labels=("LABEL_0",))
    body = api.post("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b", "c", "a"]}).json()
    scores = {result["index"]: result["relevance_score"] for result in body["results"]}
    for index, document in enumerate(("b", "c", "a")):
        ids, second = api.frontend.tokenizer.encode_pair("a", document)
        assert scores[index] == api.frontend.pooled(ids, Pooling("classify", second_from=second))[0]
    assert list(scores) == sorted(scores, key=lambda index: -scores[index])
    wrong = {"model": "tiny", "query": "a", "documents": ["b"], "scoring": "yes_no"}
    assert error_of(api.post("/v1/rerank", wrong), 400)["param"] == "scoring"
    error = error_of(api.post("/v1/embeddings", {"model": "tiny", "input": "a"}), 400)
    assert "is a classifier, which gives no vectors" in error["message"]
    error = error_of(encoder_api().post("/v1/score", {"model": "tiny", "text_1": "a", "text_2": "b"}), 400)
    assert "needs a cross-encoder" in error["message"]


def test_an_encoder_writes_no_text() -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        error = error_of(encoder_api().post(path, {"model": "tiny", **fields}), 400)
        assert error["param"] == "model"
        assert "is an encoder, which writes no text" in error["message"]


MESSAGES = [{"role": "user", "content": "a"}]
EMBEDDING_ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "required"),
    ({"input": []}, "input", "not empty"),
    ({"input": [1, "a"]}, "input[1]", "token id"),
    ({"input": ["a", 1]}, "input[1]", "a string or a list"),
    ({"input": {"a": 1}}, "input", "string"),
    ({"input": ""}, "input", "input is empty"),
    ({"input": [999]}, "input", "0…256"),
    ({"input": "y" * 257}, "input", "257 tokens"),
    ({"input": ["a"] * 2049}, "input", "2049"),
    ({"encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ({"dimensions": 0}, "dimensions", "≥ 1"),
    ({"dimensions": 7}, "dimensions", "1…6"),
    ({"dimensions": "6"}, "dimensions", "an integer"),
    ({"pooling": "cls"}, "pooling", "'last' or 'mean'"),
    ({"pooling": ["last"]}, "pooling", "'last' or 'mean'"),
    ({"normalize": 1}, "normalize", "true or false"),
    ({"messages": []}, "messages", "Send input"),
    ({"stream": True}, "stream", "not supported"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1…256"),
    ({"truncate_prompt_tokens": "1"}, "truncate_prompt_tokens", "an integer"),
    ({"embed_dtype": "float16"}, "embed_dtype", "float32"),
    ({"user": 5}, "user", "a string"),
]


@pytest.mark.parametrize(("fields", "param", "words"), EMBEDDING_ERRORS)
def test_bad_embedding_requests(fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(Api().post("/v1/embeddings", {"input": "abc", **fields}), 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
@pytest.mark.parametrize("scoring", ["likelihood", "yes_no"])
def test_rerank(path: str, scoring: str) -> None:
    api = Api(Worded())
    documents = ["aa", {"text": "b"}, "cccc", "d"]
    body = {"model": "tiny", "query": "q?", "documents": documents, "scoring": scoring}
    whole = api.post(path, body).json()
    results = whole["results"]
    assert sorted(r["index"] for r in results) == [0, 1, 2, 3]
    assert all(r["document"]["text"] == ("aa", "b", "cccc", "d")[r["index"]] for r in results)
    scores = [r["relevance_score"] for r in results]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < s < 1 for s in scores)
    if scoring == "likelihood":  # every token has the same there
        assert scores == pytest.approx([math.exp(-0.25)] * 4)
        assert [r["index"] for r in results] == [0, 1, 2, 3]
    else:
        assert len(set(scores)) > 1
    cut = api.post(path, {**body, "top_n": 2, "return_documents": False}).json()["results"]
    assert cut == [{"index": r["index"], "relevance_score": r["relevance_score"]} for r in results[:2]]
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] > 0


class Worded(FakeFrontend):
    """Room for the question, and no template that drops it."""

    def __init__(self) -> None:
        super().__init__(max_model_len=2048)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score(path: str) -> None:
    api = Api(Worded())
    fields = {"text_1": "q", "text_2": ["a", "bb", "c"], "scoring": "yes_no"}
    body = api.post(path, fields).json()
    assert [(d["object"], d["index"]) for d in body["data"]] == [("score", 0), ("score", 1), ("score", 2)]
    scores = [d["score"] for d in body["data"]]
    pairs = api.post(path, {**fields, "text_1": ["q", "q", "q"]}).json()
    assert [d["score"] for d in pairs["data"]] == scores
    for text, score in zip(["a", "bb", "c"], scores, strict=True):
        (one,) = api.post(path, {**fields, "text_2": text}).json()["data"]
        assert one["score"] == score


def test_what_a_score_asks() -> None:
    api = Api(Worded())
    api.post("/v1/score", {"text_1": "why?", "text_2": "so"})
    api.post("/v1/score", {"text_1": "why?", "text_2": "so", "scoring": "yes_no", "instruction": "Be fair"})
    likelihood, yes_no = api.frontend.submitted
    assert bytes(likelihood.prompt) == b"Document:\nso\n\nQuery:\nwhy?"  # type: ignore[arg-type]
    assert (likelihood.sampling.max_tokens, likelihood.sampling.prompt_logprobs) == (0, 0)
    text = bytes(yes_no.prompt).decode()  # type: ignore[arg-type]
    assert text.startswith("<system>")
    assert "Be fair" in text
    assert "why?" in text
    assert TEMPLATE.startswith("{%")
    cut = api.post("/v1/score", {"text_1": "q", "text_2": "abcdef", "max_tokens_per_doc": 2}).json()
    assert bytes(api.frontend.submitted[-1].prompt).startswith(b"Document:\nab\n")  # type: ignore[arg-type]
    assert cut["usage"]["prompt_tokens_details"]["truncated_tokens"] == 4


SCORE_ERRORS: list[tuple[str, dict[str, Any], str, str]] = [
    ("rerank", {"query": None}, "query", "required"),
    ("rerank", {"query": 5}, "query", "a string"),
    ("rerank", {"query": ""}, "query", "empty"),
    ("rerank", {"documents": []}, "documents", "at least one"),
    ("rerank", {"documents": "abc"}, "documents", "a list"),
    ("rerank", {"documents": ["a", 5]}, "documents[1]", "a string, or an object"),
    ("rerank", {"documents": [{"text": 5}]}, "documents[0].text", "a string"),
    ("rerank", {"documents": [{"txt": "a"}]}, "documents[0].text", "required"),
    ("rerank", {"documents": [""]}, "documents[0]", "empty"),
    ("rerank", {"documents": ["y" * 300]}, "documents", "320 tokens"),
    ("rerank", {"top_n": 0}, "top_n", "≥ 1"),
    ("rerank", {"top_n": 1.5}, "top_n", "an integer"),
    ("rerank", {"return_documents": "yes"}, "return_documents", "true or false"),
    ("rerank", {"scoring": "cosine"}, "scoring", "'likelihood' or 'yes_no'"),
    ("rerank", {"instruction": "x"}, "instruction", "yes_no"),
    ("rerank", {"max_tokens_per_doc": 0}, "max_tokens_per_doc", "≥ 1"),
    ("rerank", {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "max_tokens_per_doc"),
    ("score", {"text_1": None}, "text_1", "required"),
    ("score", {"text_1": ["a", "b"]}, "text_1", "2 elements"),
    ("score", {"text_2": []}, "text_2", "empty"),
    ("score", {"text_2": 5}, "text_2", "a string or a list"),
    ("score", {"model": "other"}, "model", "not served"),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), SCORE_ERRORS)
def test_bad_score_requests(path: str, fields: dict[str, Any], param: str, words: str) -> None:
    good = {"query": "q", "documents": ["a"]} if path == "rerank" else {"text_1": "q", "text_2": "a"}
    error = error_of(Api().post("/v1/" + path, {**good, **fields}), 404 if param == "model" else 400)
    assert error["param"] == param
    assert words in error["message"]


def test_many_inputs_go_a_few_at_a_time() -> None:
    most = 0

    class Counting(FakeFrontend):
        async def submit(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal most
            most = max(most, self.num_requests + 1)
            return await super().submit(*args, **kwargs)

    data = embed(Api(Counting(step_s=0.05)), input=[[i % 250] for i in range(700)], normalize=False)["data"]
    assert [d["index"] for d in data] == list(range(700))
    frontend = FakeFrontend()
    assert data[600]["embedding"] == list(frontend.pooled([100], Pooling("last")))
    assert 2 < most <= 256  # up to 256 where they are submitted faster than they end


def test_a_failed_prompt_fails_the_request() -> None:
    frontend = FakeFrontend()
    frontend.refusal = ("no room", "capacity")
    assert error_of(Api(frontend).post("/v1/embeddings", {"input": "a"}), 503)["code"] == "queue_full"
    with pytest.raises(RequestError, match="pooling"):
        Pooling("first")  # type: ignore[arg-type]
