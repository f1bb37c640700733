"""What each method does to a layer whose answer is known: GPTQ on two inputs, AWQ and SmoothQuant with outliers."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.families import spec_from_config
from quire_lab.quantize.clipping import group_grams, round_for_outputs
from quire_lab.quantize.forward import InputStats
from quire_lab.quantize.gptq import gptq, output_error
from quire_lab.quantize.methods import round_layer
from quire_lab.quantize.rounding import fit_grid, round_to_nearest
from quire_lab.quantize.scheme import Scheme
from quire_lab.quantize.source import Matrix
from quire_lab.quantize.work import LayerWork

HIDDEN, INTER, OUTLIER = 64, 96, 5
INT4, W8A8 = Scheme(4, 32), Scheme(8, None, activations=True)
SPEC = spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": INTER,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    }
)  # fmt: skip


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(rows: int, columns: int, seed: int) -> Tensor:
    """Rows that lie near a space of a quarter of their dimensions."""
    near = random(rows, columns // 4, seed=seed) @ random(columns // 4, columns, seed=seed + 1)
    return near + 0.3 * random(rows, columns, seed=seed + 2)


def test_gptq_is_the_closed_form_on_two_inputs() -> None:
    weight, gram = random(50, 2, seed=1), torch.tensor([[3.0, 1.2], [1.2, 1.0]])
    # Two levels: the scale of a row of two weights would find both of them among more.
    scheme = Scheme(1, None)
    found = gptq(weight, gram, scheme, damping=1e-9)
    scale = fit_grid(weight, scheme, gram.diagonal()).scale[:, 0]
    # Input 0 is used most, so it is rounded first; input 1 then has its own optimum.
    first = (weight[:, 0] / scale).round().clamp(-1, 0)
    error = weight[:, 0] - first * scale
    second = ((weight[:, 1] + error * gram[0, 1] / gram[1, 1]) / scale).round().clamp(-1, 0)
    assert torch.equal(found.q, torch.stack((first, second), 1).to(torch.int8))
    alone = (weight[:, 1] / scale).round().clamp(-1, 0)
    assert (alone != second).any(), "making up for the error matters here"


def test_gptq_halves_the_error_where_inputs_are_correlated() -> None:
    rows = correlated(500, HIDDEN, seed=2)
    weight, gram = random(32, HIDDEN, seed=4), rows.t() @ rows / 500
    for symmetric in (True, False):
        scheme = Scheme(4, 32, symmetric)
        by_gptq = output_error(weight, gptq(weight, gram, scheme).expand(), gram)
        assert by_gptq < 0.5 * output_error(weight, round_to_nearest(weight, scheme).expand(), gram)


def test_gptq_has_no_more_error_in_blocks() -> None:
    rows = correlated(300, HIDDEN, seed=6)
    weight, gram = random(16, HIDDEN, seed=7), rows.t() @ rows
    whole = gptq(weight, gram, INT4, block=HIDDEN)
    assert (gptq(weight, gram, INT4, block=16).q != whole.q).float().mean() < 0.01


def test_inputs_that_no_row_uses_do_not_stop_gptq() -> None:
    rows = correlated(300, HIDDEN, seed=8)
    rows[:, 3:9] = 0.0
    weight = random(16, HIDDEN, seed=9)
    assert torch.isfinite(gptq(weight, rows.t() @ rows, INT4).expand()).all()
    assert torch.equal(gptq(weight, torch.zeros(HIDDEN, HIDDEN), INT4).q, round_to_nearest(weight, INT4).q)


def work_with_outlier(scheme: Scheme, outlier: float) -> tuple[LayerWork, Tensor]:
    """An MLP whose input 5 is ``outlier`` times the others, made so by its norm."""
    names = {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN)}
    matrices = tuple(Matrix(n, 0, *shape, (f"layers.0.mlp.{n}.weight",)) for n, shape in names.items())
    rows = random(400, HIDDEN, seed=20)
    norm = torch.ones(HIDDEN)
    norm[OUTLIER] = outlier
    stats = InputStats(HIDDEN, 400)
    stats.add(rows * norm)
    weights = {m.name: random(INTER, HIDDEN, seed=21 + i) for i, m in enumerate(matrices)}
    for weight in weights.values():
        weight[:, OUTLIER] /= outlier**0.5
    work = LayerWork(
        SPEC.layers[0], matrices, dict.fromkeys(names, scheme), weights, {"mlp_norm.weight": norm},
        dict.fromkeys(names, stats),
    )  # fmt: skip
    return work, rows


def outputs(work: LayerWork, rows: Tensor, weights: dict[str, Tensor], *, rounds: bool) -> Tensor:
    x = rows * work.plain["mlp_norm.weight"]
    if rounds:
        step = x.abs().amax(1, keepdim=True) / 127
        x = (x / step).round() * step
    return torch.cat([x @ weights[m.name].t() for m in work.matrices], 1)


def errors(method: str, scheme: Scheme, outlier: float) -> float:
    work, rows = work_with_outlier(scheme, outlier)
    wanted = outputs(work, rows, work.weights, rounds=False)
    found = {name: rounded.expand() for name, rounded in round_layer(method, work).items()}
    moved = outputs(work, rows, work.weights, rounds=False)
    assert torch.allclose(moved, wanted, rtol=1e-4, atol=1e-4), "factors change no product"
    return (outputs(work, rows, found, rounds=scheme.activations) - wanted).square().mean().item()


def test_clipping_sees_which_inputs_go_together() -> None:
    """Searched input by input, a grid has more error of the outputs; integers are those of the chosen grid."""
    rows = correlated(500, HIDDEN, seed=30)
    weight, gram = random(32, HIDDEN, seed=31), rows.t() @ rows / 500
    for scheme in (INT4, Scheme(4, 32, symmetric=False), Scheme(2, 32)):
        rounded = round_for_outputs(weight, scheme, group_grams(gram, 2))
        apart = round_to_nearest(weight, scheme, gram.diagonal())
        assert output_error(weight, rounded.expand(), gram) < 0.97 * output_error(
            weight, apart.expand(), gram
        )
        assert rounded.q.min() >= scheme.lowest
        assert rounded.q.max() <= scheme.highest


def test_awq_beats_rtn_on_an_outlier() -> None:
    assert errors("rtn", INT4, 100.0) > 5.0 * errors("awq", INT4, 100.0)


def test_smoothquant_beats_rtn_on_an_outlier() -> None:
    assert errors("rtn", W8A8, 100.0) > 5.0 * errors("smoothquant", W8A8, 100.0)
