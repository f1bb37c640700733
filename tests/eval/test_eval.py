"""`quire eval` against numpy's float64: perplexity, KL, choice tasks; what is read from where, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.eval.oracle import (
    CONFIG,
    log_softmax,
    logits_of,
    scored_by_hugging_face,
    scored_by_llama_cpp,
    write_model,
)
from tests.found.small_tokenizer import write_tokenizer
from tests.parity.families import make
from tests.parity.gguf_writer import write_gguf
from typer.testing import CliRunner

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.config import ModelConfig
from quire.device import detect_device
from quire.errors import ConfigError, ModelLoadError
from quire.families import spec_from_config
from quire.models.checkpoint import read_tokenizer
from quire.models.loader import iter_weights
from quire.text.tokenizer import Tokenizer
from quire_lab.cli.measure import eval_app, with_original
from quire_lab.eval.args import EvalArgs
from quire_lab.eval.run import evaluate

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("eval") / "model", seed=1)


@pytest.fixture(scope="module")
def other(model: Path) -> Path:
    return write_model(model.with_name("other"), seed=2, near=model)


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    path = model.with_name("text.txt")
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return read_tokenizer(model)


def figures(model: Path, text: Path, isa: str = "auto", **args: Any) -> dict[str, Any]:
    engine = EngineArgs(
        model=str(model), threads=1, cpu_isa=isa, dtype=args.pop("dtype", "float32"),  # type: ignore[arg-type]
        quantize=args.pop("quantize", None), tokenizer=args.pop("tokenizer", None),
        max_num_batched_tokens=args.pop("step", 2048),
    )  # fmt: skip
    return evaluate(engine, EvalArgs(text=str(text), **args), detect_device(), WallClock())


def naive(
    folder: Path, ids: list[int], scored: list[tuple[int, int, int]], begin: int | None = None
) -> np.ndarray:
    """Return log-probabilities ``[positions, vocab_size]``, from a forward of its own for each position."""
    rows, windows = [], {}
    for start, end, token in scored:
        if (start, end) not in windows:
            seen = ids[start:end] if begin is None else [begin, *ids[start + 1 : end]]
            windows[start, end] = log_softmax(logits_of(folder, seen))
        rows.append(windows[start, end][token - 1 - start])
    return np.array(rows)


@pytest.mark.parametrize("isa", ["reference", "auto"])
@pytest.mark.parametrize(("context", "stride"), [(48, 16), (32, 32), (200, None), (33, 7)])
def test_perplexity_of_sliding_windows_is_the_naive_loops(
    model: Path, text: Path, tokenizer: Tokenizer, isa: str, context: int, stride: int | None
) -> None:
    found = figures(model, text, isa, context=context, stride=stride)
    ids = tokenizer.encode(TEXT)
    scored = scored_by_hugging_face(len(ids), context, stride or context // 2)
    log_probs = naive(model, ids, scored)
    nll = -log_probs[np.arange(len(scored)), [ids[token] for *_, token in scored]]
    assert found["num_positions"] == len(scored)
    assert found["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)
    assert found["perplexity_se"] == pytest.approx(
        np.exp(nll.mean()) * nll.std(ddof=1) / np.sqrt(len(nll)), rel=1e-4
    )


def test_perplexity_of_chunks_is_llama_cpps(model: Path, text: Path, tokenizer: Tokenizer) -> None:
    found = figures(model, text, context=32, window="llama.cpp")
    ids = tokenizer.encode(TEXT)
    assert tokenizer.encode("") == [tokenizer.bos_token_id], "each chunk begins with it"
    scored = scored_by_llama_cpp(len(ids), 32)
    log_probs = naive(model, ids, scored, tokenizer.bos_token_id)
    nll = -log_probs[np.arange(len(scored)), [ids[token] for *_, token in scored]]
    assert found["num_positions"] == len(scored) == len(ids) // 32 * 15
    assert found["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-5)


def test_kl_is_the_originals_from_the_model(
    model: Path, other: Path, text: Path, tokenizer: Tokenizer
) -> None:
    found = figures(model, text, context=64, stride=64, against=str(other))
    ids = tokenizer.encode(TEXT)
    scored = scored_by_hugging_face(len(ids), 64, 64)
    q, p = naive(model, ids, scored), naive(other, ids, scored)
    kl = (np.exp(p) * (p - q)).sum(-1)
    tokens = np.arange(len(scored)), np.array([ids[token] for *_, token in scored])
    delta = np.exp(q[tokens]) - np.exp(p[tokens])
    expected = {
        "kl_mean": kl.mean(), "kl_mean_se": kl.std(ddof=1) / np.sqrt(len(kl)), "kl_median": np.median(kl),
        "kl_p99": np.quantile(kl, 0.99), "kl_max": kl.max(), "perplexity": np.exp(-q[tokens].mean()),
        "perplexity_original": np.exp(-p[tokens].mean()), "delta_p_mean": delta.mean(),
        "delta_p_rms": np.sqrt((delta**2).mean()), "top1_agreement": (p.argmax(-1) == q.argmax(-1)).mean(),
    }  # fmt: skip
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=2e-4)
    reverse = (np.exp(q) * (q - p)).sum(-1).mean()
    assert abs(reverse / kl.mean() - 1) > 0.01, "the two directions differ here"
    assert found["kl_p999"] is None, "there are too few positions for it"


def test_kl_against_itself_is_zero(model: Path, text: Path) -> None:
    found = figures(model, text, context=64, against="fp32")
    assert found["kl_mean"] == found["kl_max"] == found["delta_p_rms"] == 0.0
    assert found["top1_agreement"] == 1.0
    assert found["perplexity"] == found["perplexity_original"]
    assert found["bytes"] == found["bytes_original"]
    rounded = figures(model, text, context=64, against="fp32", dtype="bfloat16")
    assert 0.0 < rounded["kl_mean"] < 0.01
    assert rounded["bytes"] == found["bytes"] // 2


def test_pieces_and_steps_change_no_figure(
    model: Path, other: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = figures(model, text, context=96, against=str(other))
    monkeypatch.setattr("quire_lab.eval.run.SCRATCH_ELEMENTS", 5 * 4096)
    pieces = figures(model, text, context=96, against=str(other), step=17)
    assert {k: v for k, v in pieces.items() if k != "tokens_per_s"} == {
        k: v for k, v in whole.items() if k != "tokens_per_s"
    }


def test_a_model_with_recurrent_layers_is_scored(text: Path, tmp_path: Path) -> None:
    """Each window begins from an empty state, also where it is computed in several steps."""
    model = make("qwen3_5", tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    found = figures(tmp_path / "model", text, context=40, stride=40, against=str(tmp_path / "model"))
    ids = read_tokenizer(tmp_path / "model").encode(TEXT)
    nll = []
    for start, end, token in scored_by_hugging_face(len(ids), 40, 40):
        with torch.no_grad():
            rows = model(input_ids=torch.tensor([ids[start:end]]), use_cache=False).logits[0].double()
        nll.append(-rows.log_softmax(-1)[token - 1 - start, ids[token]].item())
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    assert found["kl_max"] == 0.0
    assert (
        figures(tmp_path / "model", text, context=40, stride=40, step=16)["perplexity"] == found["perplexity"]
    )


def test_a_quantized_file_is_compared_with_its_expansion(model: Path, text: Path, tmp_path: Path) -> None:
    config = ModelConfig(str(model), "m", spec_from_config(CONFIG), "float32", "float32", 256)
    weights = {name: w for name, w in iter_weights(config, torch.float32) if isinstance(w, torch.Tensor)}
    kind = gguf.GGMLQuantizationType.Q4_0
    file = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        config.spec,
        weights,
        type_of=lambda _, shape: kind if len(shape) > 1 else None,
    )
    args = {"context": 128, "against": "fp32", "tokenizer": str(model)}
    stored = figures(file, text, dtype="auto", **args)
    expanded = figures(file, text, expand=True, **args)
    assert 0.0 < stored["kl_mean"] < 0.05
    assert stored["bytes"] < expanded["bytes"] / 5
    assert expanded["kl_mean"] == 0.0
    assert expanded["perplexity"] == stored["perplexity_original"]
    anew = figures(file, text, expand=True, quantize="int8", dtype="auto", **args)
    assert 0.0 < anew["kl_mean"] < 0.1
    with pytest.raises(ConfigError, match="quantized already"):
        figures(file, text, quantize="int8", **args)


def test_choices_are_counted_by_their_log_likelihoods(model: Path, tokenizer: Tokenizer) -> None:
    tasks = [
        ("The dog ran", ["home", "into the garden and barked", "away"]),
        ("She said ", ["nothing", "it", "so"]),
        ("Four and four are", ["a", "something", "the"]),
    ]
    sums = []
    for context, choices in tasks:
        head, rows = tokenizer.encode(context.rstrip()), []
        for choice in choices:
            ids = tokenizer.encode(f"{context.rstrip()} {choice}")
            log_probs = log_softmax(logits_of(model, ids))
            rows.append(sum(log_probs[p - 1, ids[p]] for p in range(len(head), len(ids))))
        sums.append(np.array(rows))
    lengths = [np.array([len(choice) for choice in choices]) for _, choices in tasks]
    best = [int(row.argmax()) for row in sums]
    normed = [int((row / n).argmax()) for row, n in zip(sums, lengths, strict=True)]
    assert best != normed, "the two accuracies differ here"
    path = model.with_name("tasks.jsonl")
    lines = [
        {"context": context, "choices": choices, "gold": gold}
        for (context, choices), gold in zip(tasks, best, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    found = figures(model, path, against="fp32")
    right = np.mean([a == b for a, b in zip(best, normed, strict=True)])
    assert (found["num_tasks"], found["acc"], found["acc_norm"]) == (3, 1.0, pytest.approx(right))
    assert (found["acc_original"], found["acc_norm_original"]) == (1.0, found["acc_norm"])
    assert found["perplexity"] is None
    assert found["num_positions"] == 0
    assert figures(model, path, limit_tasks=1)["num_tasks"] == 1


def test_an_empty_context_begins_with_the_token_of_a_text(model: Path, tokenizer: Tokenizer) -> None:
    path = model.with_name("empty.jsonl")
    choices = ["The night", "xyzzy"]
    ids = [[tokenizer.bos_token_id or 0, *tokenizer.encode(c, add_special_tokens=False)] for c in choices]
    sums = []
    for each in ids:
        log_probs = log_softmax(logits_of(model, each))
        sums.append(sum(log_probs[p - 1, each[p]] for p in range(1, len(each))))
    gold = int(np.argmax(sums))
    path.write_text(json.dumps({"context": "", "choices": choices, "gold": gold}))
    assert figures(model, path)["acc"] == 1.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"context": 300}, "context = 300 is more than the 256 tokens"),
        ({"context": 20, "stride": 21}, "stride = 21 would leave out tokens"),
        ({"window": "llama.cpp", "stride": 4}, "stride has no meaning"),
        (
            {"limit_tokens": 20, "context": 32, "window": "llama.cpp"},
            "has 20 tokens, and a whole chunk of 32",
        ),
        ({"against": "quill-draft", "context": 32}, "another vocabulary|cannot be compared"),
        ({"text": None}, "give --text PATH"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    model: Path, text: Path, args: dict[str, Any], message: str
) -> None:
    engine = EngineArgs(model=str(model), dtype="float32", threads=1)
    given = replace(EvalArgs(text=str(text)), **args)
    if args.get("against") == "quill-draft":
        changed = write_model(model.with_name("changed"), seed=3)
        entry = json.loads((changed / "tokenizer.json").read_text())
        vocab = entry["model"]["vocab"]
        a, b = sorted(vocab, key=vocab.get)[3000:3002]
        vocab[a], vocab[b] = vocab[b], vocab[a]
        (changed / "tokenizer.json").write_text(json.dumps(entry))
        given = replace(given, against=str(changed))
    with pytest.raises((ConfigError, ModelLoadError), match=message):
        evaluate(engine, given, detect_device(), WallClock())


def test_against_without_a_value_is_fp32() -> None:
    assert with_original(["m", "--against"]) == ["m", "--against", "fp32"]
    assert with_original(["--against", "--json", "m"]) == ["--against", "fp32", "--json", "m"]
    assert with_original(["--against", "other", "m"]) == ["--against", "other", "m"]
    assert with_original(["--text", "t"]) == ["--text", "t"]


def test_the_command_prints_one_object_or_lines(model: Path, text: Path) -> None:
    flags = [str(model), "--text", str(text), "--threads", "1", "--context", "64", "--against"]
    done = CliRunner().invoke(eval_app, [*flags, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    names = {"perplexity", "kl_mean", "kl_p999", "top1_agreement", "bytes", "tokens_per_s"}
    assert names <= found.keys()
    assert (found["model"], found["against"], found["kl_mean"]) == (str(model), "fp32", 0.0)
    assert found["tokens_per_s"] > 0
    shown = CliRunner().invoke(eval_app, flags)
    assert shown.exit_code == 0, shown.output
    for words in ("perplexity", "KL, nats", "same top token", "100.00%", "tokens/s"):
        assert words in shown.stdout
