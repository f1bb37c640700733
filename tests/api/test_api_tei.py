"""Forms of Text Embeddings Inference, Cohere and vLLM's classifier, over a frontend without an engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend

from quire.engine.sentences import kept_of_pair
from quire.pooling import SentenceSpec
from quire.request import Pooling


def encoder(max_model_len: int = 64, **more: Any) -> Api:
    frontend = FakeFrontend(max_model_len=max_model_len)
    prompts = (("query", "q: "), ("document", ""))
    sentence = SentenceSpec("mean", prompts=prompts, **more)
    frontend.model = replace(frontend.model, writes_text=False, sentence=sentence)
    return Api(frontend)


def tei_error(response: Any, status: int) -> dict[str, Any]:
    """The error in TEI's form."""
    assert response.status_code == status, response.text
    error = response.json()
    assert set(error) == {"error", "error_type", "param"}
    assert error["error_type"] == ("Validation" if status < 500 else "Backend")
    return dict(error)


def unit(values: Any) -> list[float]:
    return list(np.array(values) / math.sqrt(sum(x * x for x in values)))


def test_vectors_in_the_form_of_tei() -> None:
    api = encoder()
    raw = [api.frontend.pooled(text, Pooling("mean")) for text in (b"abc", b"q: de")]
    assert api.post("/embed", {"inputs": ["abc"]}).json() == [pytest.approx(unit(raw[0]))]
    assert api.post("/embed", {"inputs": "abc", "normalize": False}).json() == [list(raw[0])]
    answer = api.post("/embed", {"inputs": "de", "prompt_name": "query", "dimensions": 2}).json()
    assert answer == [pytest.approx(unit(raw[1][:2]))]
    assert api.post("/embed", {"inputs": "x" * 80, "truncate": True}).status_code == 200
    for body, param in (
        ({"inputs": "x" * 80}, "inputs"),
        ({"inputs": None}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"inputs": "a", "truncation_direction": "Left"}, "truncation_direction"),
        ({"inputs": "a", "dimensions": 9}, "dimensions"),
        ({"inputs": "a", "prompt_name": "p"}, "prompt_name"),
    ):
        assert tei_error(api.post("/embed", body), 400)["param"] == param


def test_a_row_per_token() -> None:
    api = encoder()
    rows = api.post("/embed_all", {"inputs": ["abc", "de"]}).json()
    for text, found in zip((b"abc", b"de"), rows, strict=True):
        ids = [256, *text]
        assert np.array(found).flatten().tolist() == list(api.frontend.pooled(ids, Pooling("tokens")))
        assert len(found) == len(ids)
    assert tei_error(Api().post("/embed_all", {"inputs": "abc"}), 400)["param"] == "model"


def test_sparse_vectors_in_the_form_of_tei() -> None:
    api = encoder(sparse=True)
    found = api.post("/embed_sparse", {"inputs": ["abc", "de"], "prompt_name": "query"}).json()
    for text, weights in zip((b"q: abc", b"q: de"), found, strict=True):
        ids = [256, *text]
        assert weights == [{"index": i, "value": token_id / 4} for i, token_id in enumerate(ids)]
    assert api.post("/embed_sparse", {"inputs": "x" * 80, "truncate": True}).status_code == 200
    assert tei_error(api.post("/embed_sparse", {"inputs": "x" * 80}), 400)["param"] == "inputs"
    refused = error_of(api.post("/v1/embeddings", {"input": "a"}), 400)["message"]
    assert "ask it for those (/embed_sparse)" in refused
    assert tei_error(api.post("/embed", {"inputs": "a"}), 400)["error"] == refused
    assert "no sparse vectors" in tei_error(encoder().post("/embed_sparse", {"inputs": "a"}), 400)["error"]


def test_the_address_alone_is_read_as_the_model_says() -> None:
    for more, path, body in (
        ({}, "/embed", {"inputs": "abc"}),
        ({"sparse": True}, "/embed_sparse", {"inputs": "abc"}),
        ({"labels": ("yes",)}, "/rerank", {"query": "a", "texts": ["b", "c"]}),
        ({"labels": ("a", "b")}, "/predict", {"inputs": "abc"}),
    ):
        api = encoder(**more)
        answer = api.post("/", body)
        assert answer.status_code == 200, answer.text
        assert answer.json() == api.post(path, body).json()
    assert tei_error(encoder().post("/", {"inputs": ""}), 400)["param"] == "inputs"


def test_similarities() -> None:
    api = encoder()
    body = {"inputs": {"source_sentence": "abc", "sentences": ["de", "abc"]}}
    vectors = [unit(api.frontend.pooled(text, Pooling("mean"))) for text in (b"abc", b"de")]
    assert api.post("/similarity", body).json() == pytest.approx([np.dot(*vectors), 1.0])
    error = tei_error(api.post("/similarity", {"inputs": {"source_sentence": "abc", "sentences": []}}), 400)
    assert error["param"] == "inputs.sentences"


def test_rankings_in_the_form_of_tei() -> None:
    api = encoder(labels=("LABEL_0",))
    texts = ["b", "c", "a"]
    for path in ("/rerank", "/v1/rerank"):
        for raw in (False, True):
            found = api.post(
                path, {"query": "a", "texts": texts, "raw_scores": raw, "return_text": raw}
            ).json()
            for entry in found:
                ids, second = api.frontend.tokenizer.encode_pair("a", texts[entry["index"]])
                pooling = Pooling("logits" if raw else "classify", second_from=second)
                assert entry["score"] == api.frontend.pooled(ids, pooling)[0]
                assert entry.get("text") == (texts[entry["index"]] if raw else None)
            assert [entry["score"] for entry in found] == sorted((e["score"] for e in found), reverse=True)
    assert error_of(api.post("/rerank", {"query": "a", "texts": []}), 400)["param"] == "texts"
    error = error_of(Api().post("/rerank", {"query": "a", "texts": ["b"], "raw_scores": True}), 400)
    assert error["param"] == "raw_scores"


