"""`LLM`: the offline API, with vLLM's names. Runs in this process and needs only what the model needs.

from quire import LLM, SamplingParams
llm = LLM("quill")
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from quire.engine.beams import BeamSearchOutput, BeamSearchParams
from quire.engine.offline import OfflineEngine
from quire.engine.output import OutputChunk
from quire.engine.results import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput, embedded, scored
from quire.errors import RequestError
from quire.request import SamplingParams
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.pooling import Scoring

Prompt = str | Mapping[str, Any] | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
# Loaded with the first vector or score.
_POOLING, _SENTENCES = "quire.engine.pooling", "quire.engine.sentences"


class LLM(OfflineEngine):
    """A loaded model. `generate` and `chat` take one or many prompts and return when all of them are done.

    Keywords are the fields of `quire.args.EngineArgs`: ``dtype, quantize, max_model_len, max_num_seqs,
    max_num_batched_tokens, kv_memory`` (or ``num_kv_blocks``), ``enable_prefix_caching, load_format, seed`` …, and
    vLLM's spellings ``quantization``, ``num_gpu_blocks_override`` and ``gpu_memory_utilization``. ``seed`` seeds
    random weights, and the requests that have no seed: the same script gives the same text.

    ``lora={"name": "folder"}`` loads LoRA adapters for ``adapter="name"`` in calls; `adapters` loads more.
    """

    def __init__(self, model: str = "quill", **settings: Any) -> None:
        """Load ``model``: "quill", a local folder, a .gguf file or a hub id.

        Raises:
            ConfigError: a keyword that is unknown or wrong.
            ModelLoadError: the model is missing, damaged or not supported.
        """
        super().__init__(model, settings)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Return one `RequestOutput` per prompt, in order.

        A prompt is a string, a list of ids, or ``{"prompt": …}`` or ``{"prompt_token_ids": […]}``.
        ``sampling_params`` is one for all or one per prompt; None means the model's defaults. ``use_tqdm`` shows a
        progress bar. ``adapter``: a LoRA adapter for all, or one per prompt (None: the base model).

        Raises:
            RequestError: a prompt or its parameters cannot be served; then nothing has run. An error that shows later
                ends its prompt with finish_reason "error", and the other prompts go on.
        """
        items = _as_list(prompts)
        params = _params_of(sampling_params or self.get_default_sampling_params(), len(items))
        adapters = self.adapters.for_each(adapter, len(items))
        requests = [
            self._request(_ids_of(item, index, self._tokenizer), params[index], adapter=adapters[index])
            for index, item in enumerate(items)
        ]
        return self._run(requests, [_text_of(item) for item in items], use_tqdm, continues=True)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Return the answer to one conversation, or to each of several. ``adapter``: as for `generate`.

        A model that sees takes images as parts of a message, in OpenAI's form with a ``data:`` URL.

        Raises:
            RequestError: the model has no chat template, the template rejects the messages, or an image is wrong.
        """
        chats = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        chats, files = self._without_images(chats)
        texts = [
            self.render_chat(
                chat,  # type: ignore[arg-type]
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for chat in chats
        ]
        params = _params_of(sampling_params or self.get_default_sampling_params(), len(texts))
        adapters = self.adapters.for_each(adapter, len(texts))
        requests = [
            self._request(self._chat_ids(text, seen), sampling, adapter=adapter)
            for text, seen, sampling, adapter in zip(texts, files, params, adapters, strict=True)
        ]
        return self._run(requests, texts, use_tqdm, continues=continue_final_message)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        adapter: str | None = None,
    ) -> Iterator[OutputChunk]:
        """Yield the chunks of one prompt as they arrive. Leaving the iterator aborts the request."""
        ids = _ids_of(prompt, 0, self._tokenizer, add_special_tokens=add_special_tokens)
        (adapter_name,) = self.adapters.for_each(adapter, 1)
        request = self._request(
            ids, sampling_params or self.get_default_sampling_params(), adapter=adapter_name
        )
        return (chunk for _, chunk in self._chunks(deque([request]), continues=True))

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Return the best ``beam_width`` continuations of each prompt.

        Raises:
            RequestError: as of `generate`.
        """
        return [
            BeamSearchOutput.from_output(output)
            for output in self.generate(prompts, params.sampling(), use_tqdm)
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling: Literal["last", "mean"] | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return one vector per prompt: the last hidden state, or the mean of all, scaled to length one.

        An encoder pools and scales as its own files say. ``dimensions``: keep only that many leading elements.

        Raises:
            RequestError: a prompt, ``pooling`` or ``dimensions`` is wrong.
            StepError: the model failed on a prompt.
        """
        items, vectors_of = _as_list(prompts), import_module(_SENTENCES).vectors_of
        wanted, lead, scale = vectors_of(self.model, pooling)
        normalize = scale if normalize is None else normalize
        nothing_sampled = import_module(_POOLING).NOTHING_SAMPLED
        items = [lead + item if isinstance(item, str) else item for item in items]
        requests = [
            self._request(_ids_of(item, index, self._tokenizer), nothing_sampled, pooling=wanted)
            for index, item in enumerate(items)
        ]
        outputs = self._run(requests, [None] * len(items), use_tqdm, continues=True)
        return [embedded(output, dimensions=dimensions, normalize=normalize) for output in outputs]

    def embed_sparse(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True
    ) -> list[dict[int, float]]:
        """Return the tokens that a sparse encoder (SPLADE) gives each prompt, with their weights above 0.

        Raises:
            RequestError: a prompt is wrong, or the model gives no sparse vectors.
            StepError: the model failed on a prompt.
        """
        sentences = import_module(_SENTENCES)
        wanted, lead = sentences.rows_of(self.model, "sparse"), sentences.prompt_before(self.model, None)
        nothing_sampled = import_module(_POOLING).NOTHING_SAMPLED
        items = [lead + item if isinstance(item, str) else item for item in _as_list(prompts)]
        requests = [
            self._request(_ids_of(item, index, self._tokenizer), nothing_sampled, pooling=wanted)
            for index, item in enumerate(items)
        ]
        outputs = self._run(requests, [None] * len(items), use_tqdm, continues=True)
        return [dict(sentences.sparse_weights(output.pooled or ())) for output in outputs]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        scoring: Scoring | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document answers the query, or its own query (`quire.engine.pooling`).

        Raises:
            RequestError: a text or ``scoring`` is wrong; ``instruction`` goes with "yes_no".
            StepError: the model failed on a pair.
        """
        maker = import_module(_POOLING)
        pairs = maker.pairs_of(query, documents)
        render = self._chat_template.render if self._chat_template.names else None
        of_pairs = import_module(_SENTENCES).pair_prompts
        prompts = of_pairs(self.model, self._tokenizer, pairs, scoring, instruction, render)
        requests = [self._request(p.token_ids, p.sampling, pooling=p.pooling) for p in prompts]
        outputs = self._run(requests, [None] * len(requests), use_tqdm, continues=True)
        return [scored(output, p.num_query_tokens) for output, p in zip(outputs, prompts, strict=True)]

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True, **options: Any) -> str:
        """Return the prompt text of a conversation; ``options`` as for `ChatTemplate.render`."""
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **options)

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's generation_config.json proposes."""
        return self.model.sampling()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_of(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"sampling_params has {len(params)} entries for {count} prompts: give one, or one for each prompt.",
            param="sampling_params",
        )
    return list(params)


def _ids_of(
    prompt: Prompt, index: int, tokenizer: Tokenizer, *, add_special_tokens: bool = True
) -> Sequence[int]:
    """Return the token ids of prompt number ``index``."""
    text = _text_of(prompt)
    if text is not None:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    ids: Any = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        return ids
    raise RequestError(
        f"prompt {index} is {prompt!r:.80}: give a string, a list of token ids, or a dict with prompt or "
        "prompt_token_ids.",
        param="prompt",
    )


def _text_of(prompt: Prompt) -> str | None:
    """Return the text of a prompt; None if it is given as ids."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt:
        text = prompt.get("prompt")
        if isinstance(text, str):
            return text
    return None
