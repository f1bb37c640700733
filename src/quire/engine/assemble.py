"""From `EngineArgs` to the parts that an engine and its API side are built from. Torch-free.

The offline `LLM` and every command use this module, so that the same settings give the same engine everywhere.
`configure` is quick and returns all that the engine process needs; `load_text` reads the tokenizer while the engine
process loads the model. `find_draft` is the draft model that the settings ask for, checked against the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from quire.args import EngineArgs, make_args
from quire.config import MAX_DRAFTS, DeviceInfo, EngineConfig
from quire.cost.speculation import DraftCheckpoint, HeadCheckpoint
from quire.engine.adapters import AdapterRegistry, read_adapters
from quire.engine.prompts import ModelInfo
from quire.errors import ConfigError, nearest
from quire.models.checkpoint import Checkpoint, describe, read_tokenizer
from quire.models.hub import locate, recommended_sampling
from quire.models.safetensors_file import reading
from quire.resolve import resolve
from quire.text.chat_template import ChatTemplate
from quire.text.folder_config import read_text
from quire.text.tokenizer import Tokenizer

_HEAD_READER = "quire.models.head_checkpoint"  # imported where the settings ask for heads


@dataclass(frozen=True, slots=True)
class TextSide:
    """Tokenizer, chat template, the model's limits and defaults, and its adapters."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    model: ModelInfo
    adapters: AdapterRegistry


def configure(args: EngineArgs, device: DeviceInfo) -> tuple[EngineConfig, Checkpoint]:
    """Find the model, read its configuration, and resolve every setting.

    Raises:
        ModelLoadError, UnsupportedModelError: the model cannot be found, read or run.
        ConfigError: the settings do not fit the model or the machine.
    """
    path = locate(args.model, revision=args.revision)
    checkpoint = describe(path, args.load_format)
    if sampling := recommended_sampling(args.model):
        checkpoint = replace(checkpoint, generation=replace(checkpoint.generation, **sampling))
    adapters, remarks = read_adapters(args.lora, checkpoint)
    config = resolve(
        args,
        checkpoint.spec,
        device,
        path=str(checkpoint.path),
        tokenizer=str(args.tokenizer or checkpoint.tokenizer),
        stored=checkpoint.formats,
        remarks=(*checkpoint.remarks, *remarks),
        adapters=adapters,
        draft=find_draft(args, checkpoint),
    )
    if (args.kv_disk, args.kv_remote, args.kv_share, args.kv_peers) != (None, None, None, None):
        config = import_module("quire.engine.kv_root").with_tier(config, args, checkpoint.files)
    return config, checkpoint


def load_text(
    args: EngineArgs,
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    names: tuple[str, ...] = (),
    chat_template: str | None = None,
    local_time: Callable[[], datetime] = datetime.now,
) -> TextSide:
    """Load the tokenizer and the chat template. ``names``: the model's names in the API.

    ``chat_template``: the path of a Jinja file that replaces the model's template.

    Raises:
        ModelLoadError: the tokenizer or a template is missing or broken.
        ConfigError: the file of ``chat_template`` cannot be read.
    """
    tokenizer = read_tokenizer(Path(config.model.tokenizer))
    own_template = _read_template(chat_template)
    with reading(chat_template or config.model.tokenizer):
        template = ChatTemplate.of(tokenizer, local_time, own_template)
    defaults = {key: value for key, value in asdict(checkpoint.generation).items() if value is not None}
    spec, sentence = config.model.spec, config.model.spec.sentence
    model = ModelInfo(
        names=names or (args.model,),
        max_model_len=config.model.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(dict.fromkeys((*checkpoint.spec.eos_token_ids, *tokenizer.eos_token_ids))),
        generation_defaults=defaults,
        determinism=config.determinism,
        sentence=sentence,
        writes_text=spec.encoder is None and not (sentence is not None and sentence.labels),
        vision=spec.vision,
    )
    return TextSide(tokenizer, template, model, AdapterRegistry.of(config, model.names))


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        if Path(path).exists() and not Path(path).is_file():  # opening a pipe would wait for a writer
            raise OSError("it is no regular file")
        return read_text(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template = {path!r} cannot be read: {error}. Give the path of a Jinja file"
        ) from error


