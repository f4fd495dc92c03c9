# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.tiny_models import WINDOW, build, greedy
from torch import nn

from triolet.core import RequestId
from triolet.engine import architecture, attention, scores
from triolet.engine.architecture import check_architecture, check_logits
from triolet.engine.attention import Step, attend
from triolet.engine.kv import KvPool, KvShape
from triolet.engine.plan import Chunk
from triolet.engine.runner import build_runner
from triolet.errors import EngineError, UnsupportedModelError

pytestmark = pytest.mark.torch

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
SHAPE = KvShape(num_layers=1, kv_heads=KV_HEADS, head_dim=DIM, value_dim=VALUE_DIM)


class Layer(nn.Module):
    layer_idx = 0


def pool_of(*, blocks=64, size=4, fill=0.0):
    pool = KvPool(
        SHAPE,
        num_blocks=blocks,
        block_size=size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.keys[0].fill_(fill)
    pool.values[0].fill_(fill)
    return pool


def chunk_of(name, start, length, blocks):
    return Chunk(
        request_id=RequestId(name),
        row=0,
        token_ids=tuple(range(length)),
        start=start,
        blocks=tuple(blocks),
        samples=True,
        sampling=greedy(1),
        output_index=0,
    )


def dense(query, key, value, *, sliding_window, scaling, softcap, s_aux):
    """One sequence without pages: ``[length, heads, dim]`` in and out."""
    group = HEADS // KV_HEADS
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))
    hidden = (distance < 0) | (distance >= (sliding_window or len(query)))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    whole = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        whole = whole + s_aux.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", weights / whole, value)


def as_one_row(parts):
    return torch.cat(parts).transpose(0, 1).unsqueeze(0)


@st.composite
def sequences(draw):
    """Per sequence: how many tokens are there already, and how many come in this step."""
    pair = st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 2, 5, 9]))
    return draw(st.lists(pair, min_size=1, max_size=4))


@st.composite
def kinds(draw):
    """What a model may ask of its attention."""
    sinks = draw(st.none() | st.sampled_from([0.0, 2.0]))
    return {
        "sliding_window": draw(st.sampled_from([None, 1, 3, 8])),
        "scaling": draw(st.sampled_from([0.3, DIM**-0.5])),
        "softcap": draw(st.sampled_from([None, 0.7])),
        "s_aux": None if sinks is None else torch.arange(HEADS) * 0.7 - sinks,
    }


