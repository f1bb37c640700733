"""The token ids that a model is run on, from a text or from chats: windows spread evenly over all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer
from quire_lab.eval.inputs import Document, read_inputs

BUNDLED = "calibration.txt.gz"  # pages of Quire's documentation


def calibration_ids(tokenizer: Tokenizer, path: str | None, num_samples: int, num_tokens: int) -> Tensor:
    """Return ids ``[num_samples, num_tokens]`` of the text at ``path``; None: the text that ships with Quire.

    Raises:
        ConfigError: there is no text, or it is shorter than one window.
    """
    ids = [token for document in _documents(path) for token in tokenizer.encode(document.text)]
    if len(ids) < num_tokens:
        raise ConfigError(
            f"calib: {path or BUNDLED} has {len(ids)} tokens, and one sequence needs {num_tokens}; give more text, or "
            "fewer --calib-tokens"
        )
    count = min(num_samples, len(ids) // num_tokens)
    last = len(ids) - num_tokens
    starts = [last * index // max(1, count - 1) for index in range(count)]
    return torch.tensor([ids[start : start + num_tokens] for start in starts])


def _documents(path: str | None) -> Iterator[Document]:
    if path is None:
        with TemporaryDirectory() as folder:
            copy = Path(folder) / BUNDLED
            copy.write_bytes((files("quire_lab.quantize") / BUNDLED).read_bytes())
            yield from read_inputs(copy).documents
        return
    given_path = Path(path).expanduser()
    if (
        given_path.suffix == ".jsonl"
        and given_path.is_file()
        and '"messages"' in given_path.read_text()[:65536]
    ):
        yield from _chats(given_path)
        return
    yield from read_inputs(given_path).documents


def _chats(path: Path) -> Iterator[Document]:
    """Yield each chat as its messages, one after the other, in plain text."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"{path}:{number}"
        try:
            messages = json.loads(line)["messages"] if line.strip() else []
            yield Document(where, "\n\n".join(message["content"] for message in messages))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{where}: a chat is an object with a list of messages, each with content"
            ) from None