# vLLM's name → ours, where they differ.
ALIASES = {
    "quantization": "quantize",
    "num_gpu_blocks_override": "num_kv_blocks",
    "kv_cache_dtype": "kv_dtype",
    "kv_cache_memory_bytes": "kv_memory",
    "scheduling_policy": "order",
    "distributed_executor_backend": "executor",
}
# vLLM's keywords that have no effect here, and why.
NO_EFFECT = {
    "trust_remote_code": "a model is data here; no code of a repository is ever run",
    "enforce_eager": "a CPU has no graphs; on a GPU they give the same tokens",
    "disable_log_stats": "an offline engine logs no statistics",
    "swap_space": "preempted sequences are computed again",
    "compilation_config": "nothing is compiled when a model is loaded",
    "enable_lora": "adapters are loaded where they are asked for",
    "disable_custom_all_reduce": "a model runs on one device",
    "max_seq_len_to_capture": "captured steps are chosen by the number of sequences",
    "async_scheduling": "steps are planned ahead where the device allows it",
}
# Keywords that are accepted at these values, where they ask for nothing, and refused at others.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "cpu_offload_gb": (0,),
    "tokenizer_mode": ("auto", "hf", "fast"),
    "config_format": ("auto", "hf"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate", "embed", "score"),
    "runner": ("auto", "generate", "pooling"),
    "generation_config": ("auto",),
    "hf_overrides": (None, {}),
    "limit_mm_per_prompt": (None, {}),
    "override_generation_config": (None, {}),
    "kv_transfer_config": (None,),
    "enable_sleep_mode": (False, True),
    "tokenizer_revision": (None,),
    "code_revision": (None,),
    "hf_token": (None, True),
    "allowed_local_media_path": ("",),
}
VALUES = {  # name in vLLM → ours
    "load_format": {"dummy": "random"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "auto"},
    "distributed_executor_backend": {"mp": "auto", "uni": "local"},
    "dtype": {"half": "float16", "float": "float32"},
}


def llm_args(model: str, keywords: Mapping[str, Any]) -> EngineArgs:
    """Return the settings of ``LLM(model, **given)``.

    Raises:
        ConfigError: a keyword is unknown (the error suggests the nearest one), a value is wrong, a setting is given
            twice, or one of `NEUTRAL` asks for something.
    """
    values: dict[str, Any] = {"model": model}
    known = [field.name for field in fields(EngineArgs)]
    for key, value in keywords.items():
        name = ALIASES.get(key, key)
        if key in NO_EFFECT or (key, value) == ("distributed_executor_backend", None):
            continue
        if key in NEUTRAL:
            _check_neutral(key, value)
        elif key == "speculative_config":
            values |= {} if value is None else speculation_of(value)
        elif name not in known:
            everything = [*known, *ALIASES, *NO_EFFECT, *NEUTRAL, "speculative_config"]
            raise ConfigError(f"LLM: unknown keyword {key!r}{nearest(key, everything)}")
        elif name in values:
            raise ConfigError(f"LLM: {key} and {_other(key, keywords)} set the same thing; give one of them")
        elif name == "lora" and isinstance(value, Mapping):
            values[name] = tuple(f"{adapter}={path}" for adapter, path in value.items())
        else:
            values[name] = VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value
    values.setdefault("long_prefill_token_threshold", 0)  # no user waits for one prompt of a list
    return make_args(EngineArgs, values, origin="LLM")


def _check_neutral(key: str, value: Any) -> None:
    if value in NEUTRAL[key]:
        return
    if key == "data_parallel_size":
        raise ConfigError(
            f"LLM: {key} = {value!r}: several copies are for `quire serve --{key.replace('_', '-')}`"
        )
    allowed = " or ".join(map(repr, NEUTRAL[key]))
    raise ConfigError(f"LLM: {key} = {value!r} is not supported: it may be {allowed}, or be left out")


def _other(key: str, keywords: Mapping[str, Any]) -> str:
    name = ALIASES.get(key, key)
    return next((k for k in keywords if k != key and ALIASES.get(k, k) == name), "the first argument")


SELF = "self:"  # the model's own weights in another format


def find_draft(args: EngineArgs, checkpoint: Checkpoint) -> DraftCheckpoint | HeadCheckpoint | None:
    """Return the draft model or the heads of ``args`` for the model in ``checkpoint``; None: there are none.

    Raises:
        ConfigError: its vocabulary differs, or the settings contradict each other.
        ModelLoadError, UnsupportedModelError: it cannot be found, read or run.
    """
    method, name = args.speculate, args.draft_model
    if method in ("ngram", "lookahead", "mtp") and name is not None:
        raise ConfigError(
            f"draft_model = {name!r} has no use with speculate = {method!r}: leave one of them out"
        )
    if method in ("medusa", "eagle", "mtp"):
        return _find_heads(args, checkpoint, method)
    if method != "draft" and name is None:
        return None
    name = name or ("quill-draft" if args.model == "quill" else "self:int4")
    if name.startswith(SELF):
        return DraftCheckpoint(
            name,
            str(checkpoint.path),
            checkpoint.spec,
            checkpoint.formats,
            args.load_format,
            quantize=name.removeprefix(SELF),
        )
    path, reader = locate(name), import_module(_HEAD_READER)
    if method is None and reader.holds_heads(path):
        return HeadCheckpoint(name, str(path), reader.open_heads(path, checkpoint.spec)[0])
    draft = describe(path, args.load_format)
    if draft.kind != "random":
        check_vocabulary(name, read_tokenizer(draft.tokenizer), read_tokenizer(checkpoint.tokenizer))
    return DraftCheckpoint(name, str(draft.path), draft.spec, draft.formats, args.load_format)