@pytest.mark.slow
@settings(max_examples=100)
@given(sequences(), kinds(), st.integers(1, 5), st.sampled_from([1, 600, 2**24]), st.randoms())
def test_paged_attention_is_dense_attention(sequences, kind, size, score_bytes, dice):
    """Whatever the lengths, the kind of attention, the page size and the pages' order.

    The pool is full of enormous numbers first: a token that sees a place it must not see is off
    by far.
    """
    torch.manual_seed(0)
    pool = pool_of(size=size, blocks=128, fill=1e4)
    free = list(range(128))
    dice.shuffle(free)
    data, chunks = [], []
    for i, (past, new) in enumerate(sequences):
        total = past + new
        blocks = [free.pop() for _ in range(-(-total // size))]
        query, key = torch.randn(total, HEADS, DIM), torch.randn(total, KV_HEADS, DIM)
        value = torch.randn(total, KV_HEADS, VALUE_DIM)
        for p in range(past):
            slot = blocks[p // size] * size + p % size
            pool.keys[0][slot], pool.values[0][slot] = key[p], value[p]
        data.append((past, query, key, value))
        chunks.append(chunk_of(f"{i}", past, new, blocks))
    step = Step(chunks, pool)
    rows = [[tensor[past:] for tensor in (q, k, v)] for past, q, k, v in data]
    ordered = [rows[i] for i in step.order]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "SCORE_BYTES", score_bytes)
        out, _ = attend(
            Layer(),
            *(as_one_row([row[j] for row in ordered]) for j in range(3)),
            None,
            **kind,
            triolet_step=step,
        )

    parts = out[0].split([len(row[0]) for row in ordered])
    for i, part in zip(step.order, parts, strict=True):
        past, query, key, value = data[i]
        torch.testing.assert_close(
            part, dense(query, key, value, **kind)[past:], atol=1e-5, rtol=1e-4
        )


def test_the_last_token_of_each_chunk_is_found_in_the_order_given():
    chunks = [
        chunk_of("a", 0, 3, [0]),
        chunk_of("b", 5, 1, [1, 2]),
        chunk_of("c", 0, 2, [3]),
        chunk_of("d", 0, 1, [4]),
    ]
    step = Step(chunks, pool_of())

    # b, d, then a, c.
    assert step.position_ids.tolist() == [[5, 0, 0, 1, 2, 0, 1]]
    assert step.last_tokens == [4, 0, 6, 1]


def test_rows_that_are_sampled_from_come_first_and_of_them_the_longest():
    chunks = [
        attrs.evolve(chunk_of("a", 7, 1, [0, 1]), samples=False),
        chunk_of("b", 0, 2, [2]),
        chunk_of("c", 1, 1, [3]),
        chunk_of("d", 5, 1, [4, 5]),
    ]

    assert Step(chunks, pool_of()).order == [3, 2, 0, 1]


@pytest.mark.parametrize("chunk", [chunk_of("a", 3, 2, [0]), chunk_of("a", 0, 0, [0])])
def test_a_block_table_that_does_not_cover_its_chunk_is_an_error(chunk):
    with pytest.raises(EngineError, match="does not cover"):
        Step([chunk], pool_of(size=4))


def test_what_a_step_reads_is_computed_once_per_window():
    step = Step([chunk_of("a", 5, 1, [0, 1]), chunk_of("b", 5, 3, [2, 3])], pool_of())

    assert step.views(4) is step.views(4)
    assert step.views(4) is not step.views(None)
    assert step.views(None, causal_mask=True) is not step.views(None)


def test_pages_that_left_the_window_are_not_read():
    step = Step([chunk_of("a", 11, 1, [7, 8, 9])], pool_of(size=4))

    assert step.views(None)[0][0].pages.tolist() == [7, 8, 9]
    assert step.views(4)[0][0].pages.tolist() == [9]
    assert step.views(5)[0][0].pages.tolist() == [8, 9]


def call(**changes):
    """Call the attention function for one token, with something changed."""
    step = changes.pop("step", Step([chunk_of("a", 0, 1, [0])], pool_of()))
    module = changes.pop("module", Layer())
    key = changes.pop("key", torch.ones(1, KV_HEADS, 1, DIM))
    value = changes.pop("value", torch.ones(1, KV_HEADS, 1, VALUE_DIM))
    mask = changes.pop("mask", None)
    query = torch.ones(1, HEADS, 1, DIM)
    return attend(module, query, key, value, mask, triolet_step=step, **changes)


class Unnumbered(nn.Module):
    pass


class Encoder(Layer):
    is_causal = False


def test_what_is_known_to_change_nothing_is_accepted():
    out, weights = call(position_ids=torch.zeros(1, 1), use_cache=False, softcap=None, s_aux=None)

    assert out.shape == (1, 1, HEADS, VALUE_DIM)
    assert weights is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"s_aux": torch.zeros(HEADS + 1)}, "only one for each of its 4 heads"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"surprise": False}, "surprise"),
        ({"mask": torch.zeros(1, 1, 1, 1)}, "mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "causal"),
        ({"module": Encoder()}, "causal"),
        ({"module": Unnumbered()}, "numbered"),
        ({"step": None}, "keyword"),
        ({"key": torch.ones(1, KV_HEADS, 1, DIM + 1)}, "promised"),
        ({"key": torch.ones(1, KV_HEADS, 1, DIM, dtype=torch.float16)}, "promised"),
        ({"value": torch.ones(1, KV_HEADS, 1, DIM)}, "promised"),
    ],
)
def test_what_would_change_the_result_is_refused(changes, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        call(**changes)


def test_a_layer_that_attends_twice_is_refused():
    step = Step([chunk_of("a", 0, 1, [0])], pool_of())
    call(step=step)

    with pytest.raises(UnsupportedModelError, match="more than once"):
        call(step=step)


# The check at load, on whole models.


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "gemma3", "gpt2", "mistral", "mistral-long", "softcap", "sinks"),
        *("latent", "dynamic-rope", "long-rope"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_the_families_we_name_pass(name, dtype):
    check_architecture(model := build(name, dtype=dtype))
    check_logits(model)

    assert model.config._attn_implementation == attention.NAME


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chunked", "chunked_attention"),
        ("convolution", "conv"),
        ("short", "context of less than 32"),
        ("uneven", "one size in all layers"),
        ("bidirectional", "both directions"),
        ("encoder-decoder", "encoder-decoder"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(name, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        build_runner(build(name), num_blocks=8, block_size=4, max_num_seqs=2)


def test_a_keyword_argument_that_nobody_knows_is_refused(monkeypatch):
    model = build("llama")
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **kwargs: forward(**kwargs, alibi=torch.ones(1)))

    with pytest.raises(UnsupportedModelError, match="alibi"):
        check_logits(model)


def ignoring(name):
    """The attention function, deaf to one keyword argument."""

    def deaf(*args, **kwargs):
        return attend(*args, **{**kwargs, name: None})

    return deaf


def off_by_one(*args, sliding_window=None, **kwargs):
    return attend(*args, sliding_window=sliding_window and sliding_window + 1, **kwargs)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("mistral", ignoring("sliding_window")),
        ("mistral-long", ignoring("sliding_window")),
        ("gemma3", ignoring("sliding_window")),
        ("mistral", off_by_one),
        ("gemma3", ignoring("scaling")),
    ],
    ids=["window", "long window", "mixed window", "window off by one", "scaling"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mistake_in_our_attention_is_caught_at_load(monkeypatch, name, planted, dtype):
    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, planted)

    with pytest.raises(UnsupportedModelError, match="other logits"):
        check_logits(build(name, dtype=dtype))


def test_a_layer_that_goes_around_the_interface_is_caught_at_load(monkeypatch):
    model = build("llama")
    layer = model.model.layers[2].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: (hidden_states, None))

    with pytest.raises(UnsupportedModelError, match="3 of 4 layers"):
        check_logits(model)


