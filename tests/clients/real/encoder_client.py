"""Clients of encoders: vectors by OpenAI's, Text Embeddings Inference's and Cohere's forms, ranks, and cosines."""

from __future__ import annotations

import math

import cohere
import openai
from check import QUILL as ENCODER
from check import SCRIPTED as RANKER
from check import check, error_of
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

TEXTS = ["a cat", "dog b c", "query : cat"]
client = openai.OpenAI(base_url=ENCODER + "/v1", api_key="none", max_retries=0)


def plain() -> list[list[float]]:
    made = client.embeddings.create(model="quill", input=TEXTS, encoding_format="float")
    return [each.embedding for each in made.data]


VECTORS = plain()


def near(found: list[list[float]]) -> bool:
    pairs = zip(found, VECTORS, strict=True)
    return all(math.dist(a, b) < 1e-6 for a, b in pairs)


@check("openai: base64, floats, dimensions, a prompt by input_type")
def _() -> None:
    assert near([each.embedding for each in client.embeddings.create(model="quill", input=TEXTS).data])
    short = client.embeddings.create(model="quill", input="a cat", dimensions=8).data[0].embedding
    assert len(short) == 8
    asked = client.embeddings.create(model="quill", input="cat", extra_body={"input_type": "query"})
    assert math.dist(asked.data[0].embedding, VECTORS[2]) < 1e-6
    error = error_of(
        openai.BadRequestError, lambda: client.embeddings.create(model="quill", input="cat " * 99)
    )
    assert error.param == "input"


@check("huggingface_hub: feature_extraction, sentence_similarity")
def _() -> None:
    hub = InferenceClient(model=ENCODER + "/embed")
    assert near([hub.feature_extraction(text, normalize=True)[0].tolist() for text in TEXTS])
    asked = hub.feature_extraction("cat", prompt_name="query", normalize=True, truncate=True)
    assert math.dist(asked[0].tolist(), VECTORS[2]) < 1e-6
    cosines = InferenceClient(model=ENCODER + "/similarity").sentence_similarity(TEXTS[0], TEXTS[1:])
    assert abs(cosines[0] - sum(a * b for a, b in zip(VECTORS[0], VECTORS[1], strict=True))) < 1e-6


@check("langchain: OpenAIEmbeddings")
def _() -> None:
    vectors = OpenAIEmbeddings(
        model="quill", base_url=ENCODER + "/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert near(vectors.embed_documents(TEXTS))


@check("llama-index: OpenAI-like, Text Embeddings Inference, its reranker")
def _() -> None:
    like = OpenAILikeEmbedding(model_name="quill", api_base=ENCODER + "/v1", api_key="none")
    assert near(like.get_text_embedding_batch(TEXTS))
    tei = TextEmbeddingsInference(model_name="quill", base_url=ENCODER, truncate_text=True)
    assert near([tei.get_text_embedding(text) for text in TEXTS])
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in TEXTS]
    ranker = TextEmbeddingInference(base_url=RANKER, model_name="quill", top_n=2)
    best = ranker.postprocess_nodes(nodes, query_str="cat")
    assert len(best) == 2
    assert best[0].score >= best[1].score


@check("cohere: embed and rerank")
def _() -> None:
    co = cohere.ClientV2(api_key="none", base_url=ENCODER)
    made = co.embed(model="quill", texts=TEXTS, input_type="classification", embedding_types=["float"])
    assert near(made.embeddings.float_)
    asked = co.embed(model="quill", texts=["cat"], input_type="search_query", embedding_types=["float"])
    assert math.dist(asked.embeddings.float_[0], VECTORS[2]) < 1e-6
    ranked = cohere.ClientV2(api_key="none", base_url=RANKER).rerank(
        model="quill", query="cat", documents=TEXTS, top_n=2
    )
    first, second = ranked.results
    assert first.relevance_score >= second.relevance_score
