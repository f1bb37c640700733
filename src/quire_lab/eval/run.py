"""`quire eval`: a model over texts and choice tasks, beside its original where one is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.args import EngineArgs
from quire.clock import Clock, WallClock
from quire.config import DeviceInfo
from quire.device import detect_device
from quire.errors import ConfigError
from quire.kernels.sampling import SCRATCH_ELEMENTS
from quire_lab.bench.page import console, finite
from quire_lab.bench.progress import ticking
from quire_lab.eval.args import FP32, EvalArgs
from quire_lab.eval.choices import Answers, EncodedTask, encode_task
from quire_lab.eval.figures import Positions, compare, log_probabilities, of_tokens
from quire_lab.eval.inputs import Inputs, read_inputs
from quire_lab.eval.model import FoundModel, LoadedModel, find_model, original_args
from quire_lab.eval.windows import Window, halves, sliding

CONTEXTS = {"hf": 1024, "llama.cpp": 512}  # defaults


@dataclass(frozen=True, slots=True)
class Work:
    """What both models are to compute."""

    windows: tuple[Window, ...]
    tasks: tuple[EncodedTask, ...]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest window."""
        lengths = [len(window.token_ids) for task in self.tasks for window in task.windows]
        return max([*lengths, *(len(window.token_ids) for window in self.windows)])


@dataclass(slots=True)
class Progress:
    """How far a run is, for the line that it prints now and then."""

    total: int
    done: int = 0

    def line(self, seconds: float) -> str:
        return f"quire eval: {self.done} of {self.total} windows after {seconds:.0f} s"


