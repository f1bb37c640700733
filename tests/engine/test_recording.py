"""The flight recorder of a real engine: files at a crash and when asked, bounded and private; ``quire replay``."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.toy import engine_config
from tests.fakes.engine import CRASHING, FAKE
from tests.lora.peft_files import make_adapters

from quire.args import EngineArgs
from quire.cli.flags import ReplayArgs
from quire.cli.replay import replay
from quire.clock import WallClock
from quire.config import EngineConfig, RecorderConfig
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.in_process import InProcessClient
from quire.engine.messages import SaveRecording
from quire.engine.process import ProcessClient
from quire.engine.recording_file import MAX_FILES, keep, load, recorder_config, save
from quire.errors import ConfigError, EngineDeadError, ModelLoadError
from quire.executor.recorder import Recorder, Recording
from quire.models.fingerprint import fingerprint
from quire.request import FinishReason, Request, SamplingParams
from quire.spans import Span
from quire.step import NewSeq, SeqPlan, SeqResult, StepPlan, StepResult

GRAMMAR = json.dumps({"grammars": [{"lark_grammar": 'start: "[" /[0-9]{2}/ ("," /[0-9]{2}/)* "]"'}]})


def quill(folder: Path, **settings: Any) -> EngineConfig:
    args = EngineArgs(num_kv_blocks=64, max_model_len=256, threads=1, max_num_seqs=8, **settings)
    config, checkpoint = configure(args, detect_device("cpu"))
    recorder = recorder_config(
        str(folder), 100, with_ids=True, args=args, config=config, fingerprint=fingerprint(checkpoint)
    )
    return replace(config, recorder=recorder)


def request(name: str, seed: int, **fields: Any) -> Request:
    grammar = fields.pop("grammar", None)
    sampling = SamplingParams(seed=seed, **fields).resolve(
        seed=seed, max_tokens=fields["max_tokens"], eos_token_ids=(1,), bad_words_token_ids=()
    )
    prompt = tuple(300 + (7 * seed + i) % 900 for i in range(20))
    return Request(name, prompt, sampling, 0.0, grammar=grammar)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of Quill with n, seeds, penalties, a grammar, log-probabilities and speculation."""
    folder = tmp_path_factory.mktemp("recordings")
    config = quill(folder, speculate="ngram")
    client = InProcessClient(config, WallClock())
    client.wait_ready()
    client.send(request("a", 1, max_tokens=24, n=3, temperature=0.9, presence_penalty=0.7, logprobs=2))
    client.send(request("b", 2, max_tokens=24, temperature=0.0, repetition_penalty=1.2))
    client.send(request("c", 3, max_tokens=16, temperature=0.8, grammar=GRAMMAR))
    left = {("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0)}
    while left:
        for event in client.receive():
            assert event.error is None, event.error
            if event.finish_reason is not None:
                left.remove((event.request_id, event.sample_index))
    recorder = client.core.recorder
    assert recorder is not None
    path = Path(save(recorder, config, "asked")["path"])
    client.close()
    return path


def test_replay_is_equal(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(recorded, ReplayArgs(threads=1)) == 0
    said = capsys.readouterr().out
    assert said.endswith("\nequal\n")
    assert "recorded  " in said


def test_a_ring_behind_the_load_of_its_adapters_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = quill(tmp_path / "recordings", max_loras=2)
    config = replace(config, recorder=replace(config.recorder, num_steps=12))  # the last of 30
    adapters = make_adapters(tmp_path, config.model.spec)
    client = InProcessClient(config, WallClock())
    client.wait_ready()
    for i, adapter in enumerate((*adapters[:2], None)):
        one = request(f"r{i}", 5, max_tokens=30, temperature=0.9, ignore_eos=True)
        client.send(replace(one, adapter=adapter))
    outputs: dict[str, list[int]] = {f"r{i}": [] for i in range(3)}
    num_left = 3
    while num_left:
        for event in client.receive():
            assert event.error is None, event.error
            outputs[event.request_id] += event.token_ids
            num_left -= event.finish_reason is not None
    assert len(set(map(tuple, outputs.values()))) == 3, "the adapters matter"
    recorder = client.core.recorder
    assert recorder is not None
    path = Path(save(recorder, config, "asked")["path"])
    client.close()
    assert len(load(path).steps) <= 12
    assert set(load(path).adapters.values()) == set(adapters[:2])
    assert replay(path, ReplayArgs(threads=1)) == 0
    assert "equal" in capsys.readouterr().out


def test_replay_fails_at_a_planted_difference(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = load(recorded)
    place = len(recording.steps) // 2
    step = recording.steps[place]
    assert step.result is not None
    seq = step.result.seqs[0]
    wrong = seq._replace(token_ids=(seq.token_ids[0] + 1, *seq.token_ids[1:]))
    recording.steps[place] = step._replace(result=replace(step.result, seqs=(wrong, *step.result.seqs[1:])))
    path = rewritten(recording, recorded, tmp_path)
    assert replay(path, ReplayArgs(threads=1)) == 1
    assert f"first difference: step {step.plan.step}, sequence {seq.seq_id}" in capsys.readouterr().out


def rewritten(recording: Recording, path: Path, folder: Path) -> Path:
    magic = path.read_bytes().partition(b"\n")[0] + b"\n"
    to = folder / "other.rec"
    to.write_bytes(magic + gzip.compress(msgspec.msgpack.encode(recording)))
    return to


def test_replay_of_another_checkpoint_names_both(recorded: Path, tmp_path: Path) -> None:
    recording = load(recorded)
    ours = recording.about["fingerprint"]
    recording.about["fingerprint"] = "0123456789abcdef01234567"
    with pytest.raises(ModelLoadError, match=f"{ours}.*0123456789abcdef01234567"):
        replay(rewritten(recording, recorded, tmp_path), ReplayArgs())


def test_damaged_recordings_are_config_errors(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.rec"
    data = recorded.read_bytes()
    for damaged in (b"", b"nothing", data[: len(data) // 2], data[:40] + b"x" * 40 + data[80:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"bad\.rec"):
            load(path)


def test_a_crash_leaves_a_private_file(tmp_path: Path) -> None:
    config = engine_config()
    config = replace(config, recorder=RecorderConfig(str(tmp_path / "new"), 4, True, "f", "{}"))
    client = ProcessClient(config, executor=f"{CRASHING}@7")
    client.wait_ready()
    client.send(Request("a", (1, 2, 3), SamplingParams(max_tokens=50, seed=1), 0.0))
    error: EngineDeadError | None = None
    while error is None:
        try:
            client.receive()
        except EngineDeadError as died:
            error = died
    assert "results come in order" in str(error)
    client.close()
    (path,) = (tmp_path / "new").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.name.endswith("-crash.rec")
    recording = load(path)
    assert [step.plan.step for step in recording.steps] == [3, 4, 5, 6]
    assert recording.live[0].new.prompt_token_ids == (1, 2, 3)
    assert "AssertionError" in recording.about["text"]


def test_a_recording_is_saved_when_asked_or_refused_when_off(tmp_path: Path) -> None:
    config = engine_config()
    client = ProcessClient(
        replace(config, recorder=RecorderConfig(str(tmp_path), 4, False, "f", "{}")),
        executor=f"{CRASHING}@99",
    )
    client.wait_ready()
    client.send(Request("a", (1, 2, 3), SamplingParams(max_tokens=3, seed=1), 0.0))
    while not any(event.finish_reason is FinishReason.LENGTH for event in client.receive()):
        pass
    client.send(SaveRecording("1"))
    client.receive()
    (reply,) = client.replies()
    client.close()
    recording = load(Path(reply.values["path"]))
    assert not recording.has_ids
    ids = {i for s in recording.steps for r in (s.result.seqs if s.result else ()) for i in r.token_ids}
    assert ids == {-1}
    assert recording.steps[0].plan.new_seqs[0].prompt_token_ids == (-1, -1, -1)
    with pytest.raises(ConfigError, match="no-record-ids"):
        replay(Path(reply.values["path"]), ReplayArgs())


def test_files_are_few(tmp_path: Path) -> None:
    for i in range(MAX_FILES + 3):
        keep(tmp_path, f"{i}-asked.rec", b"x", datetime(2026, 1, 1, 0, i, tzinfo=UTC))
    keep(tmp_path, "1-death.jsonl", b"x", datetime(2025, 1, 1, tzinfo=UTC))
    names = sorted(path.name for path in tmp_path.glob("*.rec"))
    assert len(names) == MAX_FILES
    assert names[0].endswith("-3-asked.rec")
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_the_ring_is_bounded_in_bytes() -> None:
    recorder = Recorder(1000, max_bytes=100_000)
    sampling = SamplingParams(max_tokens=1)
    for step in range(200):
        new = NewSeq(step, 0, tuple(range(1000)), (), sampling, 0)
        recorder.submitted(StepPlan(step, (new,), (SeqPlan(step, 0, 0, 1000),), gone=(step - 1,)), 0.0)
        recorder.collected(StepResult(step, (SeqResult(step, 0, (1,)),)), 0.0)
    recording = recorder.take({}, "{}", with_ids=True)
    assert [step.plan.step for step in recording.steps] == [198, 199]
    assert [seq.new.seq_id for seq in recording.live] == [197]


def test_pixels_count_and_are_left_out_of_recordings_without_ids() -> None:
    recorder = Recorder(1000, max_bytes=100_000)
    sampling = SamplingParams(max_tokens=1)
    for step in range(20):
        pixels = bytes([step]) * 40_000
        new = replace(
            NewSeq(step, 0, (1, 2, 3), (), sampling, 0), spans=(Span(0, 2, b"d" * 32, (4, 4), pixels),)
        )
        recorder.submitted(StepPlan(step, (new,), (SeqPlan(step, 0, 0, 3),), gone=(step - 1,)), 0.0)
        recorder.collected(StepResult(step, (SeqResult(step, 0, (1,)),)), 0.0)
    whole = recorder.take({}, "{}", with_ids=True)
    assert [step.plan.step for step in whole.steps] == [18, 19]
    assert [step.plan.new_seqs[0].spans[0].data[0] for step in whole.steps] == [18, 19]
    bare = recorder.take({}, "{}", with_ids=False)
    news = [seq.new for seq in bare.live] + [new for step in bare.steps for new in step.plan.new_seqs]
    assert [new.spans for new in news] == [(), (), ()]


def test_the_watchdogs_dump_saves_the_ring_and_what_is_out(tmp_path: Path) -> None:
    config = replace(engine_config(), recorder=RecorderConfig(str(tmp_path), 8, True, "f", "{}"))
    client = ProcessClient(config, executor=f"{FAKE}@1000")
    client.wait_ready()
    client.send(Request("a", (1, 2, 3), SamplingParams(max_tokens=9, seed=1), 0.0))
    while not client.receive():
        pass
    time.sleep(0.4)  # the next step, which lasts a second, is out by then
    client.dump()
    deadline_s = time.monotonic() + 60
    while not (paths := list(tmp_path.glob("*-hang.rec"))):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    client.close()
    steps = load(paths[0]).steps
    assert steps[0].result is not None
    assert steps[-1].result is None
