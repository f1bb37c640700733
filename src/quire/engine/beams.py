"""Beam search of `LLM`, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.results import RequestOutput
from quire.request import SamplingParams


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of one search. Beams are compared by the sum of their log-probabilities ÷ length ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling(self) -> SamplingParams:
        """Return the same as the parameters of a request."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=0.0,
            use_beam_search=True,
            ignore_eos=self.ignore_eos,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]  # prompt and output
    text: str
    cum_logprob: float  # in the output
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def from_output(cls, output: RequestOutput) -> BeamSearchOutput:
        """Return the answers of a request with beam search as beams."""
        prompt = list(output.prompt_token_ids)
        return cls(
            [
                BeamSearchSequence(
                    [*prompt, *choice.token_ids],
                    (output.prompt or "") + choice.text,
                    choice.cumulative_logprob or 0.0,
                    choice.finish_reason,
                    choice.stop_reason,
                )
                for choice in output.outputs
            ]
        )
