"""`DraftModel`: a second, smaller model over the sequences of a worker; see `quire.speculate.draft`.

Its K and V lie in blocks of their own shape, under the ids of the target's blocks: forks, prefix hits and evictions of
a block hold for both. ``filled`` says how many leading slots of a block have K and V of known tokens (``written``: of
drafts, too); a block whose content came while the draft model was not asked is caught up when it is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

import numpy as np
import torch

from quire.config import EngineConfig
from quire.kernels import registry
from quire.kernels.sampling.noise import Streams, gumbel_argmax
from quire.models.decoder import Decoder
from quire.models.loader import iter_weights
from quire.parallel.shard import Shard
from quire.runner.base import Runner
from quire.runner.draft_chain import DraftChain, can_chain
from quire.runner.draft_state import DraftState
from quire.runner.heads import HeadRunner, MedusaModel, Unseen, head_target
from quire.runner.input_batch import InputBatch, PreparedStep
from quire.runner.memory import torch_dtype
from quire.runner.model_runner import ModelRunner
from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.processors import LogitsProcessors
from quire.sampling.sampler import TOKEN_NOISE, Sampler
from quire.speculate.draft import DraftProposer, Rows
from quire.speculate.lookahead import LookaheadProposer
from quire.speculate.medusa import MedusaProposer
from quire.speculate.ngram import NgramProposer
from quire.speculate.proposer import Proposer
from quire.step import SeqPlan

Slots = np.ndarray[tuple[int], np.dtype[np.int32]]  # index: block id
Edit = Callable[[int, torch.Tensor], None]


class DraftModel:
    """A `quire.speculate.draft.DraftForward` over ``seqs``: a model of its own, or a layer over hidden states."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner | HeadRunner, seqs: WorkerSeqs, *, own_vocab_size: int,
        max_tokens: int,
    ) -> None:  # fmt: skip
        """``max_tokens``: of a sequence that has drafts."""
        self.worker_seqs = seqs
        self.group = config.cache.windows.index(None)
        self.block_size = config.cache.block_size
        self.vocab_size = config.model.spec.vocab_size
        self.own_vocab_size = own_vocab_size
        self.max_tokens = max_tokens
        self.max_rows = config.scheduler.max_num_batched_tokens
        self.runner = runner
        self._lag = int(isinstance(runner, HeadRunner))  # slots by which a row lies before its token
        self._inputs = InputBatch(
            seqs, self.block_size, config.scheduler.max_num_seqs, self.max_rows, only_group=self.group,
            lag=self._lag,
        )  # fmt: skip
        self.runner.record(self._inputs.buffers)
        self.sampler = Sampler(self.vocab_size, registry.choose(config.runner))
        self.keeps_probs = config.speculate is not None and config.speculate.accept == "rejection"
        self.chain: DraftChain | None = None
        recorded, backend = runner.recorded, registry.choose(config.runner).backend("sample")
        if recorded is not None and can_chain(backend) and own_vocab_size == self.vocab_size:
            self.chain = DraftChain(
                recorded, seqs, self.group, self._lag, self.vocab_size, self.block_size, backend
            )
        # What the last `forward` had: its step, logits, processors and tokens.
        self._last: tuple[PreparedStep, torch.Tensor, Edit, list[int]]
        self.filled, self.written = (np.zeros(config.cache.num_blocks, np.int32) for _ in range(2))  # slots

    def copy(self, moves: Sequence[tuple[int, int]], *, hidden_only: bool = False) -> None:
        """Copy whole blocks (source, target) in list order, or of them only the model's hidden states."""
        if isinstance(self.runner, HeadRunner):
            self.runner.hidden.copy(moves)
        if hidden_only:
            return
        self.runner.kv.copy(moves)
        for source, target in moves:
            self.filled[target] = self.written[target] = self.filled[source]

    def forget(self, block_ids: Sequence[int]) -> None:
        """These blocks hold nothing yet."""
        if self.runner.kv.needs_clear:
            self.runner.kv.clear(block_ids)
        self.filled[block_ids] = self.written[block_ids] = 0

    def num_computed(self, seq_id: int, num_known: int, num_agreed: int) -> int:
        """As `DraftForward.num_computed`."""
        seq = self._seq(seq_id)
        num_known -= self._lag
        count = self._leading(self.filled, seq, num_known)
        self.worker_seqs.drafting(seq).num_filled = count
        # Drafts that were right are computed again, from the model's own hidden states.
        if self._lag:
            return count + 1
        return self._leading(self.written, seq, num_agreed) if count == num_known else count

    def claim(self, seq_id: int, start: int, end: int, claimed: set[int]) -> int:
        """As `DraftForward.claim`."""
        first, end_slot = max(0, start - self._lag) // self.block_size, end - self._lag
        for place, block in enumerate(self._blocks(self._seq(seq_id), end_slot)[first:].tolist(), first):
            if block in claimed:
                return max(start, place * self.block_size + self._lag)
            claimed.add(block)
        return end

    def _leading(self, slots: Slots, seq: WorkerSeq, end: int) -> int:
        """Return how many of the tokens below ``end`` are among the leading ``slots`` of the blocks, without a gap."""
        size = self.block_size
        first = min(self.worker_seqs.drafting(seq).num_filled, end) // size
        for place, block in enumerate(self._blocks(seq, end)[first:].tolist(), first):
            if (count := int(slots[block])) < size:
                return min(end, place * size + count)
        return end

    def forward(self, rows: Sequence[Rows]) -> list[int]:
        """As `DraftForward.forward`."""
        seqs = [self._seq(asked_rows.seq_id) for asked_rows in rows]
        plans = [
            SeqPlan(seq.seq_id, seq.epoch, asked_rows.start, asked_rows.end - asked_rows.start)
            for asked_rows, seq in zip(rows, seqs, strict=True)
        ]
        step = self._inputs.prepare(plans, seqs)
        ids = self._sample(step)
        for asked_rows, seq in zip(rows, seqs, strict=True):
            self._note(seq, asked_rows.start, asked_rows.end)
        drafts = dict(zip((seq.seq_id for seq in step.sampling), ids, strict=True))
        return [drafts.get(asked_rows.seq_id, -1) for asked_rows in rows]

    def chains(self, rows: Sequence[Rows], counts: Sequence[int]) -> list[list[int]] | None:
        """As `DraftForward.chains`: one native call, where nothing but the sampler has to look at the logits."""
        seqs = [self._seq(span.seq_id) for span in rows]
        if self.chain is None or self.keeps_probs or any(seq.processors is not None for seq in seqs):
            return None
        total = sum([span.end - span.start for span in rows])
        if total > self.chain.max_tokens or len(rows) > self.chain.max_seqs:
            return None
        order = sorted(range(len(rows)), key=counts.__getitem__, reverse=True)
        chains = [(seqs[place].row, rows[place].start, rows[place].end, counts[place]) for place in order]
        drafts_of: list[list[int]] = [[]] * len(rows)
        for place, (_, start, end, count), drafts in zip(order, chains, self.chain.run(chains), strict=True):
            self._note(seqs[place], start, end + count - 1)
            drafts_of[place] = drafts
        return drafts_of

    def append(self, seq_id: int, token_id: int) -> None:
        """As `DraftForward.append`."""
        seq = self._seq(seq_id)
        self.worker_seqs.token_ids[seq.row, self.worker_seqs.num_tokens[seq.row]] = token_id
        self.worker_seqs.num_tokens[seq.row] += 1
        if seq.processors is not None:
            seq.processors.advance(token_id)

    def take_back(self, seq_id: int, num_drafts: int) -> None:
        """As `DraftForward.take_back`."""
        seq = self._seq(seq_id)
        self.worker_seqs.num_tokens[seq.row] -= num_drafts
        if seq.processors is not None:
            seq.processors.rollback(num_drafts)

    @torch.inference_mode()
    def _sample(self, step: PreparedStep) -> list[int]:
        if self.own_vocab_size < self.vocab_size:
            ids = step.buffers.input_ids[: step.num_tokens]
            np.minimum(ids, self.own_vocab_size - 1, out=ids)
        logits = self.runner.compute(step)
        if not step.sampling:
            return []
        beyond = self.vocab_size - self.own_vocab_size
        if beyond > 0:
            logits = torch.nn.functional.pad(logits, (0, beyond), value=-torch.inf)
        elif beyond < 0:
            logits = logits[:, : self.vocab_size].contiguous()
        processors: list[LogitsProcessors | None] = [seq.processors for seq in step.sampling]

        def edit(row: int, logits: torch.Tensor) -> None:
            of_row = processors[row]
            assert of_row is not None
            of_row.edit(logits)

        ids, _ = self.sampler.sample(logits, step.columns, edit)
        if self.keeps_probs:
            of_rows = self.sampler.probabilities(logits, step.columns, edit)
            for seq, probs in zip(step.sampling, of_rows, strict=True):
                drafting_of(seq).probs.append(probs)
        drafts: list[int] = np.maximum(ids, 0).tolist()
        self._last = step, logits, edit, drafts
        return drafts

    @torch.inference_mode()
    def second(self, seq_ids: Container[int]) -> dict[int, int]:
        """As `DraftForward.second`."""
        step, logits, edit, firsts = self._last
        if self.keeps_probs:
            return _second_of_probs(step, firsts, seq_ids)

        def edit_and_forbid(row: int, logits: torch.Tensor) -> None:
            edit(row, logits)
            logits[firsts[row]] = -torch.inf

        logits = logits.clone()
        logits[torch.arange(len(firsts)), torch.tensor(firsts)] = -torch.inf
        ids, best = self.sampler.sample(logits, step.columns, edit_and_forbid)
        seconds = zip(step.sampling, ids.tolist(), np.isfinite(best).tolist(), strict=True)
        return {seq.seq_id: token_id for seq, token_id, fine in seconds if fine and seq.seq_id in seq_ids}

    def _note(self, seq: WorkerSeq, start: int, end: int) -> None:
        """The tokens ``start`` … ``end`` − 1 have K and V, as those before them."""
        num_known, size = int(self.worker_seqs.num_settled[seq.row]) - self._lag, self.block_size
        first, end = max(0, start - self._lag) // size, end - self._lag
        for place, block in enumerate(self._blocks(seq, end)[first:].tolist(), first):
            count = min(end - place * size, size)
            self.written[block] = count
            if (known := min(count, num_known - place * size)) > 0:
                self.filled[block] = known

    def _blocks(self, seq: WorkerSeq, end: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The blocks of the tokens below ``end``."""
        return self.worker_seqs.block_tables[self.group][seq.row, : -(-end // self.block_size)]

    def _seq(self, seq_id: int) -> WorkerSeq:
        seq = self.worker_seqs.find(seq_id)
        assert seq is not None
        return seq


def _second_of_probs(step: PreparedStep, firsts: Sequence[int], seq_ids: Container[int]) -> dict[int, int]:
    """As `DraftForward.second`, from the distribution of ``firsts``.

    The second's, in which that token has no share, is kept.
    """
    seconds = {}
    for row, (seq, first) in enumerate(zip(step.sampling, firsts, strict=True)):
        rest = drafting_of(seq).probs[-1].clone()
        rest[first] = 0.0
        if seq.seq_id in seq_ids and rest.sum() > 0.0:
            column = step.columns[row : row + 1]
            seed, index, position = (
                torch.from_numpy(column[name].copy()) for name in ("seed", "sample_index", "position")
            )
            rest /= rest.sum()
            streams = Streams(seed, index, position, TOKEN_NOISE)
            seconds[seq.seq_id] = int(gumbel_argmax(rest.log()[None], streams))
            drafting_of(seq).probs.append(rest)
    return seconds


def drafting_of(seq: WorkerSeq) -> DraftState:
    """Return the state of a sequence of which drafts are wanted."""
    assert seq.drafting is not None
    return seq.drafting


def make_drafting(
    config: EngineConfig, seqs: WorkerSeqs, runner: Runner, shard: Shard | None, answers: bool
) -> tuple[DraftModel | None, Proposer | None]:
    """Return what drafts in a worker, if its rank samples (``answers``)."""
    if answers:
        draft_model = make_draft_model(config, seqs, runner.decoder, shard)
        return draft_model, make_proposer(config, draft_model, seqs, runner, shard)
    speculate = config.speculate
    if shard is not None and speculate is not None and speculate.method in ("eagle", "mtp"):
        assert speculate.heads is not None
        runner.decoder.watcher = Unseen(speculate.heads.spec.taps, shard)
    return None, None


def make_draft_model(
    config: EngineConfig, seqs: WorkerSeqs, decoder: Decoder, shard: Shard | None
) -> DraftModel | None:
    """Load the draft model, or the EAGLE or MTP layer, of ``config.speculate``; None: there is none."""
    speculate = config.speculate
    if speculate is None or speculate.method not in ("draft", "eagle", "mtp"):
        return None
    model, heads = speculate.draft, speculate.heads
    if heads is not None:
        layer = HeadRunner(config, heads, head_target(config, heads.spec, decoder, shard))
        vocab_size, max_tokens = heads.spec.vocab_size, config.model.max_model_len
        return DraftModel(config, layer, seqs, own_vocab_size=vocab_size, max_tokens=max_tokens)
    assert model is not None
    own = replace(config, model=model, kv_layout=model.spec.draft_layout(), lora=None, speculate=None)
    runner = ModelRunner(own, iter_weights(model, torch_dtype(model.dtype)))
    runner.decoder.cover()  # a chain goes beyond the positions of its step
    vocab_size, max_tokens = model.spec.vocab_size, model.max_model_len
    return DraftModel(config, runner, seqs, own_vocab_size=vocab_size, max_tokens=max_tokens)


def make_proposer(
    config: EngineConfig,
    draft_model: DraftModel | None,
    seqs: WorkerSeqs,
    runner: Runner,
    shard: Shard | None,
) -> Proposer | None:
    """Return the proposer of ``config.speculate``; None: without speculation."""
    speculate = config.speculate
    if speculate is None:
        return None
    if speculate.method == "lookahead":
        return LookaheadProposer()
    if speculate.method != "medusa":
        return NgramProposer() if draft_model is None else DraftProposer(draft_model)
    heads = speculate.heads
    assert heads is not None
    assert isinstance(runner, ModelRunner)
    model = MedusaModel(config, heads, head_target(config, heads.spec, runner.decoder, shard), seqs)
    runner.watch_sampled = model.watch
    return MedusaProposer(model)
