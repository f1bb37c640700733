"""Planted faults in how requests, histories and calls are read."""

from __future__ import annotations

from mutant import Mutant

_CLOSED = ("tests/found/test_closed_objects.py",)
_VALUES = ("tests/found/test_schema_values.py",)
_CALLS = ("tests/found/test_calls_as_models_write_them.py",)
_HISTORIES = ("tests/found/test_histories.py",)
_REQUESTS = ("tests/found/test_request_values.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "min-tokens-taken-for-plain",
        "a request with min_tokens is taken for one whose logits nothing changes",
        "src/quire/step.py",
        "        changes = penalties != (0.0, 0.0, 1.0) or s.logit_bias or s.bad_words_token_ids or s.min_tokens\n",
        "        changes = penalties != (0.0, 0.0, 1.0) or s.logit_bias or s.bad_words_token_ids\n",
        ("tests/runner/test_seq_state.py::test_each_field_that_changes_logits_has_a_state",),
    ),
    Mutant(
        "requests-options-of-one-of-closed",
        "options of a oneOf that can hold together are closed, so that the schema becomes wider",
        "src/quire/text/closed_objects.py",
        "if len(options) > 1 and not self._are_apart(options):",
        "if False and not self._are_apart(options):",
        _CLOSED,
    ),
    Mutant(
        "requests-negated-objects-closed",
        "objects inside of not are closed, so that the schema becomes wider",
        "src/quire/text/closed_objects.py",
        '_NEGATED = ("not", "if", "contains")',
        '_NEGATED = ("contains",)',
        _CLOSED,
    ),
    Mutant(
        "requests-closed-to-the-letter",
        "disable_additional_properties = false closes objects as well",
        "src/quire/text/grammar.py",
        '"closed": params.disable_additional_properties is not False,',
        '"closed": True,',
        _CLOSED,
    ),
    Mutant(
        "requests-endless-schema",
        "a schema that needs itself counts as one that has a value",
        "src/quire/text/schema_values.py",
        "return self._kinds.get(id(schema), frozenset() if id(schema) in self._paths else ALL)",
        "return self._kinds.get(id(schema), ALL)",
        _VALUES,
    ),
    Mutant(
        "requests-excluded-bound-written",
        "an excluded whole number below a fraction is let in",
        "src/quire/text/number_ranges.py",
        "value += sign * _NEAREST * max(1, abs(int(value)))",
        "value += 0 * _NEAREST",
        _VALUES,
    ),
    Mutant(
        "requests-cut-answer-is-a-call",
        "an answer that max_tokens cuts behind an object is a call, though text may have followed",
        "src/quire/text/output/parser.py",
        "if self._is_cut:",
        "if False:",
        _CALLS,
    ),
    Mutant(
        "requests-any-json-is-a-call",
        "JSON with the name of a tool that is not offered is held back",
        "src/quire/text/output/unmarked.py",
        "name = json.loads((yield from _one_of(reader, names)))",
        "name = yield from _text(reader)",
        _CALLS,
    ),
    Mutant(
        "requests-open-block-is-a-call",
        "calls in a code block that never ends count as the whole answer",
        "src/quire/text/output/unmarked.py",
        " and calls and not is_fenced:",
        " and calls:",
        _CALLS,
    ),
    Mutant(
        "requests-value-ends-at-any-key",
        "a value ends at text that looks like the key of a parameter that the tool has not",
        "src/quire/text/output/tagged.py",
        "ends = (yield from reader.starts(next_keys)) is not None",
        "ends = True",
        _CALLS,
    ),
    Mutant(
        "requests-newest-image-dropped",
        "an image in the newest message of the user becomes a line",
        "src/quire/api/history_parts.py",
        "    if newest:\n",
        "    if False:\n",
        _HISTORIES,
    ),
    Mutant(
        "requests-window-of-output-alone",
        "repeat_last_n reads the answer without the prompt",
        "src/quire/sampling/processors.py",
        "begin = max(0, len(self._ids) - self._window)",
        "begin = max(self._num_prompt, len(self._ids) - self._window)",
        ("tests/sampling/test_sampler.py",),
    ),
    Mutant(
        "requests-offsets-from-zero",
        "text_offset begins at 0 and not behind the prompt",
        "src/quire/api/dialects/openai/completions.py",
        "offset = self.offsets[index // self.n] if self.offsets else 0",
        "offset = 0",
        _REQUESTS,
    ),
    Mutant(
        "requests-all-tools-allowed",
        "allowed_tools leaves the other tools in the request",
        "src/quire/api/answer_form.py",
        'tools = [tool for tool in tools if tool["function"]["name"] in allowed]',
        "tools = list(tools)",
        _REQUESTS,
    ),
)
