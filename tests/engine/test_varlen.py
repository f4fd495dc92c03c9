"""The kernel path of CUDA on the CPU: a plain stand-in for the kernel, whole runners around it."""

# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import attrs
from scripts.gpu_check import plain_varlen
from tests.engine.tiny_models import BLOCK, Request, build, drive, greedy, prompt

from triolet.engine import architecture, graphs, varlen
from triolet.engine.attention import Step
from triolet.engine.kv import KvPool, KvShape
from triolet.engine.plan import Chunk
from triolet.engine.runner import build_runner

pytestmark = pytest.mark.torch

NEW = 16
LENGTHS = (21, 1, 34, 5, 13)
BLOCKS = 400
CPU = torch.device("cpu")


@attrs.define(eq=False)
class Kernel:
    """Stands in for torch's kernel and keeps what it was asked."""

    calls: list[tuple[int, int, tuple[int, int]]] = attrs.field(factory=list)
    #: What it does to a window before it heeds it.
    bend: object = lambda window: window

    def __call__(self, query, key, value, starts, key_starts, most_queries, most_keys, **options):
        self.calls.append((most_queries, most_keys, options["window_size"]))
        options["window_size"] = self.bend(options["window_size"])
        return plain_varlen(
            query, key, value, starts, key_starts, most_queries, most_keys, **options
        )


@pytest.fixture
def kernel(monkeypatch):
    """Every pool is one for the kernel, and here is the kernel."""
    stand_in = Kernel()
    monkeypatch.setattr(varlen, "find_kernel", lambda: stand_in)
    for module in (varlen, graphs):
        monkeypatch.setattr(module, "why_gathered", lambda _pool: None)
    return stand_in


@pytest.fixture(scope="session")
def expected():
    """By family: what ``model.generate`` makes of prompts of these lengths, greedily."""
    known = {}

    def get(family):
        if family not in known:
            model = build(family)
            known[family] = [generate(model, prompt(n)) for n in LENGTHS]
        return known[family]

    return get


def generate(model, ids):
    tensor = torch.tensor([ids])
    out = model.generate(
        tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=NEW, do_sample=False
    )
    return out[0, len(ids) :].tolist()


def runner_of(family, *, block_size=BLOCK, **options):
    return build_runner(
        build(family), num_blocks=BLOCKS, block_size=block_size, max_num_seqs=64, **options
    )


def chunked(*, chunk=7):
    return [
        Request(f"{n}", prompt(n), greedy(NEW), chunk=chunk, delay=3 * i)
        for i, n in enumerate(LENGTHS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mistral", "softcap"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_greedy_output_is_that_of_transformers(family, chunk, kernel, expected):
    """Windows, groups, soft caps; prompts in chunks beside sequences that decode."""
    runner = runner_of(family)
    kernel.calls.clear()

    outputs = drive(runner, chunked(chunk=chunk), num_blocks=BLOCKS)

    assert outputs == expected(family)
    assert bool(kernel.calls) == (family != "softcap")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "bend"),
    [
        ("llama", lambda window: (-1, -1) if window == (-1, 0) else window),
        ("mistral", lambda window: (window[0] + 1, window[1]) if window[0] > 0 else window),
    ],
    ids=["not causal", "window off by one"],
)
def test_a_kernel_that_computes_something_else_is_refused_at_load(family, bend, kernel):
    kernel.bend = bend

    with pytest.raises(architecture.UnsupportedModelError, match="other logits"):
        runner_of(family)


def pool_of(**options):
    shape = options.pop("shape", KvShape(num_layers=1, kv_heads=2, head_dim=16))
    sizes = {"num_blocks": 9, "block_size": 4, "dtype": torch.float32, "device": CPU}
    return KvPool(shape, **sizes | options)


def chunk_of(start, tokens, blocks, *, samples=True):
    return Chunk("a", 0, (5,) * tokens, start, blocks, samples, greedy(1), 0)