@dataclass(slots=True)
class Pair:
    """The model and its original, if there is one."""

    model: LoadedModel
    original: LoadedModel | None = None
    rows_at_once: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows_at_once = max(1, SCRATCH_ELEMENTS // self.model.config.model.spec.vocab_size)

    def pieces(self, window: Window) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield (scored ids ``[rows]``, log-probabilities ``[rows, vocab_size]`` of the model, of the original)."""
        ids = torch.tensor(window.token_ids)
        hidden = self.model.hidden(window.token_ids)
        of_original = None if self.original is None else self.original.hidden(window.token_ids)
        for start in range(window.first, len(ids), self.rows_at_once):
            stop = min(start + self.rows_at_once, len(ids))
            rows = slice(start - 1, stop - 1)  # row p predicts token p + 1
            ours, theirs = log_probabilities(self.model.logits(hidden[rows])), None
            if self.original is not None and of_original is not None:
                theirs = log_probabilities(self.original.logits(of_original[rows]))
            yield ids[start:stop], ours, theirs


def evaluate(engine: EngineArgs, args: EvalArgs, device: DeviceInfo, clock: Clock) -> dict[str, Any]:
    """Return the figures of ``--json``.

    Raises:
        ConfigError: a flag, or what stands under ``text``, is wrong.
        ModelLoadError: a model cannot be found or read.
    """
    if args.text is None:
        raise ConfigError("text is missing: give --text PATH, a file or folder of .txt, .raw or .jsonl")
    inputs = read_inputs(Path(args.text).expanduser())
    found_model = find_model(engine, device, expand=args.expand)
    context, stride = _sizes(args, found_model)
    work = planned_work(args, found_model, inputs, context, stride)
    other = _original(engine, args, device, found_model)
    pair = Pair(LoadedModel(found_model, work.max_tokens, clock))
    if other is not None:
        pair.original = LoadedModel(other, work.max_tokens, clock)
    result = {
        "model": engine.model, "against": args.against, "text": args.text, "window": args.window, "context": context,
        "stride": stride, **figures(pair, work), "bytes": found_model.weight_bytes,
        "bytes_original": None if other is None else other.weight_bytes,
        "tokens_per_s": pair.model.num_tokens / pair.model.seconds, "kernels": found_model.config.runner.kernels,
        "remarks": list(found_model.config.model.remarks),
    }  # fmt: skip
    for model in (pair.model, pair.original):
        if model is not None:
            model.close()
    return result


def figures(pair: Pair, work: Work) -> dict[str, Any]:
    """Return what both models' logits say of the positions and tasks of ``work``."""
    positions, answers, of_original = Positions(), Answers(), Answers()
    progress = Progress(len(work.windows) + sum(len(task.windows) for task in work.tasks))
    with ticking(progress.line):
        for window in work.windows:
            for ids, ours, theirs in pair.pieces(window):
                nll = -of_tokens(ours, ids).numpy()
                positions.add(nll, None if theirs is None else compare(ours, theirs, ids))
            progress.done += 1
        for task in work.tasks:
            sums = [_log_likelihoods(pair, window) for window in task.windows]
            answers.add(task, [ours for ours, _ in sums])
            if pair.original is not None:
                of_original.add(task, [theirs for _, theirs in sums])
            progress.done += len(task.windows)
    return {
        **positions.summary(),
        "num_tasks": len(work.tasks),
        **answers.summary(),
        **of_original.summary("_original"),
    }


def _log_likelihoods(pair: Pair, window: Window) -> tuple[float, float]:
    """Return the sums of log-probabilities of the scored tokens, of the model and of the original."""
    sums = [0.0, 0.0]
    for ids, *both in pair.pieces(window):
        for place, log_probs in enumerate(both):
            if log_probs is not None:
                sums[place] += float(of_tokens(log_probs, ids).sum())
    return sums[0], sums[1]


def _sizes(args: EvalArgs, model: FoundModel) -> tuple[int, int]:
    """Return the tokens of a window, and of the step to the next one."""
    context = args.context or min(CONTEXTS[args.window], model.max_len)
    if context > model.max_len:
        raise ConfigError(
            f"context = {context} is more than the {model.max_len} tokens of the model's context"
        )
    if args.window == "llama.cpp":
        if args.stride is not None:
            raise ConfigError(
                "stride has no meaning with window = 'llama.cpp', whose chunks lie side by side"
            )
        return context, context
    stride = args.stride or max(1, context // 2)
    if stride > context:
        raise ConfigError(f"stride = {stride} would leave out tokens between windows of context = {context}")
    return context, stride


def planned_work(args: EvalArgs, model: FoundModel, inputs: Inputs, context: int, stride: int) -> Work:
    """Return the windows and tasks. Raises `ConfigError` where the text is too short for one."""
    tokenizer, in_chunks = model.tokenizer, args.window == "llama.cpp"
    texts = [document.text for document in inputs.documents]
    if in_chunks and texts:
        # llama.cpp reads one text, and takes special tokens in it as plain characters.
        texts = ["\n\n".join(texts)]
    windows: list[Window] = []
    left, num_tokens = args.limit_tokens, 0
    for text in texts:
        ids = tokenizer.encode(text, allow_special=not in_chunks)[:left]
        left = None if left is None else left - len(ids)
        num_tokens += len(ids)
        begin = [i for i in tokenizer.encode("")[:1] if i == tokenizer.bos_token_id]
        windows += halves(ids, context, begin) if in_chunks else sliding(ids, context, stride)
    tasks = tuple(encode_task(tokenizer, task, model.max_len) for task in inputs.tasks[: args.limit_tasks])
    if not windows and not tasks:
        least = f"a whole chunk of {context}" if in_chunks else "2"
        raise ConfigError(f"text: {args.text} has {num_tokens} tokens, and {least} are needed")
    return Work(tuple(windows), tasks)


def _original(engine: EngineArgs, args: EvalArgs, device: DeviceInfo, model: FoundModel) -> FoundModel | None:
    if args.against is None:
        return None
    other = None if args.against == FP32 else args.against
    original = find_model(original_args(engine, other), device, expand=True)
    if other is not None:
        _check_vocabulary(args.against, original, model)
    return original


def _check_vocabulary(name: str, original: FoundModel, model: FoundModel) -> None:
    """Raise `ConfigError` where the ids of the two models do not stand for the same tokens."""
    if original.vocab_size != model.vocab_size:
        raise ConfigError(
            f"against = {name!r} has a vocabulary of {original.vocab_size}, and the model one of {model.vocab_size}: "
            "distributions over different tokens cannot be compared"
        )
    for token_id in range(model.vocab_size):
        theirs, ours = (one.tokenizer.id_to_token(token_id) for one in (original, model))
        # GGUF files have a text for each row of the embedding, also for those without a token.
        if theirs != ours and {theirs, ours} != {None, f"[PAD{token_id}]"}:
            raise ConfigError(
                f"against = {name!r} has another vocabulary: id {token_id} is {theirs!r} there and {ours!r} in the "
                "model"
            )


def run(engine: EngineArgs, args: EvalArgs) -> int:
    """Print the figures. Raises as `evaluate`."""
    result = evaluate(engine, args, detect_device(), WallClock())
    if args.json:
        print(json.dumps(finite(result), indent=1))
    else:
        _print(result)
    return 0


def _print(result: dict[str, Any]) -> None:
    out = console()

    def line(name: str, text: str) -> None:
        out.print(f"{name:<21} {text}", highlight=False, markup=False)

    def with_error(key: str, digits: str) -> str:
        error = result[f"{key}_se"]
        return f"{result[key]:{digits}}" + ("" if error is None else f" ± {error:{digits}}")

    line(result["model"], f"kernels of {result['kernels']}, {result['bytes'] / 2**20:,.1f} MiB of weights")
    if result["num_positions"]:
        line("perplexity", f"{with_error('perplexity', '.4g')} ({result['num_positions']:,} positions)")
    if result["kl_mean"] is not None:
        p999 = result["kl_p999"]
        more = "" if p999 is None else f", 99.9 % {p999:.3g}"
        line("against", f"{result['against']}: perplexity {result['perplexity_original']:.4g}")
        line(
            "KL, nats",
            f"{with_error('kl_mean', '.3g')}; median {result['kl_median']:.3g}, 99 % {result['kl_p99']:.3g}{more}",
        )
        line("same top token", f"{result['top1_agreement']:.2%}")
        line("Δp of the token", f"mean {result['delta_p_mean']:+.3%}, RMS {result['delta_p_rms']:.3%}")
    if result["num_tasks"]:
        line("acc", f"{with_error('acc', '.3f')} ({result['num_tasks']:,} tasks)")
        line("acc_norm", with_error("acc_norm", ".3f"))
    if result["acc_original"] is not None:
        line(
            "of the original", f"acc {result['acc_original']:.3f}, acc_norm {result['acc_norm_original']:.3f}"
        )
    line("tokens/s", f"{result['tokens_per_s']:,.0f}")
    for remark in result["remarks"]:
        line("note", remark)
