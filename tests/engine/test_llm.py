"""The offline API: vLLM's names and forms, in an interpreter as bare as a PyTorch container."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.assemble import llm_args
from quire.engine.in_process import InProcessClient
from quire.errors import ConfigError, RequestError
from quire.request import FinishReason

ROOT = Path(__file__).resolve().parents[2]
BARE_LACKS = (
    "msgspec",
    "zmq",
    "llguidance",
    "gguf",
    "starlette",
    "uvicorn",
    "pydantic",
    "rich",
    "quire._native",
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        "quill", num_kv_blocks=64, max_model_len=256, max_num_batched_tokens=64, max_queue=3, threads=1
    )


def key(output: RequestOutput) -> list[object]:
    return [(o.index, o.text, o.token_ids, o.finish_reason) for o in output.outputs]


def test_generate_keeps_the_order_and_equals_one_at_a_time(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The captain")
    prompts = [
        "Once upon a time",
        {"prompt_token_ids": ids},
        {"prompt": "The captain"},
        "It was",
        "She",
        "He",
    ]
    params = [SamplingParams(max_tokens=3 + i, seed=i, n=1 + i % 2) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params)  # more than max_queue
    assert [o.prompt for o in outputs] == ["Once upon a time", None, "The captain", "It was", "She", "He"]
    assert outputs[1].prompt_token_ids == tuple(ids)
    for output, prompt, sampling in zip(outputs, prompts, params, strict=True):
        (alone,) = llm.generate(prompt, sampling, use_tqdm=False)
        assert key(alone) == key(output)
        assert output.finished
        assert [o.index for o in output.outputs] == list(range(sampling.n))
        assert all(o.finish_reason == "length" for o in output.outputs)
        assert "".join(c.text for c in llm.stream(prompt, sampling) if c.index == 0) == output.outputs[0].text


def test_a_list_of_ids_is_one_prompt(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    assert [o.prompt_token_ids for o in llm.generate([5, 6, 7], sampling)] == [(5, 6, 7)]
    assert [o.prompt_token_ids for o in llm.generate([[5, 6], [7]], sampling)] == [(5, 6), (7,)]


def test_logprobs_and_stop_strings(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
    (whole,) = llm.generate("Once upon a time", sampling)
    (answer,) = whole.outputs
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 6
    sampled = [table[token] for table, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in sampled))
    assert all(entry.rank == 1 for entry in sampled)
    assert "".join(entry.decoded_token for entry in sampled) == answer.text
    stop = answer.text[4:6]
    (cut,) = llm.generate("Once upon a time", SamplingParams(max_tokens=6, temperature=0.0, stop=[stop]))
    assert cut.outputs[0].text == answer.text[: answer.text.index(stop)]
    assert cut.outputs[0].stop_reason == stop


def test_prompt_logprobs_equal_those_of_the_same_answer(llm: LLM) -> None:
    (whole,) = llm.generate(
        "The sea", SamplingParams(max_tokens=80, temperature=0.0, logprobs=1, ignore_eos=True)
    )
    (answer,) = whole.outputs
    assert whole.prompt_logprobs is None
    prompt = [*whole.prompt_token_ids, *answer.token_ids]  # longer than a step
    for n in (1, 2):
        (scored,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1, n=n))
        assert scored.prompt_logprobs is not None
        assert scored.prompt_logprobs[0] is None
        assert scored.prompt_logprobs[-80:] == answer.logprobs
        assert [(o.token_ids, o.finish_reason) for o in scored.outputs] == [((), "length")] * n
    with pytest.raises(RequestError, match="max_tokens = 0"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embed(llm: LLM, pooling: Any) -> None:
    texts = [
        "The sea was calm. " * 12,
        "She",
        "The sea was calm. " * 12,
    ]  # longer than a step, and the same prompt again
    outputs = llm.embed(texts, pooling=pooling, use_tqdm=False)
    vectors = [o.outputs.embedding for o in outputs]
    assert vectors[0] == vectors[2] != vectors[1]
    assert [llm.embed(t, pooling=pooling)[0].outputs.embedding for t in texts] == vectors
    assert sum(x * x for x in vectors[0]) == pytest.approx(1.0, abs=1e-6)
    (raw,) = llm.embed("She", pooling=pooling, normalize=False)
    length = sum(x * x for x in raw.outputs.embedding) ** 0.5
    assert [x / length for x in raw.outputs.embedding] == pytest.approx(vectors[1], abs=1e-6)
    (short,) = llm.embed("She", pooling=pooling, dimensions=8)
    part = sum(x * x for x in vectors[1][:8]) ** 0.5
    assert short.outputs.embedding == pytest.approx([x / part for x in vectors[1][:8]], abs=1e-6)
    with pytest.raises(RequestError, match="dimensions"):
        llm.embed("She", dimensions=len(vectors[0]) + 1)
    with pytest.raises(RequestError, match="'last' or 'mean'"):
        llm.embed("She", pooling="cls")  # type: ignore[arg-type]


def test_score(llm: LLM) -> None:
    documents = ["The girl lived by the sea.", "It was a cold day in the woods."]
    for scoring in ("likelihood", "yes_no"):
        scores = [o.outputs.score for o in llm.score("Where did the girl live?", documents, scoring=scoring)]
        assert all(0.0 < score < 1.0 for score in scores)
        queries = ["Where did the girl live?"] * 2
        assert [o.outputs.score for o in llm.score(queries, documents, scoring=scoring)] == scores
    same = "The girl lived by the sea in a small house."
    echo, other = (o.outputs.score for o in llm.score(same, [same, documents[1]]))
    assert echo > other  # a text is likelier after itself
    for arguments, what in (
        ((["a", "b"], ["c"]), "2 queries"),
        (("", ["c"]), "query is empty"),
        (("a", [""]), "documents is empty"),
    ):
        with pytest.raises(RequestError, match=what):
            llm.score(*arguments)
    with pytest.raises(RequestError, match="scoring = 'bm25'"):
        llm.score("a", "b", scoring="bm25")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="yes_no"):
        llm.score("a", "b", instruction="c")


def test_best_of_and_beams(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3, n=4, logprobs=0, ignore_eos=True)
    (four,) = llm.generate("The sea", params)
    means = {o.text: (o.cumulative_logprob or 0.0) / 6 for o in four.outputs}
    (best,) = llm.generate("The sea", SamplingParams(max_tokens=6, seed=3, n=2, best_of=4, ignore_eos=True))
    assert [o.text for o in best.outputs] == sorted(means, key=lambda text: -means[text])[:2]
    assert [(o.index, o.logprobs) for o in best.outputs] == [(0, None), (1, None)]
    beams = SamplingParams(max_tokens=6, n=3, best_of=4, use_beam_search=True, logprobs=1, ignore_eos=True)
    (found,) = llm.generate("The sea", beams)
    totals = [o.cumulative_logprob or 0.0 for o in found.outputs]
    assert totals == sorted(totals, reverse=True)
    for output in found.outputs:  # the same tokens as a prompt
        prompt = [*found.prompt_token_ids, *output.token_ids]
        (scored,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert scored.prompt_logprobs is not None
        assert scored.prompt_logprobs[-6:] == output.logprobs


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    sampling = SamplingParams(max_tokens=5, temperature=0.0)
    (one,) = llm.chat(messages, sampling)
    two = llm.chat([messages, messages], sampling)
    assert [key(o) for o in two] == [key(one)] * 2
    text = llm.render_chat(messages)
    (same,) = llm.generate(
        {"prompt_token_ids": llm.get_tokenizer().encode(text, add_special_tokens=False)}, sampling
    )
    assert key(same) == key(one)
    assert one.prompt_token_ids.count(one.prompt_token_ids[0]) == 1, "a doubled BOS"


def test_what_can_be_known_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.client.core.stats().num_requests
    with pytest.raises(RequestError, match="context of this model is 256"):
        llm.generate(["fine", "x" * 9999], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate(["fine"], [SamplingParams(), SamplingParams()])
    with pytest.raises(RequestError, match="prompt 0 is 7"):
        llm.generate([7.5])  # type: ignore[list-item]
    assert llm.client.core.stats().num_requests == before


def test_a_failed_request_does_not_lose_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = llm.client.core.scheduler
    real = scheduler.add
    monkeypatch.setattr(
        type(scheduler),
        "add",
        lambda self, request, now: (
            refuse(request) if request.prompt_token_ids == (9,) else real(request, now)
        ),
    )
    sampling = SamplingParams(max_tokens=2)
    outputs = llm.generate([[8], [9], [10]], sampling)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert outputs[1].outputs[0].error == "no room"


def refuse(request: object) -> list[object]:
    from quire.request import TokenEvent

    name = request.request_id  # type: ignore[attr-defined]
    return [TokenEvent(name, 0, finish_reason=FinishReason.ERROR, error="no room", error_kind="capacity")]


def test_leaving_a_stream_frees_the_engine(llm: LLM) -> None:
    stream = llm.stream("Once", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("x", SamplingParams(max_tokens=1))
    assert isinstance(llm.client, InProcessClient)
    assert not llm.client.core.has_work


def test_requests_get_their_seeds_from_that_of_the_llm(llm: LLM) -> None:
    first = [o.seed for o in llm.generate(["a", "b"], SamplingParams(max_tokens=1))]
    assert len(set(first)) == 2
    (given,) = llm.generate("a", SamplingParams(max_tokens=1, seed=123))
    assert given.seed == 123


def test_keywords_and_aliases() -> None:
    args = llm_args("m", {"num_gpu_blocks_override": 7, "dtype": "half", "tensor_parallel_size": 1})
    assert (args.num_kv_blocks, args.dtype) == (7, "float16")
    assert (
        llm_args("m", {"gpu_memory_utilization": 0.5, "trust_remote_code": True}).gpu_memory_utilization
        == 0.5
    )
    assert llm_args("m", {"quantization": "int8"}).quantize == "int8"
    for given, says in (
        ({"max_modle_len": 5}, "did you mean 'max_model_len'"),
        ({"quantisation": "int8"}, "did you mean 'quantization'"),
        ({"data_parallel_size": 2}, "several copies are for"),
        ({"quantization": "int8", "quantize": "int8"}, "set the same thing"),
        ({"max_model_len": "many"}, "max_model_len"),
    ):
        with pytest.raises(ConfigError, match=says):
            llm_args("m", given)


def test_the_offline_api_runs_in_a_bare_torch_container() -> None:
    code = "\n".join(
        [
            "import sys",
            *(f"sys.modules[{name!r}] = None" for name in BARE_LACKS),
            "from quire import LLM, SamplingParams",
            "llm = LLM('quill', num_kv_blocks=8, max_model_len=64, threads=1)",
            "print(llm.generate('Once upon', SamplingParams(max_tokens=2))[0].outputs[0].finish_reason)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["length"]


def test_every_engine_module_imports_without_torch() -> None:
    modules = [
        f"quire.engine.{path.stem}"
        for path in sorted((ROOT / "src/quire/engine").glob("*.py"))
        if path.stem != "__init__"
    ]
    code = "import sys\nsys.modules['torch'] = None\n" + "\n".join(f"import {m}" for m in modules)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
