"""The oracle of beam search: the fake model and lists, no sequences, no blocks."""

from __future__ import annotations

from tests.fakes.model import FakeModel, chain, next_state

from quire.request import Request


def plain_search(one: Request, max_model_len: int, model: FakeModel) -> list[list[int]]:
    """Return the n best outputs of a request."""
    params, prompt = one.sampling, list(one.prompt_token_ids)
    width = params.best_of or params.n
    ends = {*params.eos_token_ids, *params.stop_token_ids}
    assert params.max_tokens is not None
    longest = min(params.max_tokens, max_model_len - len(prompt))
    num_top = max(2, 1 + len(ends)) * width
    beams: list[tuple[float, list[int], int]] = [
        (0.0, [], chain(prompt)[-1])
    ]  # sum, output, state of the model
    done: list[tuple[float, list[int]]] = []
    while beams:
        found = []
        for before, known, state in beams:
            entry = model.logprobs(state, num_top, 0)
            for token, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
                found.append((before + logprob, [*known, token], state))
        found = sorted(found, key=lambda item: -item[0])[:num_top]
        beams = []
        for place, (total, output, state) in enumerate(found):
            length = len(output)
            if output[-1] in ends or length == longest:
                if place < width:
                    done.append((total / length**params.length_penalty, output))
            elif len(beams) < width:
                position = len(prompt) + length - 1
                beams.append((total, output, next_state(state, position, output[-1])))
        done = sorted(done, key=lambda item: -item[0])[:width]
        if beams and len(done) == width:
            length = len(beams[0][1])
            if params.early_stopping == "never" and params.length_penalty > 0:
                length = longest
            hopeless = beams[0][0] / length**params.length_penalty <= done[-1][0]
            if hopeless or params.early_stopping is True:
                break
    return [output for _, output in done[: params.n]]
