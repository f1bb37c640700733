"""Command lines of other servers, and help that fits a terminal of 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tools.foreign_docs import PAGE, page

from quire.args import ServerArgs, flag_name, settings_of
from quire.cli.foreign import foreign_flags, translated
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("quill --port 1 --max-num-seqs 4", "quill --port 1 --max-num-seqs 4"),
        ("--model quill --dtype half", "quill --dtype float16"),
        ("--model=quill --max_model_len=0.5K", "quill --max-model-len 512"),
        ("quill --max-model-len 4k", "quill --max-model-len 4000"),
        ("quill --max-num-batched-tokens 2K", "quill --max-num-batched-tokens 2048"),
        ("quill --served-model-name a b --port 2", "quill --served-model-name a,b --port 2"),
        ("--served-model-name a quill", "--served-model-name a quill"),
        ("--port 2 --served-model-name a quill", "--port 2 --served-model-name a quill"),
        ("--port 2 --model quill --served-model-name a b", "--port 2 quill --served-model-name a,b"),
        ("quill --lora-modules x=1 y=2", "quill --lora x=1 --lora y=2"),
        ("quill --quantization int8", "quill --quantize int8"),
        ("quill --kv-cache-dtype fp8_e4m3", "quill --kv-dtype fp8"),
        ("quill --tool-call-parser llama3_json", "quill --tool-format llama3-json"),
        ("quill --tool-call-parser hermes", "quill --tool-format hermes"),
        ("quill --tool-call-parser of-tomorrow", "quill --tool-format auto"),
        ("quill --no-enable-prefix-caching", "quill --no-prefix-caching"),
        ("-m x.gguf -c 4096 -t 4", "x.gguf --max-model-len 4096 --threads 4"),
        ("-m x.gguf -np 2 -ctk q8_0", "x.gguf --max-num-seqs 2 --kv-dtype int8"),
        ('quill --speculative-config {"method":"ngram"}', "quill --speculate ngram"),
        ("--model-path quill --tp 2 --context-length 4096", "quill --tensor-parallel-size 2 --max-model-len 4096"),
        ("--model-path=quill --max-running-requests 8", "quill --max-num-seqs 8"),
        ("--model-path quill --schedule-policy lpm", "quill --order longest-prefix"),
        ("--model-path quill --disable-radix-cache", "quill --no-prefix-caching"),
        ("--model-path quill --lora-paths x=1 y=2", "quill --lora x=1 --lora y=2"),
        ("--model-path quill --speculative-algorithm EAGLE3", "quill --speculate eagle"),
    ],
)  # fmt: skip
def test_flags_of_other_servers_become_ours(given: str, ours: str) -> None:
    assert translated(given.split()) == (ours.split(), [])


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ("quill --enable-auto-tool-choice", "--enable-auto-tool-choice has no effect"),
        (
            "quill --quantization=awq",
            "--quantization awq has no effect: the format of a quantized checkpoint",
        ),
        ("quill -ngl -1", "-ngl -1 has no effect"),
        ("quill --max-model-len auto", "--max-model-len auto has no effect"),
        ("quill --attention-backend flashinfer", "--attention-backend flashinfer has no effect"),
        ("quill --ep 1", "--ep 1 has no effect"),
    ],
)
def test_a_flag_without_effect_is_named(given: str, note: str) -> None:
    found, notes = translated(given.split())
    assert found == ["quill"]
    assert len(notes) == 1
    assert notes[0].startswith(note)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("quill --cpu-offload-gb 2", "weights are not split between devices"),
        ("quill --mmproj x", "models take text alone"),
        ("quill --task transcription", "Quire serves text generation, embeddings and scores"),
        ("quill --kv-cache-memory-bytes", "--kv-cache-memory-bytes needs a value; here it is --kv-memory"),
        ("quill --speculative-config {", "--speculative-config is not JSON"),
        ("quill --max-total-tokens 4096", "--num-kv-blocks N is the KV cache in blocks"),
        ("quill --node-rank 1", "one command starts all ranks"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        translated(given.split())
    assert message in str(error.value)


def test_the_table_leads_to_flags_that_exist() -> None:
    ours = {flag_name(name) for name in settings_of(ServerArgs)}
    process = subprocess.run(
        [sys.executable, "-m", "quire.cli", "serve", "--help-all"], capture_output=True, text=True, check=True,
        env=os.environ | {"COLUMNS": "120"},
    )  # fmt: skip
    for server, flags in foreign_flags().items():
        for flag, rule in flags.items():
            assert rule.keys() <= {"to", "values", "neutral", "effect", "instead", "bare", "many"}, flag
            assert rule.keys() & {"to", "effect", "instead"}, flag
            to = rule.get("to", "MODEL")
            assert to == "MODEL" or to in ours or to in process.stdout, (server, flag, to)


def test_the_tables_of_other_servers_are_of_today() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python tools/foreign_docs.py"
