"""Write the pages docs/from-SERVER.md: how Quire reads the command lines of other servers."""

from __future__ import annotations

from pathlib import Path

from quire.cli.foreign import SERVERS, foreign_flags

DOCS = Path(__file__).resolve().parents[1] / "docs"
INTRO = {
    "vllm": """\
A command line of `vllm serve` works as it is in most cases:

```bash
quire serve --model MODEL --dtype half --max-model-len 4k --served-model-name a b --tensor-parallel-size 1
```

`quire serve` reads vLLM's flags by the table below. One that changes nothing here is named on standard error with
the reason; one that would change the answer and cannot is an error that says what to do. Flags that are not in the
table and that both servers have (`--port`, `--api-key`, `--max-num-seqs` …) mean the same. Underscores in
the place of hyphens and `--max-model-len=4096` are read as well, and lengths may be `4k` (4000) or `4K` (4096).

The API is vLLM's: `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings`, `/score`, `/rerank`, `/tokenize`,
`/metrics` with vLLM's names, and its fields beyond OpenAI's (`top_k`, `min_p`, `structured_outputs`,
`stop_token_ids` …): docs/api.md. In Python, `from quire import LLM, SamplingParams` takes vLLM's keywords; those
that ask for nothing at their neutral values (`tensor_parallel_size=1`, `trust_remote_code=True`,
`enforce_eager=True`) are accepted. `LLM.generate`, `chat`, `embed`, `score`, `beam_search`, `sleep`, `wake_up`,
`get_metrics` and `reset_prefix_cache` are there.

What differs: on a CPU answers are the same bits alone and in a batch; `seed` is honoured per request and drawn
where it is not given; a prompt that is too long is refused instead of cut.
""",
    "llama-cpp": """\
A command line of `llama-server` works as it is in most cases:

```bash
quire serve -m model.gguf -c 8192 -t 8 -np 4 --jinja -ngl 99
```

GGUF files are read as they are (docs/models.md), and their quantized weights stay quantized (docs/quantization.md).
One difference to know: `-c` is the context of *one* request here; there it is shared by all slots. Memory for the
KV cache is `--kv-memory`.

The API answers llama.cpp's own fields (`n_predict`, `repeat_penalty`, `grammar`, `json_schema` …) in
`/v1/completions` and `/v1/chat/completions`, and `/props`, `/slots`, `/tokenize`, `/health` (docs/api.md).
""",
    "sglang": """\
A command line of `python -m sglang.launch_server` works as it is in most cases:

```bash
quire serve --model-path MODEL --tp 1 --context-length 4096 --max-running-requests 64 --port 30000
```

Flags that vLLM has as well (`--dtype`, `--quantization`, `--kv-cache-dtype`, `--tool-call-parser`,
`--reasoning-parser`, `--trust-remote-code` …) are those of [from-vllm.md](from-vllm.md). The port is 8000 where none
is given; there it is 30000.

The API is OpenAI's, with SGLang's fields (`regex`, `ebnf`, `rid`, `separate_reasoning` …) in
`/v1/completions` and `/v1/chat/completions`: docs/api.md. There is no `/generate` in SGLang's form:
that path answers TGI's.
""",
}


def page(server: str) -> str:
    """Return the page of one server."""
    title = SERVERS[server]
    lines = [f"# From {title}", "", INTRO[server], f"| {title} | here |", "|---|---|"]
    for flag, rule in foreign_flags()[server].items():
        lines.append(f"| `{flag}` | {_meaning(flag, rule)} |")
    return "\n".join(lines) + "\n"


def _meaning(flag: str, rule: dict[str, object]) -> str:
    parts = []
    if rule.get("to") == "MODEL":
        parts.append("the argument MODEL")
    elif flag == "--speculative-config":
        parts.append("`--speculate`, `--draft-model` and `--spec-tokens`")
    elif "to" in rule:
        parts.append(f"`{rule['to']}`")
    values = rule.get("values", {})
    assert isinstance(values, dict)
    if named := ", ".join(f"`{theirs}` → `{ours}`" for theirs, ours in values.items() if theirs != "*"):
        parts.append(f"with {named}")
    if "effect" in rule:
        neutral = rule.get("neutral")
        assert neutral is None or isinstance(neutral, list)
        of = "" if neutral is None else ", ".join(f"`{value}`" for value in neutral) + ": "
        parts.append(f"{of}no effect: {rule['effect']}")
    if "instead" in rule:
        parts.append(f"{'else ' if parts else ''}refused: {rule['instead']}")
    return "; ".join(parts)


if __name__ == "__main__":
    for server in SERVERS:
        (DOCS / f"from-{server}.md").write_text(page(server))
