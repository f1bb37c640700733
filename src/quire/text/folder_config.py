"""The tokenizer configuration of a model folder apart from the vocabulary: special tokens, BOS, chat templates."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.text.tokenizer import SpecialTokens

_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class FolderConfig:
    """The contents of tokenizer_config.json, special_tokens_map.json, added_tokens.json and the template files."""

    special: SpecialTokens = field(default_factory=SpecialTokens)
    added_tokens: Mapping[int, AddedToken] = field(default_factory=dict)
    add_bos: bool | None = None  # None: the vocabulary's default
    add_eos: bool | None = None
    add_prefix_space: bool | None = None
    clean_up_spaces: bool = False
    # False: only the start of a text gets sentencepiece's extra space; True: also text after a special token.
    space_after_special: bool = True
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def read_folder_config(folder: Path) -> FolderConfig:
    """Read the configuration files of ``folder``, all of them optional. Raises `ModelLoadError` for damaged JSON."""
    try:
        return _folder_config(folder, read_json(folder / "tokenizer_config.json"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(
            f"{folder / 'tokenizer_config.json'} or a file beside it has a value of the wrong kind ({error!r}). "
            "Download it again."
        ) from error


def _folder_config(folder: Path, config: Mapping[str, Any]) -> FolderConfig:
    names = {
        **read_json(folder / "special_tokens_map.json"),
        **{k: v for k, v in config.items() if v is not None},
    }
    roles = {role: text for role in ROLES if (text := _content(names.get(role))) is not None}
    # Some families name further tokens ("boi_token"); transformers 5 has them in `extra_special_tokens`.
    extra = names.get("extra_special_tokens") or []
    if isinstance(extra, Mapping):
        roles.update({role: text for role, value in extra.items() if (text := _content(value)) is not None})
        extra = []
    listed = [_content(value) for value in (*(names.get("additional_special_tokens") or []), *extra)]
    additional = tuple(text for text in listed if text is not None)
    if config.get("split_special_tokens") is True:
        raise UnsupportedModelError(
            f"{folder / 'tokenizer_config.json'}: split_special_tokens = true is not supported: the special tokens of "
            "a chat template would be split too; remove it."
        )
    return FolderConfig(
        special=SpecialTokens(roles=roles, additional=additional),
        added_tokens=_added_tokens(folder, config, {*roles.values(), *additional}),
        add_bos=_flag(config, "add_bos_token"),
        add_eos=_flag(config, "add_eos_token"),
        add_prefix_space=_flag(config, "add_prefix_space"),
        clean_up_spaces=config.get("clean_up_tokenization_spaces") is True,
        space_after_special=config.get("legacy") is not False,
        chat_templates=_chat_templates(folder, config),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, or an empty one if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}. Download it again.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, not an object. Download it again.")
    return value


def read_text(path: Path) -> str:
    """Return the text of a file of a model: UTF-8, or what its byte-order mark says, without that mark."""
    raw = path.read_bytes()
    for mark, encoding in _MARKS:
        if raw.startswith(mark):
            return raw[len(mark) :].decode(encoding)
    return raw.decode("utf-8")


def read_template(path: Path) -> str:
    """Return the text of a Jinja file."""
    try:
        return read_text(path)
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"The chat template {path} cannot be read: {error}.") from error


def _content(value: Any) -> str | None:
    """Return the text of a token, which is written as a string or as the object of an AddedToken."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _flag(config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    return value if isinstance(value, bool) else None


def _added_tokens(folder: Path, config: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    added = {
        int(token_id): AddedToken(text, special=text in special, normalized=text not in special)
        for text, token_id in read_json(folder / "added_tokens.json").items()
    }
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        flags = {key: bool(token.get(key, False)) for key in ("lstrip", "rstrip", "single_word")}
        is_special = bool(token.get("special", False)) or token["content"] in special
        normalized = not is_special and bool(token.get("normalized", True))
        added[int(token_id)] = AddedToken(
            token["content"], special=is_special, normalized=normalized, **flags
        )
    return added


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files win over tokenizer_config.json, which wins over the old file of processors."""
    source = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        templates = {str(entry["name"]): str(entry["template"]) for entry in source}
    elif isinstance(source, Mapping):
        templates = {str(name): str(text) for name, text in source.items()}
    else:
        templates = {"default": str(source)} if source else {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = read_template(folder / "chat_template.jinja")
    for path in sorted(filter(Path.is_file, (folder / "additional_chat_templates").glob("*.jinja"))):
        templates[path.stem] = read_template(path)
    return templates