def test_not_a_number_is_caught_at_load():
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan

    with pytest.raises(UnsupportedModelError, match="nan"):
        check_logits(model)


@pytest.mark.parametrize("name", ["mistral", "mistral-long", "gemma3"])
def test_the_check_leaves_the_windows_as_they_were(name):
    model = build(name)
    holders = [model.config, *model.modules()]
    before = [getattr(holder, "sliding_window", None) for holder in holders]
    assert WINDOW in before or 256 in before

    with architecture._short_window(model):
        inside = [getattr(holder, "sliding_window", None) for holder in holders]
    check_logits(model)

    assert max(window or 0 for window in inside) <= architecture._CHECK_WINDOW
    assert [getattr(holder, "sliding_window", None) for holder in holders] == before


def test_loading_a_model_does_not_touch_the_random_numbers_of_others():
    model = build("llama")
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    check_logits(model)

    assert torch.rand(1) == expected


def parameters_of(model):
    return [(p.dtype, p.data_ptr(), p.clone()) for p in model.parameters()]


def assert_untouched(model, before):
    for parameter, (dtype, address, copy) in zip(model.parameters(), before, strict=True):
        assert parameter.dtype == dtype
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, copy)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_half_precision_weights_compute_in_float32_for_the_check_and_come_back(name):
    model = build(name, dtype=torch.bfloat16)
    before = parameters_of(model)
    with architecture._lifted(model):
        lifted = model(torch.tensor([[5, 6, 7]])).logits

    check_logits(model)

    assert lifted.dtype == torch.float32
    assert_untouched(model, before)


def test_weights_come_back_when_the_model_fails_in_the_middle(monkeypatch):
    model = build("llama", dtype=torch.bfloat16)
    before = parameters_of(model)

    def broken(_hidden):
        raise RuntimeError

    monkeypatch.setattr(model.model.layers[1].mlp.act_fn, "forward", broken)
    with pytest.raises(UnsupportedModelError, match="cannot be run"):
        check_logits(model)

    assert_untouched(model, before)
