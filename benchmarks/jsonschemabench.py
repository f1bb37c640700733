"""Structured output on JSONSchemaBench (Geng et al. 2025): schemas, instances, and a model's answers.

    python benchmarks/jsonschemabench.py ../shared/data/conformance/jsonschemabench_maskbench.jsonl.gz [--write]

1. Every schema goes through the API's own check (helper process, its limits). Refusals are grouped by their message.
2. Every instance of the schemas that compiled is fed to the grammar, as compact JSON: the invalid ones must be kept
   out; those that are not are listed with the keywords of their schema. Each counts where `jsonschema` agrees on it.
3. 400 sampled schemas are run on Quill. An answer counts as finished when it ends within 1,024 tokens, and each that is
   finished has to be valid for `jsonschema`.

Quill tells stories and has never seen JSON. Left alone it wanders in optional properties and endless strings, so it
runs without whitespace outside of strings and without properties that a schema does not name (both options of vLLM's
structured_outputs), at temperature 1, where it does not repeat itself, with the quote and the brackets that end things
made a little likelier by logit_bias. None of that changes what is valid.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.grammar_checker import GrammarChecker
from quire.errors import RequestError
from quire.models.checkpoint import read_tokenizer
from quire.models.hub import quill_path
from quire.request import FinishReason
from quire.text.grammar_matcher import accepts, encode_forced, ll_tokenizer
from quire.text.json_watch import Vocabulary
from quire.text.token_table import token_table

SEED = 20261121
NUM_SAMPLED = 400
MAX_TOKENS = 1024
ENDS = ('"', "}", "]", '"}', '"]', "},", "],", '",')  # tokens that end a string, an object or an array
END_BIAS = 4.0


@dataclass
class Shares:
    """What is printed."""

    num_schemas: int = 0
    compiled: dict[str, str] = field(default_factory=dict)  # schema id -> grammar
    refusals: Counter[str] = field(default_factory=Counter)
    invalid: int = 0
    invalid_kept_out: int = 0
    let_in: list[str] = field(default_factory=list)
    valid: int = 0
    valid_accepted: int = 0
    sampled: int = 0
    finished: int = 0
    finished_valid: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


def compile_all(cases: list[dict[str, Any]], shares: Shares) -> None:
    tokenizer = read_tokenizer(quill_path("quill"))
    checker = GrammarChecker(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    for case in cases:
        start = time.perf_counter()
        try:
            shares.compiled[case["id"]] = checker.check(params_of(case, whitespace=True))
        except RequestError as error:
            text = re.sub(r"^.*cannot be used: ", "", str(error))
            shares.refusals[re.sub(r"(https?://|/)\S+|[`'].*", "…", text)[:90]] += 1
        shares.slowest_s = max(shares.slowest_s, time.perf_counter() - start)
    checker.close()


def params_of(case: dict[str, Any], *, whitespace: bool) -> StructuredOutputsParams:
    schema = json.dumps(case["schema"])
    return StructuredOutputsParams(
        json=schema, disable_any_whitespace=not whitespace, disable_additional_properties=not whitespace
    )


def feed_instances(cases: list[dict[str, Any]], shares: Shares) -> None:
    tokenizer = read_tokenizer(quill_path("quill"))
    table = token_table(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    compiler, vocabulary = ll_tokenizer(table, encode_forced(tokenizer)), Vocabulary(table.tokens)
    for case in cases:
        grammar = shares.compiled.get(case["id"])
        for test in case["tests"] if grammar else ():
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            try:
                ids = compiler.greedy_tokenize(text)
            except UnicodeEncodeError:  # a lone surrogate is no text
                continue
            accepted = accepts(compiler, grammar, vocabulary, ids)
            if test["valid"]:
                shares.valid += 1
                shares.valid_accepted += accepted
            else:
                shares.invalid += 1
                shares.invalid_kept_out += not accepted
                if accepted:
                    shares.let_in.append(f"{case['id']}: {', '.join(sorted(keywords(case['schema'])))}")


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(keywords, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    return set(schema) | set().union(*map(keywords, schema.values())) if schema else set()


def run_sampled(cases: list[dict[str, Any]], shares: Shares, num: int) -> None:
    chosen = random.Random(SEED).sample([c for c in cases if c["id"] in shares.compiled], num)
    shares.sampled = len(chosen)
    with LLM("quill", num_kv_blocks=4096, max_num_seqs=32) as llm:
        tokenizer = llm.get_tokenizer()
        checker = GrammarChecker(tokenizer, llm.model.vocab_size, llm.model.eos_token_ids)
        bias = {tokenizer.encode(text, add_special_tokens=False)[0]: END_BIAS for text in ENDS}
        run, params = [], []
        for case in chosen:
            form = params_of(case, whitespace=False)
            try:
                checker.check(form)
            except RequestError as error:  # compiles with open objects, and not with closed ones
                shares.failed[re.sub(r"^.*cannot be used: ", "", str(error))[:60]] += 1
                continue
            run.append(case)
            params.append(
                SamplingParams(
                    max_tokens=MAX_TOKENS,
                    temperature=1.0,
                    seed=SEED,
                    logit_bias=bias,
                    structured_outputs=form,
                )
            )
        checker.close()
        outputs = llm.generate(["The form was filled in as follows: "] * len(run), params, use_tqdm=False)
        for case, output in zip(run, outputs, strict=True):
            judge(case, output.outputs[0], shares)


def judge(case: dict[str, Any], answer: Any, shares: Shares) -> None:
    if answer.finish_reason is not FinishReason.STOP:
        shares.failed[str(answer.error or answer.finish_reason.value)[:60]] += 1
        return
    shares.finished += 1
    try:
        value = json.loads(answer.text)
        kind = validator_for(case["schema"], default=jsonschema.Draft202012Validator)
        problem = next(iter(kind(case["schema"]).iter_errors(value)), None)
    except (ValueError, SchemaError, RecursionError) as error:
        problem = error
    if problem is None:
        shares.finished_valid += 1
    else:
        shares.wrong.append(f"{case['id']}: {str(problem).splitlines()[0][:120]} in {answer.text[:80]!r}")


def report(shares: Shares) -> str:
    def share(part: int, whole: int) -> str:
        return f"{part} of {whole} ({part / max(1, whole):.1%})"

    lines = [
        f"schemas that compile: {share(len(shares.compiled), shares.num_schemas)}",
        f"slowest check: {shares.slowest_s:.2f} s",
        *(f"    refused {count:4d}  {text}" for text, count in shares.refusals.most_common()),
        f"invalid instances kept out: {share(shares.invalid_kept_out, shares.invalid)}",
        *(f"    let in: {text}" for text in shares.let_in),
        f"valid instances accepted as they are written: {share(shares.valid_accepted, shares.valid)}",
        f"runs on Quill that finish within {MAX_TOKENS} tokens: {share(shares.finished, shares.sampled)}",
        *(f"    not finished {count:4d}  {text}" for text, count in shares.failed.most_common()),
        f"finished answers that jsonschema finds valid: {share(shares.finished_valid, shares.finished)}",
        *(f"    wrong: {text}" for text in shares.wrong),
    ]  # fmt: skip
    return "\n".join(lines)


def run(path: Path, num_sampled: int) -> Shares:
    with gzip.open(path, "rt") as file:
        cases = [json.loads(line) for line in file]
    shares = Shares(num_schemas=len(cases))
    compile_all(cases, shares)
    feed_instances(cases, shares)
    if num_sampled:
        run_sampled(cases, shares, num_sampled)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", type=Path, help="also write the report to this file")
    parser.add_argument(
        "--sampled", type=int, default=NUM_SAMPLED, help="schemas that are run on Quill; 0: none"
    )
    args = parser.parse_args()
    start = time.perf_counter()
    text = report(run(args.data, args.sampled))
    print(text)
    if args.write:
        head = f"# JSONSchemaBench, {time.strftime('%Y-%m-%d')}, {platform.processor() or platform.machine()}\n\n"
        command = f"python benchmarks/jsonschemabench.py --sampled {args.sampled}"
        took = f"`{command}`, {time.perf_counter() - start:.0f} s.\n\n"
        args.write.write_text(f"{head}{took}```\n{text}\n```\n")


if __name__ == "__main__":
    main()
