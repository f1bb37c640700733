"""Philox against the authors' known answers, the noise's definition, and the pruned argmax against the plain one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.sampling import noise_oracle

from quire.kernels.sampling import noise
from quire.kernels.sampling.noise import Streams, exp_f32, gumbel_argmax, gumbel_noise, log_f64, tree_sum

# Random123's kat_vectors: philox 4x32, 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def streams(rows: int, seed: int = 0, purpose: int = 0) -> Streams:
    generator = torch.Generator().manual_seed(seed)
    return Streams(
        torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        torch.randint(0, 128, (rows,), generator=generator),
        torch.randint(0, 100_000, (rows,), generator=generator),
        purpose,
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    words = noise_oracle.philox4x32_10((c0, c1, c2, c3), (k0, k1))
    assert tuple(int(word) for word in words) == expected


def philox_scalar(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, straight from the paper's figure."""
    mask = 2**32 - 1
    for _ in range(10):
        high0, low0 = divmod(counter[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(counter[2] * 0xCD9E8D57, 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def test_stream_layout_as_documented() -> None:
    """Every field lands in the word that the package's head names; negative seeds are two's complement."""
    cases = [(-5, 3, 1234, 0, 0), (2**62 + 17, 127, 0, 4097, 1), (-(2**63), 0, 2**31, 128_255, 0)]
    for seed, sample_index, position, token_id, purpose in cases:
        stream = Streams(
            torch.tensor([seed]), torch.tensor([sample_index]), torch.tensor([position]), purpose
        )
        unsigned = seed % 2**64
        block = philox_scalar(
            [position, token_id >> 2, purpose, sample_index], [unsigned % 2**32, unsigned >> 32]
        )
        word = block[token_id & 3]
        assert int(noise_oracle.random_words(stream, torch.tensor([[token_id]]))[0, 0]) == word
        u = (word + 0.5) / 2**32
        sampled = float(gumbel_noise(stream, torch.tensor([[token_id]]))[0, 0])
        assert sampled == pytest.approx(-math.log(-math.log(u)), rel=1e-12, abs=1e-12)


def test_words_in_numpy_equal_words_in_torch() -> None:
    stream = streams(9, seed=4, purpose=1)
    ids = torch.randint(0, 200_000, (9, 40), generator=torch.Generator().manual_seed(0))
    words = noise_oracle.random_words(stream, ids)
    assert torch.equal(torch.from_numpy(noise.random_words(stream, ids.numpy())), words)
    every = noise_oracle.random_words(stream, torch.arange(103).expand(9, 103))
    about = torch.from_numpy(noise.uniform_complement(stream, 103))
    assert torch.allclose(1.0 - (every.double() + 0.5) * 2.0**-32, about.double(), rtol=1e-6, atol=0.0)


def test_noise_ends_are_finite() -> None:
    extremes = noise.gumbel_of_words(torch.tensor([0, 2**32 - 1]))
    assert extremes.tolist() == pytest.approx([-3.1297, 22.8737], abs=1e-3)


@pytest.mark.parametrize("changed", ["seeds", "sample_indices", "positions", "purpose"])
def test_every_field_of_the_stream_matters(changed: str) -> None:
    base = streams(1)
    other = base._replace(**{changed: getattr(base, changed) + 1})
    ids = torch.arange(64)[None]
    assert not torch.isclose(gumbel_noise(base, ids), gumbel_noise(other, ids)).any()


@pytest.mark.parametrize("vocab", [1, 2, 5, 64, 257, 5003])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_pruned_argmax_equals_plain_argmax(vocab: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(48, vocab, generator=generator) * spread
    scores[::5] = scores[::5].to(torch.bfloat16).to(torch.float32)  # equal scores
    scores[::7, : vocab // 2] = -torch.inf
    stream = streams(48, seed=vocab)
    assert torch.equal(gumbel_argmax(scores, stream), noise_oracle.gumbel_argmax(scores, stream))


def test_token_of_a_row_does_not_depend_on_the_batch() -> None:
    scores = torch.randn(33, 1031, generator=torch.Generator().manual_seed(1)) * 3
    stream = streams(33)
    together = gumbel_argmax(scores, stream)
    for row in range(33):
        assert int(gumbel_argmax(scores[row : row + 1], stream.take(slice(row, row + 1)))) == int(
            together[row]
        )


def test_log_matches_the_library() -> None:
    x = torch.from_numpy(np.random.default_rng(0).random(20_000))
    x = torch.cat((x, 1.0 - x * 1e-9, x * 1e-300, x * 1e300, torch.ones(1, dtype=torch.float64)))
    assert torch.allclose(log_f64(x), torch.log(x), rtol=1e-15, atol=0.0)


def test_exp_matches_the_library() -> None:
    x = -torch.from_numpy(np.random.default_rng(0).random(20_000)).to(torch.float32) * 87.0
    x = torch.cat((x, x / 87.0, torch.tensor([0.0, -0.0, -87.0])))
    assert torch.allclose(exp_f32(x), torch.exp(x.double()).float(), rtol=3e-7, atol=0.0)
    assert exp_f32(torch.tensor([-88.0, -1e30, -torch.inf])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 255, 256, 257, 32_001])
def test_row_math_has_the_same_bits_alone_and_in_a_batch(size: int) -> None:
    x = -torch.rand(37, size, generator=torch.Generator().manual_seed(size)) * 20
    exps = exp_f32(x)
    sums, logs = tree_sum(exps), log_f64(tree_sum(exps))
    assert torch.allclose(sums, exps.double().sum(dim=1), rtol=1e-13)
    for row in (0, 17, 36):
        alone = exp_f32(x[row : row + 1].clone())
        assert torch.equal(alone, exps[row : row + 1])
        assert torch.equal(tree_sum(alone), sums[row : row + 1])
        assert torch.equal(log_f64(tree_sum(alone)), logs[row : row + 1])
        one_by_one = torch.cat([exp_f32(x[row, i : i + 1]) for i in range(0, size, max(1, size // 50))])
        assert torch.equal(one_by_one, exps[row, :: max(1, size // 50)])
