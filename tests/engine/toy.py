"""A byte tokenizer and a toy model's facts, for tests of clients, frontend and supervisor."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.args import EngineArgs
from quire.config import DeviceInfo, EngineConfig
from quire.engine.prompts import ModelInfo
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.request import FinishReason, TokenEvent
from quire.resolve import resolve
from quire.text.token_text import BYTE_OF_CHAR, make_token_text
from quire.text.tokenizer import SpecialTokens, Tokenizer

EOS = 256
BOS = 257
VOCAB = 258


def byte_tokenizer() -> Tokenizer:
    """Id b is byte b (0…255); 256 is <eos>, 257 <bos>, both special."""
    vocab = dict(BYTE_OF_CHAR)
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<bos>", special=True)])
    special = SpecialTokens(roles={"bos_token": "<bos>", "eos_token": "<eos>"})
    return Tokenizer(backend, make_token_text(backend), special, {"default": CHAT_TEMPLATE})


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def model_info(max_model_len: int = 256, vocab_size: int = VOCAB) -> ModelInfo:
    return ModelInfo(("toy",), max_model_len, vocab_size, (EOS,))


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def events(
    request_id: str,
    text: str | Iterable[int],
    *,
    index: int = 0,
    end: FinishReason | None = FinishReason.LENGTH,
) -> list[TokenEvent]:
    """Return one event per token; the last carries ``end``."""
    tokens = ids(text) if isinstance(text, str) else tuple(text)
    made = [TokenEvent(request_id, index, (token,)) for token in tokens]
    if end is not None:
        made[-1] = made[-1]._replace(finish_reason=end)
    return made


def engine_config(**settings: object) -> EngineConfig:
    """Return the configuration of a toy model; ``settings`` are fields of `EngineArgs`."""
    attention = AttentionSpec(1, 1, 8, 8, 8**-0.5, None)
    spec = ModelSpec(
        family="llama",
        architecture="Toy",
        vocab_size=VOCAB,
        hidden_size=8,
        layers=(LayerSpec(attention, MlpSpec(8)),),
        norm_eps=1e-5,
        max_position_embeddings=256,
    )
    args = {"num_kv_blocks": 64, "max_model_len": 256, **settings}
    device = DeviceInfo("cpu", "test", 1, 2**30, 2**30)
    return resolve(EngineArgs(**args), spec, device)  # type: ignore[arg-type]
