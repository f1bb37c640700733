"""tokenizer_config.json and generation_config.json with one key changed at random, beside transformers."""

from __future__ import annotations

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.found.folder_changes import REMOVED, Change, other_values
from tests.found.small_tokenizer import BOS, CONFIG, EOS, write_tokenizer
from tests.models.tiny import write_model
from transformers import AutoTokenizer, GenerationConfig

from quire.errors import QuireError
from quire.models.checkpoint import describe
from quire.text.chat_template import ChatTemplate
from quire.text.load import load_tokenizer

TEXTS = [
    "abc the ab",
    " the abc",
    "a<tool>b </s> ab",
    "it's  what ?  ab , n't",
    "<s>ab",
    "",
    "A\n\nb",
    "ab .  ' s",
]
MESSAGES = [{"role": "user", "content": "abc the"}, {"role": "assistant", "content": "ab"}]
_TOKENS = CONFIG["added_tokens_decoder"]
TOKENIZER_VALUES: dict[str, list[Any]] = {
    "tokenizer_class": ["Qwen2TokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "TokenizersBackend", "Nonsense"],
    "bos_token": [EOS, "<new>", "ab"], "eos_token": [BOS, "<new>", "ab"], "pad_token": ["<new>"], "unk_token": ["ab"],
    "add_bos_token": [False], "add_eos_token": [True], "clean_up_tokenization_spaces": [True], "model_max_length": [4],
    "add_prefix_space": [True, False], "legacy": [True, False], "additional_special_tokens": [["ab"], ["<x>"]],
    "extra_special_tokens": [{"image_token": "<i>"}], "split_special_tokens": [True], "sep_token": ["ab"],
    "mask_token": ["<m>"], "errors": ["ignore"], "do_lower_case": [True], "spaces_between_special_tokens": [True],
    "chat_template": ["x{{ messages[0].content }}", [{"name": "default", "template": "y{{ bos_token }}"}]],
    "added_tokens_decoder": [
        {**_TOKENS, "3": {"content": "<tool>", "special": True}},
        {**_TOKENS, "3": {"content": "<tool>", "lstrip": True, "rstrip": True}},
        {**_TOKENS, "3": {"content": "<tool>", "single_word": True}}, {},
    ],
}  # fmt: skip
GENERATION: dict[str, Any] = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [2, 5],
    "max_new_tokens": 9, "transformers_version": "5.24.0",
}  # fmt: skip
GENERATION_VALUES: dict[str, list[Any]] = {
    "do_sample": [False], "top_k": [-1, 0, 7.0], "min_p": [0.05, 3], "typical_p": [0.5], "num_beams": [3, 1],
    "suppress_tokens": [[5]], "bad_words_ids": [[[5]]], "no_repeat_ngram_size": [2], "min_new_tokens": [3],
    "eos_token_id": [7, -1, "2", [2, None]], "stop_strings": [["a"]], "guidance_scale": [2.0], "unknown_key": [1],
}  # fmt: skip


def tokenizer_change(rng: random.Random) -> Change:
    key = rng.choice(sorted({*CONFIG, *TOKENIZER_VALUES}))
    return Change("tokenizer_config.json", key, rng.choice([REMOVED, None, *TOKENIZER_VALUES.get(key, [])]))


def tokenizer_fault(folder: Path, change: Change) -> str | None:
    """Compare ids, text and prompts; where both flags of BOS and EOS say something, they count as written."""
    write_tokenizer(folder)
    config = change.apply(CONFIG)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    try:
        wanted = _transformers_says(folder, config)
    except Exception:  # whatever it cannot read is no value to compare with
        return None
    try:
        found = _quire_says(folder)
    except QuireError as error:
        return (
            None if change.is_named(str(error)) else f"refused, and the error does not name the key: {error}"
        )
    different = [name for name in wanted if wanted[name] != found[name]]
    return f"{different[0]}: {found[different[0]]} and not {wanted[different[0]]}" if different else None


def _transformers_says(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    whole = [tokenizer(text)["input_ids"] for text in TEXTS]
    flags = [config.get(f"add_{role}_token") for role in ("bos", "eos")]
    if any(
        isinstance(flag, bool) for flag in flags
    ):  # version 5 reads the flags where there is no tokenizer.json
        bos = (
            [tokenizer.bos_token_id]
            if flags[0] in (True, None) and tokenizer.bos_token_id is not None
            else []
        )
        eos = [tokenizer.eos_token_id] if flags[1] is True and tokenizer.eos_token_id is not None else []
        if tokenizer.bos_token_id is None:
            bos = whole[5]
        whole = [[*bos, *ids, *eos] for ids in plain]
    try:
        prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    except ValueError:  # no template
        prompt = None
    return {
        "ids": plain,
        "ids with special tokens": whole,
        "text": [tokenizer.decode(ids) for ids in whole],
        "text without special tokens": [tokenizer.decode(ids, skip_special_tokens=True) for ids in whole],
        "prompt": prompt,
        "end": [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
    }


def _quire_says(folder: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(folder)
    whole = [tokenizer.encode(text) for text in TEXTS]
    try:
        prompt = ChatTemplate.of(tokenizer, datetime.now, None).render(MESSAGES, add_generation_prompt=True)
    except QuireError:
        prompt = None
    return {
        "ids": [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS],
        "ids with special tokens": whole,
        "text": [tokenizer.decode(ids, skip_special_tokens=False) for ids in whole],
        "text without special tokens": [tokenizer.decode(ids) for ids in whole],
        "prompt": prompt,
        "end": list(tokenizer.eos_token_ids),
    }


def generation_change(rng: random.Random) -> Change:
    key = rng.choice(sorted({*GENERATION, *GENERATION_VALUES}))
    values = other_values(GENERATION[key]) if key in GENERATION else [REMOVED, None]
    return Change("generation_config.json", key, rng.choice([*values, *GENERATION_VALUES.get(key, [])]))


def generation_fault(folder: Path, change: Change) -> str | None:
    """Each setting is applied as transformers means it, or a line names it; the load goes on in any case."""
    write_model(folder)
    values = change.apply(GENERATION)
    (folder / "generation_config.json").write_text(json.dumps(values))
    found = describe(folder)
    said = " ".join(found.remarks)
    if change.key in said or change.key in ("max_new_tokens", "transformers_version", "unknown_key"):
        return None
    try:
        wanted = GenerationConfig(**values)
    except Exception:  # a value that transformers refuses, and no line says so
        return (
            None
            if getattr(found.generation, change.key, None) is None
            else "an odd value is taken in silence"
        )
    greedy = wanted.do_sample is False
    for key in ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "temperature"):
        want = 0.0 if greedy and key == "temperature" else getattr(wanted, key)
        have = getattr(found.generation, key)
        if have != want and not (key == "top_k" and {have, want} == {0, -1}):
            return f"{key} is {have} and not {want}"
    ends = wanted.eos_token_id
    listed = [] if ends is None else [ends] if isinstance(ends, int) else ends
    missing = {each for each in listed if each is not None and each >= 0} - set(found.spec.eos_token_ids)
    if change.key in said or not missing:
        return None
    return f"the ends {sorted(missing)} are missing, and a line does not say so"
