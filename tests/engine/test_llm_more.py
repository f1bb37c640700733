"""The parts of vLLM's `LLM` beyond generating: beams, metrics, cache, sleep, and keywords at neutral values."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.args import EngineArgs
from quire.engine.assemble import NEUTRAL, NO_EFFECT, llm_args
from quire.errors import ConfigError

PROMPT = "It was a dark and"
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("quill", kv_memory="16MiB", max_model_len=256) as llm:
        yield llm


def test_beams_have_prompt_and_output_best_first(llm: LLM) -> None:
    (found,) = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
    assert len(found.sequences) == 3
    prompt_ids = llm.get_tokenizer().encode(PROMPT)
    for beam in found.sequences:
        assert beam.tokens[: len(prompt_ids)] == prompt_ids
        assert len(beam.tokens) == len(prompt_ids) + 8
        assert beam.text.startswith(PROMPT)
    sums = [beam.cum_logprob for beam in found.sequences]
    assert sums == sorted(sums, reverse=True)
    assert sums[0] < 0.0


def test_metrics_have_the_names_of_a_server(llm: LLM) -> None:
    before = {metric.name: metric.value for metric in llm.get_metrics()}
    llm.generate(PROMPT, PARAMS, use_tqdm=False)
    after = {metric.name: metric for metric in llm.get_metrics()}
    assert after["vllm:num_requests_running"].kind == "gauge"
    grown = [name for name, metric in after.items() if metric.value > before[name]]
    assert "quire:steps" in grown
    assert all(after[name].kind == "counter" for name in grown if name == "quire:steps")


def test_a_reset_cache_has_no_prefix(llm: LLM) -> None:
    text = " ".join([PROMPT] * 20)
    llm.generate(text, PARAMS, use_tqdm=False)
    assert llm.generate(text, PARAMS, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(text, PARAMS, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_model_that_wakes_up_answers_as_before(llm: LLM) -> None:
    before = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].text
    llm.sleep()
    llm.sleep(2)
    with pytest.raises(ConfigError, match="the model sleeps; call wake_up"):
        llm.generate(PROMPT, PARAMS, use_tqdm=False)
    llm.wake_up()
    assert llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].text == before
    with pytest.raises(ConfigError, match="level = 3 must be 1 or 2"):
        llm.sleep(3)


def test_keywords_at_neutral_values_change_nothing() -> None:
    neutral = {name: values[0] for name, values in NEUTRAL.items()}
    # No user waits for one prompt of a list, so long ones have whole steps.
    plain = EngineArgs(model="quill", long_prefill_token_threshold=0)
    assert llm_args("quill", neutral | dict.fromkeys(NO_EFFECT, 1)) == plain
    given = {
        "kv_cache_dtype": "fp8_e4m3",
        "load_format": "dummy",
        "scheduling_policy": "priority",
        "dtype": "half",
    }
    assert llm_args("quill", given) == replace(
        plain, kv_dtype="fp8", load_format="random", order="priority", dtype="float16"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_size": 2}, "several copies are for `quire serve --data-parallel-size`"),
        (
            {"tokenizer_mode": "mistral"},
            "tokenizer_mode = 'mistral' is not supported: it may be 'auto' or 'hf'",
        ),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb = 4 is not supported: it may be 0, or be left out"),
        ({"max_model_length": 4}, "unknown keyword 'max_model_length'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm_args("quill", given)


RAISES = """
import atexit, threading
from quire import LLM, SamplingParams
from quire.structured_outputs import StructuredOutputsParams
atexit.register(lambda: print(sorted(thread.name for thread in threading.enumerate())))
llm = LLM("quill", num_kv_blocks=4096)
form = {"structured_outputs": StructuredOutputsParams(regex="[a-z ]+")}
print(llm.generate(["It was"], SamplingParams(max_tokens=4))[0].outputs[0].finish_reason)
print(llm.generate(["It was"], SamplingParams(max_tokens=4, **form))[0].outputs[0].finish_reason)
raise ValueError("mine")
"""


def test_a_script_that_raises_ends_with_its_traceback_alone() -> None:
    """No thread of the engine is left when the interpreter ends: native code in one would abort the process."""
    done = subprocess.run([sys.executable, "-c", RAISES], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert done.stdout == "length\nlength\n['MainThread']\n"
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: mine"
    assert done.stderr.count("Traceback") == 1