def test_a_step_tells_the_kernel_where_everything_is(kernel):
    chunks = [chunk_of(6, 3, (5, 1, 8)), chunk_of(4, 1, (2, 3)), chunk_of(0, 1, (4,))]

    step = varlen.VarlenStep(chunks, pool_of())

    rows = step._rows
    # Decode rows come first, the longest of them before the others.
    assert rows.starts.tolist() == [0, 1, 2, 5]
    assert rows.lengths.tolist() == [5, 1, 9]
    assert rows.key_starts.tolist() == [0, 5, 6, 15]
    assert rows.tables.tolist() == [[2, 3, 3], [4, 4, 4], [5, 1, 8]]
    assert (rows.most_queries, rows.most_keys) == (3, 9)
    tensors = (rows.starts, rows.lengths, rows.key_starts, rows.tables)
    assert {tensor.dtype for tensor in tensors} == {torch.int32}
    assert step.sampled.tolist() == [4, 0, 1]


def test_pages_that_the_step_does_not_reach_are_left_out(kernel):
    step = varlen.VarlenStep([chunk_of(0, 2, (5, 1, 8))], pool_of())

    assert step._rows.tables.tolist() == [[5]]


def test_decode_rows_alone_are_not_said_to_be_causal(kernel):
    """It is the same, and only so does the kernel share keys among heads and split them."""
    query = torch.randn(1, 4, 2, 16)
    pages = (torch.randn(9, 4, 2, 16), torch.randn(9, 4, 2, 16))
    decode = varlen.VarlenStep([chunk_of(4, 1, (2, 3)), chunk_of(7, 1, (4, 1))], pool_of())

    for window in (None, 100, 8, 3):
        decode._rows.attend(query, pages, window, None)

    assert kernel.calls == [
        (1, 8, (-1, -1)),
        (1, 8, (-1, -1)),
        (1, 8, (-1, -1)),
        (1, 8, (2, 0)),
    ]


def test_chunks_are_causal_and_a_window_counts_the_token_itself(kernel):
    query = torch.randn(1, 4, 2, 16)
    pages = (torch.randn(9, 4, 2, 16), torch.randn(9, 4, 2, 16))
    step = varlen.VarlenStep([chunk_of(4, 2, (2, 3))], pool_of())

    for window in (None, 6, 5):
        step._rows.attend(query, pages, window, None)

    assert [call[2] for call in kernel.calls] == [(-1, 0), (-1, 0), (4, 0)]


CUDA = {"device": torch.device("meta"), "dtype": torch.bfloat16, "block_size": 256}


@pytest.fixture
def cuda(monkeypatch):
    """Pools say that they are on a GPU that has the kernel; nothing is computed."""
    monkeypatch.setattr(varlen, "find_kernel", lambda: plain_varlen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))

    def pool(**options):
        made = pool_of(**CUDA | options)
        made.device = torch.device("cuda")
        return made

    return pool


def test_a_pool_on_a_gpu_of_today_is_read_in_place(cuda):
    assert varlen.why_gathered(cuda()) is None
    assert varlen.step_kind(cuda(dtype=torch.float16, block_size=512)) is varlen.VarlenStep


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "torch.float32"),
        ({"block_size": 128}, "128 tokens"),
        ({"shape": KvShape(1, 2, 24, 16)}, "differ in size"),
        ({"shape": KvShape(1, 2, 20)}, "20 numbers"),
        ({"shape": KvShape(1, 2, 264)}, "264 numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_cannot_take_is_gathered(cuda, options, reason):
    assert reason in varlen.why_gathered(cuda(**options))
    assert varlen.step_kind(cuda(**options)) is Step


def test_an_old_gpu_and_an_old_torch_gather(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    assert "older" in varlen.why_gathered(cuda())

    monkeypatch.setattr(varlen, "find_kernel", lambda: None)
    assert "no such kernel" in varlen.why_gathered(cuda())


def test_the_cpu_gathers_small_pages():
    assert "cpu" in varlen.why_gathered(pool_of())
    assert varlen.page_size(CPU) == 16
    assert varlen.page_size(torch.device("cuda")) == 256
