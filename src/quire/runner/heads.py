"""Heads over the model's hidden states in a worker: `HeadRunner` (EAGLE, MTP) and `MedusaModel`.

`HiddenStates` keeps the model's hidden state of each token in the slot that its K and V have: forks, prefix hits and
evictions of a block hold for it too. It is written by the model's own forward, so a head may begin to draft at any
token. A head's row of token i reads slot i − 1, and its K and V lie there as well: slot i − 1 of a block that several
sequences share then depends on a token behind it, which costs drafts at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig, HeadsConfig
from quire.families.head_spec import HeadSpec
from quire.kernels import registry
from quire.kernels.kv_blocks import KvView, copy_blocks
from quire.kernels.pointwise import take_rows
from quire.kernels.registry import KernelChoice
from quire.kernels.rope import store_kv
from quire.kernels.tape import NotRecordable, StepTape
from quire.layers.attention import StepBatch
from quire.layers.weights import Build, Stage
from quire.models.decoder import Decoder, Ends
from quire.models.draft_head import DraftHead, MedusaHeads, SharedEnds
from quire.models.head_weights import iter_heads, read_d2t
from quire.models.loader import iter_weights
from quire.modelspec import ModelSpec
from quire.parallel.shard import Shard, uncut
from quire.runner.draft_chain import Feedback, Recorded
from quire.runner.input_batch import PreparedStep, StepBuffers
from quire.runner.memory import KvCache, reserve, torch_dtype
from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.draft_tree import Drafts
from quire.sampling.sampler import Sampler, columns_of
from quire.speculate.medusa import Node, planted


class HeadTarget(NamedTuple):
    """What heads read of the model: its hidden states, where it keeps them, and its ends."""

    decoder: Decoder
    ends: SharedEnds
    spec: ModelSpec  # the whole model
    first_layer: int  # this stage alone


def head_target(config: EngineConfig, heads: HeadSpec, decoder: Decoder, shard: Shard | None) -> HeadTarget:
    """Return what the rank of ``shard`` (None: the only one) has for ``heads``; what it has not whole is read again."""
    ends = SharedEnds(decoder.ends, decoder.ends)
    if shard is None:
        return HeadTarget(decoder, ends, decoder.spec, 0)
    spec, model = shard.whole, config.model
    missing = shard.lacks(heads.shared(spec))
    if missing:
        build = Build(decoder.dtype, registry.choose(config.runner), eps=0.0, formats=model.formats)
        embeds = "embed.weight" in missing
        own = Ends(spec, build, Stage(is_first=embeds, is_last=len(missing) > embeds))
        own.load(iter_weights(replace(model, spec=spec), decoder.dtype, cuts=uncut(missing)))
        reads_output = spec.tie_word_embeddings or "lm_head.weight" in missing
        ends = SharedEnds(own if embeds else ends.of_ids, own if reads_output else ends.of_logits)
    return HeadTarget(decoder, ends, spec, shard.layers.start)


class Unseen:
    """A `HiddenWatcher` where another rank drafts: it gets the layers' inputs from here, and equal collectives."""

    def __init__(self, taps: tuple[int, ...], shard: Shard) -> None:
        self.taps = tuple(tap - shard.layers.start for tap in taps)

    def store(self, batch: StepBatch, hidden: Sequence[Tensor]) -> None:
        """As `HiddenWatcher.store`: they are not kept."""