def test_a_pair_is_cut_where_the_request_says_so() -> None:
    api = encoder(8, labels=("LABEL_0",))
    body: dict[str, Any] = {"query": "abc", "documents": ["d" * 20, "e"]}
    assert error_of(api.post("/v1/rerank", body), 400)["param"] == "documents"
    assert api.post("/v1/rerank", {**body, "truncate": True}).status_code == 200
    lengths = [len(each.prompt) for each in api.frontend.submitted]
    assert max(lengths) <= 8
    assert error_of(Api().post("/v1/rerank", {**body, "truncate": True}), 400)["param"] == "truncate"


@pytest.mark.parametrize(
    ("first", "second", "room", "kept"),
    [
        (3, 9, 8, (3, 5)),
        (9, 3, 8, (5, 3)),
        (9, 9, 7, (3, 4)),
        (9, 8, 7, (4, 3)),
        (2, 2, 8, (2, 2)),
        (4, 9, 8, (4, 4)),
    ],
)
def test_the_longer_text_of_a_pair_is_cut_first(
    first: int, second: int, room: int, kept: tuple[int, int]
) -> None:
    texts = [None, *[0] * first, None, *[1] * second, None]
    places = kept_of_pair(texts, room + 3)
    left = [texts[place] for place in places]
    assert (left.count(0), left.count(1), left.count(None)) == (*kept, 3)
    assert places == sorted(places)
    assert places[1 : 1 + kept[0]] == list(range(1, 1 + kept[0]))


PAIR = {"text_1": "a", "text_2": "b"}


def test_labels_of_texts_and_pairs() -> None:
    api = encoder(labels=("bad",))
    score = api.frontend.pooled(b"abc", Pooling("classify"))[0]
    answer = api.post("/classify", {"model": "tiny", "input": ["abc", "d"]}).json()
    assert answer["data"][0] == {"index": 0, "label": "bad", "probs": [score], "num_classes": 1}
    assert answer["usage"]["prompt_tokens"] == 4
    assert api.post("/predict", {"inputs": "abc"}).json() == [{"score": score, "label": "bad"}]
    assert api.post("/predict", {"inputs": [["abc"], ["a", "b"]]}).json()[0] == [
        {"score": score, "label": "bad"}
    ]
    assert len(api.post("/predict", {"inputs": ["a", "b"]}).json()) == 1
    for path, body, param in (
        ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs"),
        ("/predict", {"inputs": 5}, "inputs"),
    ):
        assert tei_error(api.post(path, body), 400)["param"] == param
    assert error_of(api.post("/classify", {"input": []}), 400)["param"] == "input"
    many = encoder(labels=("good", "bad"))
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/score", PAIR),
    ):
        assert "labels (/classify)" in error_of(many.post(path, {"model": "tiny", **body}), 400)["message"]
    assert "no classifier" in tei_error(encoder().post("/predict", {"inputs": "a"}), 400)["error"]
    assert "no classifier" in error_of(encoder().post("/classify", {"input": "a"}), 400)["message"]


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, {"embedding": {"pooling": "mean"}}),
        ({"sparse": True}, {"embedding": {"pooling": "splade"}}),
        ({"labels": ("yes",)}, {"reranker": {"id2label": {"0": "yes"}, "label2id": {"yes": 0}}}),
        (
            {"labels": ("a", "b")},
            {"classifier": {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}},
        ),
    ],
)
def test_the_model_in_the_form_of_tei(more: dict[str, Any], kind: dict[str, Any]) -> None:
    info = encoder(**more).call("GET", "/info").json()
    assert info["model_type"] == kind
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("tiny", 64, 2048)


def test_the_type_of_an_input_chooses_its_prompt() -> None:
    api = encoder()

    def vector(**more: Any) -> Any:
        return api.post("/v1/embeddings", {"input": "de", **more}).json()["data"][0]["embedding"]

    assert vector(input_type="query") == vector(input_type="search_query") == vector(prompt_name="query")
    assert vector(input_type="passage") == vector(prompt_name="document") != vector(input_type="query")
    assert vector(input_type="clustering") == vector()
    error = error_of(
        api.post("/v1/embeddings", {"input": "a", "input_type": "query", "prompt_name": "query"}), 400
    )
    assert error["param"] == "input_type"


def test_vectors_in_the_form_of_cohere() -> None:
    api = encoder()
    body = {"model": "tiny", "texts": ["de"], "input_type": "search_query", "embedding_types": ["float"]}
    answer = api.post("/v2/embed", body).json()
    wanted = unit(api.frontend.pooled([256, *b"q: de"], Pooling("mean")))
    assert answer["embeddings"] == {"float": [pytest.approx(wanted)]}
    assert answer["meta"]["billed_units"] == {"input_tokens": 6}
    error = error_of(api.post("/v2/embed", {**body, "embedding_types": ["int8"]}), 400)
    assert error["param"].startswith("embedding_types")
    error = error_of(api.post("/v2/embed", {**body, "texts": ["x" * 80], "truncate": "NONE"}), 400)
    assert error["param"] == "texts"