def _find_heads(args: EngineArgs, checkpoint: Checkpoint, method: str) -> HeadCheckpoint:
    """Return the heads at ``draft_model``, else those beside the checkpoint; those of "mtp" are in it."""
    spec, reader = checkpoint.spec, import_module(_HEAD_READER)
    if method == "mtp":
        if checkpoint.kind == "gguf":
            raise ConfigError(
                "speculate = 'mtp' reads the layer from safetensors, and the model is a GGUF file"
            )
        random = checkpoint.kind == "random"
        path = checkpoint.path
        heads = reader.mtp_spec(path, spec) if random else reader.open_heads(path, spec, mtp=True)[0]
        return HeadCheckpoint(args.model, str(checkpoint.path), heads, args.load_format)
    path = checkpoint.path / method if args.draft_model is None else locate(args.draft_model)
    if args.draft_model is None and not (path / "config.json").is_file():
        raise ConfigError(
            f"speculate = {method!r} needs draft_model, the folder of its heads: there is none at {path}"
        )
    heads = reader.open_heads(path, spec)[0]
    if heads.method.removesuffix("3") != method:
        raise ConfigError(
            f"draft_model = {args.draft_model!r} has {heads.method} heads, and speculate = {method!r}"
        )
    return HeadCheckpoint(args.draft_model or f"{args.model}/{method}", str(path), heads)


def check_vocabulary(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raise `ConfigError` with the first id that stands for another token in the draft model."""
    for token_id in range(max(draft.vocab_size, target.vocab_size)):
        draft_token, target_token = draft.id_to_token(token_id), target.id_to_token(token_id)
        if draft_token != target_token:
            raise ConfigError(
                f"draft_model = {name!r} has another vocabulary: id {token_id} is {_said(draft_token)} there and "
                f"{_said(target_token)} in the model. Take a draft model of the same family, or self:int4"
            )


def _said(token: str | None) -> str:
    return "no token" if token is None else repr(token)


# vLLM's method → ours. Without one, the model says what it is.
METHODS = {
    "ngram": "ngram",
    "draft_model": "draft",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle",
    "mtp": "mtp",
    "deepseek_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
}


# Keys of vLLM's speculative_config that change no answer.
UNUSED = (
    "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size", "disable_logprobs", "disable_mqa_scorer",
    "disable_padded_drafter_batch", "enforce_eager",
)  # fmt: skip


def speculation_of(config: Any) -> dict[str, Any]:
    """Return our keywords for vLLM's ``speculative_config``.

    The keys of `UNUSED` have no effect: a suffix of any length is found, and the number of drafts follows the load.

    Raises:
        ConfigError: a field is unknown or wrong, or the method is not one that is here.
    """
    known = ("method", "model", "num_speculative_tokens", *UNUSED)
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config = {config!r} must be a dict with {', '.join(known)}")
    if unknown := [key for key in config if key not in known]:
        raise ConfigError(f"speculative_config has the key {unknown[0]!r}; allowed: {', '.join(known)}")
    method, model, count = config.get("method"), config.get("model"), config.get("num_speculative_tokens")
    if (method is not None and method not in METHODS) or (method is None and model is None):
        raise ConfigError(f"speculative_config: method = {method!r} must be one of {', '.join(METHODS)}")
    if count not in (None, "auto", *range(1, MAX_DRAFTS + 1)) or isinstance(count, bool):
        raise ConfigError(
            f"speculative_config: num_speculative_tokens = {count!r} must be 'auto' or a number in 1…{MAX_DRAFTS}"
        )
    settings: dict[str, Any] = {} if method is None else {"speculate": METHODS[method]}
    if model is not None and settings.get("speculate") not in ("ngram", "mtp"):
        settings["draft_model"] = model
    if count is not None:
        settings["spec_tokens"] = count
    return settings