class HiddenStates:
    """``storage [num_blocks, block_size · size]``. A `HiddenWatcher` of the model."""

    def __init__(
        self, config: EngineConfig, size: int, kernels: KernelChoice, taps: tuple[int, ...],
        combine: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:  # fmt: skip
        """``combine``: the hidden states of ``taps`` → what is kept, ``[num_tokens, size]``."""
        self.taps = taps
        self.group = config.cache.windows.index(None)
        self._combine = combine
        block_size, dtype = config.cache.block_size, torch_dtype(config.model.dtype)
        assert config.speculate is not None
        num_blocks = config.cache.num_blocks + config.speculate.num_branch_blocks
        self.storage = reserve(num_blocks, block_size * size, dtype)
        self.rows = self.storage.view(-1, size)  # index: slot
        self._view = KvView(self.storage.unsqueeze(1), block_size, size, size, v_in_k=True)
        self._store = kernels.of(store_kv)

    def store(self, batch: StepBatch, hidden: Sequence[Tensor]) -> None:
        """As `HiddenWatcher.store`."""
        group = batch.groups[self.group]
        combined = self._combine(hidden).unsqueeze(1)
        self._store(combined, None, self._view, group.slot_blocks, group.slot_offsets)

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in list order."""
        copy_blocks(self.storage, moves)


class HeadRunner:
    """Computes rows of a `DraftHead`; for a draft model, `ModelRunner` does."""

    def __init__(self, config: EngineConfig, heads: HeadsConfig, target: HeadTarget) -> None:
        spec, kernels = heads.spec, registry.choose(config.runner)
        dtype = torch_dtype(heads.dtype)
        assert spec.model is not None
        self._head = DraftHead(spec, target.ends, config.model.max_model_len, kernels)
        self._head.load(iter_heads(heads, target.spec, dtype))
        self._ids = read_d2t(heads, target.spec) if 0 < spec.draft_vocab_size < spec.vocab_size else None
        self.vocab_size = spec.vocab_size
        self.block_size = config.cache.block_size
        layout = spec.model.draft_layout()
        self.kv = KvCache(spec.model, layout, config.cache.num_blocks, self.block_size, heads.dtype, kernels)
        combine = (lambda parts: self._head.fc(self._head.side_by_side(parts))) if spec.taps else _only
        taps = tuple(tap - target.first_layer for tap in spec.taps)
        self.hidden = HiddenStates(config, spec.hidden_size, kernels, taps, combine)
        target.decoder.watcher = self.hidden
        self._take_rows = kernels.of(take_rows)
        # What each sequence's last row says of its own token, by row of `WorkerSeqs`: a draft's row reads it.
        self._ahead = torch.zeros(0, spec.hidden_size, dtype=dtype)
        self._tape: StepTape | None = None
        self._buffers: StepBuffers | None = None  # whose steps `_tape` computes
        self.recorded: Recorded | None = None  # the same for `runner.draft_chain`
        self._found: Tensor  # the tape's: [max_logits, hidden_size]

    @torch.inference_mode()
    def record(self, buffers: StepBuffers) -> None:
        """Record the step of ``buffers``, so that it is replayed, if all of it is native."""
        self._slots = np.zeros(buffers.max_tokens, np.int64)
        slots = torch.from_numpy(self._slots)

        def forward() -> Tensor:
            self._found, logits = self._forward(buffers.whole, slots)
            return logits

        with suppress(NotRecordable):
            self._tape = StepTape(forward, buffers.max_tokens, buffers.max_seqs)
            self._buffers = buffers
            feedback = Feedback(self._slots, self._found, self.hidden.rows)
            self.recorded = Recorded(self._tape, buffers, self._ids, feedback)

    @torch.inference_mode()
    def compute(self, step: PreparedStep) -> Tensor:
        """Compute the step; return its logits: fp32 ``[num_logits, vocab_size]``, −inf for ids it does not know."""
        buffers, count = step.buffers, step.num_tokens
        slots = buffers.slot_blocks[0][:count] * self.block_size + buffers.slot_offsets[:count]
        self._read_ahead(step, slots)
        if self._tape is not None and buffers is self._buffers:
            self._slots[:count] = slots
            buffers.set_num_seqs(step.num_seqs)
            logits, hidden = self._tape.run(count, step.num_logits), self._found[: step.num_logits]
        else:
            hidden, logits = self._forward(step.batch, torch.from_numpy(slots))
        self._ahead[torch.from_numpy(step.rows)] = hidden
        if self._ids is None:
            return logits
        spread = torch.full((logits.shape[0], self.vocab_size), -torch.inf)
        spread[:, self._ids] = logits
        return spread

    def _read_ahead(self, step: PreparedStep, slots: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Put under the rows of drafts what the rows before them say, where the model has computed nothing yet."""
        if len(self._ahead) < len(step.seqs.num_tokens):
            more = torch.zeros(len(step.seqs.num_tokens) - len(self._ahead), *self._ahead.shape[1:])
            self._ahead = torch.cat((self._ahead, more.to(self._ahead.dtype)))
        drafts = step.columns["position"] > step.seqs.num_settled[step.rows]
        if drafts.any():
            rows = slots[step.buffers.logits_indices[: step.num_logits][drafts]]
            self.hidden.rows[torch.from_numpy(rows)] = self._ahead[torch.from_numpy(step.rows[drafts])]

    def _forward(self, batch: StepBatch, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._head.forward(batch, self._take_rows(self.hidden.rows, slots), self.kv.views[0])


class MedusaModel:
    """A `quire.speculate.medusa.MedusaForward`: the heads, and the hidden states of the last step."""

    def __init__(
        self, config: EngineConfig, heads: HeadsConfig, target: HeadTarget, seqs: WorkerSeqs
    ) -> None:
        kernels = registry.choose(config.runner)
        self._heads = MedusaHeads(heads.spec, target.ends, kernels)
        self._heads.load(iter_heads(heads, target.spec, torch_dtype(heads.dtype)))
        self.num_heads = heads.spec.num_heads
        self.worker_seqs = seqs
        self._seen: tuple[PreparedStep, Sequence[int], Tensor] | None = None  # from `watch`
        self.sampler = Sampler(heads.spec.vocab_size, kernels)
        self.keeps_probs = config.speculate is not None and config.speculate.accept == "rejection"
        # What recorded heads read, and they, by their number; None: they run call by call.
        self._input = torch.zeros(
            config.scheduler.max_num_seqs, heads.spec.hidden_size, dtype=target.ends.dtype
        )
        self._tapes: dict[int, StepTape | None] = {}

    def _logits(self, seqs: Sequence[WorkerSeq], num_heads: int) -> Tensor:
        """Return fp32 ``[num_seqs · num_heads, vocab_size]`` behind the last tokens of ``seqs``."""
        hidden, num_seqs = self._last(seqs), len(seqs)
        if num_heads not in self._tapes:
            self._tapes[num_heads] = None
            with suppress(NotRecordable):
                self._tapes[num_heads] = StepTape(
                    lambda: self._heads.logits(self._input, num_heads, num_spare=1),
                    len(self._input), (len(self._input) + 1) * num_heads,
                )  # fmt: skip
        tape = self._tapes[num_heads]
        if tape is None or num_seqs > len(self._input):
            return self._heads.logits(hidden, num_heads)
        self._input[:num_seqs] = hidden
        return tape.run(num_seqs, num_seqs * num_heads)

    def watch(self, step: PreparedStep, counts: Sequence[int], hidden: Tensor) -> None:
        """Note what gave the logits of a step: ``hidden [num_logits, hidden_size]``, for `sample` before the next step.

        A sequence has ``counts`` rows: of its last known token, and of each draft.
        """
        self._seen = step, counts, hidden

    def _last(self, seqs: Sequence[WorkerSeq]) -> Tensor:
        """Return the hidden states that sampled the last tokens of ``seqs``: ``[num_seqs, hidden_size]``.

        Where a step was computed in halves, those of the first half are not there, and another row stands for each.
        """
        assert self._seen is not None
        step, counts, hidden = self._seen
        firsts = np.cumsum([0, *counts[:-1]]).tolist()
        rows = {
            seq.seq_id: first + (1 + state.accepted[-1] if (state := seq.drafting) and state.accepted else 0)
            for first, seq in zip(firsts, step.sampling, strict=True)
        }
        return hidden[torch.tensor([rows.get(seq.seq_id, 0) for seq in seqs])]

    @torch.inference_mode()
    def sample(self, seq_ids: Sequence[int], trees: Sequence[Sequence[Node]]) -> list[Drafts]:
        """As `MedusaForward.sample`."""
        seqs = [seq for seq in map(self.worker_seqs.find, seq_ids) if seq is not None]
        assert len(seqs) == len(seq_ids)
        num_heads, num_ranks = (1 + max(max(node[i] for node in tree) for tree in trees) for i in range(2))
        logits = self._logits(seqs, num_heads)
        rows = np.array([seq.row for seq in seqs])
        # Head k samples the token k behind the known ones, with the noise of its position.
        positions = self.worker_seqs.num_settled[rows][:, None] - 1 + np.arange(num_heads)
        columns = columns_of(self.worker_seqs.columns, np.repeat(rows, num_heads), positions.ravel())
        choices: list[list[int]] = [[] for _ in range(len(logits))]  # index: row, a head of a sequence
        probs: list[list[Tensor]] = [[] for _ in choices]

        def edit(row: int, logits: Tensor) -> None:  # without the drafts before it
            processors = seqs[row // num_heads].processors
            assert processors is not None
            processors.edit(logits)
            logits[choices[row]] = -torch.inf

        edits = any(seq.processors is not None for seq in seqs)
        # A choice is what the head samples where those before it are forbidden.
        for rank in range(num_ranks):
            ids, best = self.sampler.sample(logits, columns, edit if edits else None)
            if self.keeps_probs:
                distributions = self.sampler.probabilities(logits, columns, edit)
            for row, (token_id, fine) in enumerate(
                zip(ids.tolist(), np.isfinite(best).tolist(), strict=True)
            ):
                if fine and len(choices[row]) == rank:
                    choices[row].append(token_id)
                    if rank + 1 < num_ranks:
                        logits[row, token_id] = -torch.inf
                    if self.keeps_probs:
                        probs[row].append(distributions[row])
        drafts = []
        for place, (seq, tree) in enumerate(zip(seqs, trees, strict=True)):
            first = place * num_heads
            proposed, nodes = planted(tree, choices[first : first + num_heads])
            if self.keeps_probs:
                self.worker_seqs.drafting(seq).probs.extend(
                    probs[first + node.head][node.rank] for node in nodes
                )
            drafts.append(proposed)
        return drafts


def _only(parts: Sequence[Tensor]) -> Tensor:
    (part,) = parts
    return part
