"""Write a training checkpoint as a Hugging Face folder: bf16 weights, config, tokenizer, chat template.

The export is checked before it is left in place: ``transformers`` loads the folder, and its loss on one validation
window, both sides in fp32 over the rounded weights, must equal the trainer's own to 1e-4 nats per token.

Usage: ``python tools/quill/export.py --checkpoint /tmp/quill/run/checkpoint.pt --shape quill --data /tmp/quill
--name quill``
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from make_data import BOS_ID
from make_tokenizer import CONTROL_TOKENS, RESERVED_TOKENS, VISIBLE_TOKENS
from model import SHAPES, QuillModel, QuillShape
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

PACKAGE_DATA = Path(__file__).parents[2] / "src/quire/models/quill_data"
END_ID = 1
CONTEXT_LENGTH = 8192

CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role in ('system', 'developer') %}
        {{- '<|system|>' + message.content + '<|end|>' }}
    {%- elif message.role in ('user', 'tool') %}
        {{- '<|user|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' + (message.content or '') + '<|end|>' }}
    {%- else %}
        {{- raise_exception('Quill knows the roles system, developer, user, assistant and tool, not ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


def config(shape: QuillShape) -> dict[str, object]:
    values = asdict(shape)
    values["num_hidden_layers"] = values.pop("num_layers")
    values["num_attention_heads"] = values.pop("num_heads")
    values["num_key_value_heads"] = values.pop("num_kv_heads")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        **values,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config() -> dict[str, object]:
    tokens = (*CONTROL_TOKENS, *VISIBLE_TOKENS, *RESERVED_TOKENS)
    decoder = {
        str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        | {"special": t not in VISIBLE_TOKENS}
        for i, t in enumerate(tokens)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": CONTROL_TOKENS[BOS_ID],
        "eos_token": CONTROL_TOKENS[END_ID],
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": decoder,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config() -> dict[str, object]:
    """A novel that has ended is followed by ``<|bos|>`` in the training text, so that ends a text as well."""
    eos = [END_ID, BOS_ID]
    return {"bos_token_id": BOS_ID, "eos_token_id": eos, "do_sample": True, "temperature": 0.8, "top_p": 0.95}


def export(checkpoint: Path, shape: QuillShape, tokenizer: Path, folder: Path) -> QuillModel:
    """Write the folder; returns the trainer's model with the rounded weights."""
    model = QuillModel(shape, seed=0)
    model.load_state_dict(torch.load(checkpoint, weights_only=True, map_location="cpu")["model"])
    model.load_state_dict({name: weight.bfloat16().float() for name, weight in model.state_dict().items()})
    weights = {name: weight.bfloat16().contiguous() for name, weight in model.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    documents = {
        "config": config(shape),
        "tokenizer_config": tokenizer_config(),
        "generation_config": generation_config(),
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    return model


def check(model: QuillModel, folder: Path, valid: np.ndarray) -> tuple[float, float]:
    """Nats per token of one window by the trainer's model and by ``transformers``; asserts that they are equal."""
    ids = torch.from_numpy(valid[:1025].astype(np.int64))
    ours = float(model.token_losses(ids[None, :-1], ids[None, 1:], dtype=torch.float32).mean())
    loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = float(F.cross_entropy(loaded(ids[None, :-1]).logits[0], ids[1:]))
    assert abs(ours - theirs) < 1e-4, (ours, theirs)
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--name", required=True, help="folder below the package data, or an absolute path")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = PACKAGE_DATA / args.name
    model = export(args.checkpoint, SHAPES[args.shape], args.data / "tokenizer.json", folder)
    ours, theirs = check(model, folder, np.load(args.data / "valid.npy"))
    num_parameters = sum(p.numel() for p in model.parameters())
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {num_parameters} parameters, {num_bytes} bytes")
    print(f"nats per token of the first 1,024: trainer {ours:.6f}, transformers {theirs:.6f}")


if __name__ == "__main__":
    main()
