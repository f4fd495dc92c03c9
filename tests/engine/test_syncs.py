"""Whole steps interpreted on a pretended GPU, and a count of who would wait for a real one.

The pretended GPU is torch's meta device: its tensors have shapes and no numbers, so whoever reads a
number fails there, as does every operation whose shape depends on numbers. What goes to it from
the host is seen. The one way back, ``to_host``, is counted and answers with zeros.
"""

# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import ast
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import attrs
from tests.engine.test_families import FAMILIES
from tests.engine.tiny_models import CONFIGS, VOCABULARY, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from triolet import engine as engine_package
from triolet.core import RequestId, SamplingParams
from triolet.engine import (
    attention,
    graphs,
    logprobs,
    prompt_scores,
    runner,
    sampler,
    transfer,
    varlen,
)
from triolet.engine.plan import BlockCopy, Chunk, StepPlan
from triolet.engine.runner import TorchRunner, quieten

# What they cover others do too, and being measured takes them twice the time.
pytestmark = [pytest.mark.torch, pytest.mark.no_cover]

BLOCK = 4
HOST, GPU = "cpu", "meta"
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
DRAWN = SamplingParams(max_tokens=9, temperature=0.7, seed=5)
CUT = SamplingParams(max_tokens=9, temperature=0.7, top_p=0.9, top_k=30, min_p=0.01)
EVERYTHING = SamplingParams(
    max_tokens=9,
    temperature=0.7,
    top_p=0.9,
    logprobs=3,
    repetition_penalty=1.2,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias=((5, 1.0),),
    bad_words_ids=((7,), (3, 8)),
    allowed_token_ids=frozenset(range(300)),
    min_tokens=3,
    stop_token_ids=frozenset({9}),
)


class Waits(TorchDispatchMode):
    """Notes what makes the host wait."""

    def __init__(self):
        super().__init__()
        self.found = []
        #: Copies to the device that nobody waits for.
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        devices = {t.device.type for t in tensors_in((args, kwargs, out))}
        if len(devices) > 1:
            names = [argument.name for argument in func._schema.arguments]
            options = dict(zip(names, args, strict=False)) | kwargs
            if name in {"to", "_to_copy", "copy_"} and options.get("non_blocking"):
                self.sent += 1
            else:
                # Copies that wait, and indices of the host into tensors of the device.
                self.found.append(name)
        return out


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from tensors_in(each)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


@attrs.define(eq=False)
class Interpreted:
    runner: object
    #: How many numbers were read back, each time.
    read: list[int]

    def run(self, *chunks, copies=()):
        """A step like those before: what a row keeps from step to step is there already."""
        self.runner.run(StepPlan(chunks=chunks, copies=copies))
        self.read.clear()
        with Waits() as waits:
            self.runner.run(StepPlan(chunks=chunks, copies=copies))
        return waits


def zeros_like(tensor):
    return torch.zeros(tensor.shape).tolist()


def fake_kernel(query, key, value, *lengths, **options):
    return torch.empty_like(query)


def fake_capture(compute):
    result = compute()

    def play():
        result.copy_(compute())

    return result, play


@pytest.fixture
def interpreted(monkeypatch):
    read = []

    def to_host(tensor):
        assert tensor.device.type == GPU
        read.append(tensor.numel())
        return zeros_like(tensor)

    for module in (runner, transfer, sampler, prompt_scores, logprobs):
        monkeypatch.setattr(module, "to_host", to_host)

    def make(family="llama", *, kernel=True, recorded=False):
        reason = None if kernel else "of a test"
        monkeypatch.setattr(varlen, "find_kernel", lambda: fake_kernel)
        monkeypatch.setattr(varlen, "why_gathered", lambda _pool: reason)
        monkeypatch.setattr(graphs, "why_gathered", lambda _pool: reason)
        with torch.device(GPU):
            config = CONFIGS[family]() if isinstance(family, str) else family
            model = AutoModelForCausalLM.from_config(config)
        model.to(torch.bfloat16).eval()
        model.set_attn_implementation(attention.NAME)
        quieten(model)
        made = TorchRunner(
            model,
            num_blocks=32,
            block_size=BLOCK,
            max_num_seqs=8,
            capture=(lambda: fake_capture) if recorded else None,
        )
        return Interpreted(made, read)

    return make


def chunk_of(row, tokens, *, start=0, sampling=GREEDY, samples=True, **options):
    return Chunk(
        request_id=RequestId(f"request {row}"),
        row=row,
        token_ids=tuple(range(3, 3 + tokens)),
        start=start,
        blocks=tuple(range(4 * row, 4 * row + 4))[: -(-(start + tokens) // BLOCK)],
        samples=samples,
        sampling=sampling,
        output_index=0,
        prompt_ids=tuple(range(3, 3 + start + tokens)),
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "gathered"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "softcap", "sinks"])
def test_a_step_waits_once_at_its_end(interpreted, family, kernel):
    """Windows, soft caps, sinks; decode beside new and half-done prompts."""
    engine = interpreted(family, kernel=kernel)

    waits = engine.run(
        chunk_of(0, 1, start=12), chunk_of(1, 7, start=6), chunk_of(2, 5), chunk_of(3, 1, start=5)
    )

    assert waits.found == []
    # Of each row four facts; and whether keys and values of prompts are finite, which comes along.
    assert engine.read == [(4 + 1) * 4]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "gathered"])
def test_a_step_that_only_decodes_reads_nothing_about_prompts(interpreted, kernel):
    engine = interpreted(kernel=kernel)

    waits = engine.run(chunk_of(0, 1, start=12), chunk_of(1, 1, start=5))

    assert (waits.found, engine.read) == ([], [4 * 2])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_waits_in_its_own_forward(interpreted, family):
    engine = interpreted(tiny_config(family), kernel=False)

    waits = engine.run(chunk_of(0, 1, start=12), chunk_of(1, 7, start=6), chunk_of(2, 5))

    assert waits.found == []
    assert len(engine.read) == 1


@pytest.mark.slow
def test_rotary_embeddings_that_follow_the_length_do_wait(interpreted):
    """They ask how long the sequence is, on the device: such models cannot be recorded."""
    with pytest.raises(RuntimeError, match="meta tensors"):
        interpreted("dynamic-rope").run(chunk_of(0, 5))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, CUT, EVERYTHING])
def test_nothing_that_a_request_asks_for_waits_more(interpreted, sampling):
    engine = interpreted()

    waits = engine.run(
        chunk_of(0, 1, start=5, sampling=sampling),
        chunk_of(1, 1, start=5),
        chunk_of(2, 4, sampling=sampling),
    )

    assert waits.found == []
    assert len(engine.read) == 1


@pytest.mark.slow
def test_a_step_is_sent_in_one_copy(interpreted):
    engine = interpreted()

    waits = engine.run(chunk_of(0, 1, start=5), chunk_of(1, 7, start=6), chunk_of(2, 5))

    assert waits.sent == 1


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "gathered"])
def test_a_recorded_step_is_sent_in_one_copy_and_waits_once(interpreted, kernel):
    engine = interpreted(kernel=kernel, recorded=True)

    waits = engine.run(chunk_of(0, 1, start=5), chunk_of(1, 1, start=6), chunk_of(2, 1, start=9))

    assert (waits.found, waits.sent) == ([], 1)
    assert engine.read == [4 * 3]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [7, 1])
def test_a_step_that_samples_nothing_waits_once_for_whether_it_is_finite(interpreted, tokens):
    engine = interpreted()

    waits = engine.run(chunk_of(0, tokens, samples=False))

    assert (waits.found, engine.read) == ([], [1])


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_copies_of_pages_are_sent_in_one_copy_and_nobody_waits_for_them(interpreted, recorded):
    """A prompt of which another has all but the last token is a step that only decodes."""
    engine = interpreted(recorded=recorded)

    waits = engine.run(
        chunk_of(0, 1, start=5),
        chunk_of(1, 1, start=6),
        copies=(BlockCopy(1, 5, 2), BlockCopy(9, 1, 1)),
    )

    assert (waits.found, waits.sent) == ([], 2)
    assert engine.read == [4 * 2]


@pytest.mark.slow
def test_scoring_a_prompt_waits_once_more_per_piece(interpreted):
    engine = interpreted()
    scored = attrs.evolve(GREEDY, prompt_logprobs=2)

    waits = engine.run(chunk_of(0, 7, sampling=scored, scores_prompt=True), chunk_of(1, 5))

    assert waits.found == []
    assert len(engine.read) == 2


WAITING = {
    "index": lambda x: x[torch.tensor([1, 2])],
    "to": lambda x: x.add_(torch.ones(4).to(GPU)),
    "scalar": lambda x: x.index_put_(
        (torch.zeros(1, dtype=torch.int64, device=GPU),), torch.tensor(1.0)
    ),
    "copy": lambda x: x.copy_(torch.ones(4)),
}
READING = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.any()),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "cpu": lambda x: x.cpu(),
}


@pytest.mark.parametrize("guilty", WAITING.values(), ids=WAITING)
def test_what_waits_is_found(guilty):
    x = torch.empty(4, device=GPU)

    with Waits() as waits:
        guilty(x)

    assert waits.found


@pytest.mark.parametrize("guilty", READING.values(), ids=READING)
def test_what_reads_a_number_fails(guilty):
    with pytest.raises((RuntimeError, NotImplementedError)):
        guilty(torch.empty(4, device=GPU))


#: Modules that compute steps, and what in them would wait without being seen above: on the meta
#: device a tensor is made of numbers without a copy.
STEP_MODULES = (
    *("attention", "forward", "graphs", "grouping", "inversion", "kv", "logprobs", "masks"),
    *("penalties", "prompt_scores", "ranking", "runner", "sampler", "scores", "varlen", "views"),
)


def hidden_copies(text):
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            made = name == "tensor" and any(k.arg == "device" for k in node.keywords)
            if made or name in {"new_tensor", "as_tensor", "tolist", "item", "cpu", "cuda"}:
                found.append(f"{name}, line {node.lineno}")
    return found


@pytest.mark.parametrize("module", STEP_MODULES)
def test_numbers_of_the_host_go_to_the_device_by_one_door(module):
    source = Path(engine_package.__file__).with_name(f"{module}.py")

    assert hidden_copies(source.read_text(encoding="utf-8")) == []


def test_a_hidden_copy_is_found():
    assert hidden_copies("x = torch.tensor([1], device=d)\n") == ["tensor, line 1"]
    assert hidden_copies("x = y.new_tensor(0.0)\n") == ["new_tensor, line 1"]
    assert hidden_copies("x = torch.tensor([1])\n") == []


def test_the_door_is_asynchronous_and_the_hosts_own_tensors_stay_where_they_are():
    numbers = torch.tensor([1, 2])
    with Waits() as waits:
        there = transfer.move(numbers, torch.device(GPU))

    assert there.device.type == GPU
    assert (waits.sent, waits.found) == (1, [])
    assert transfer.move(numbers, torch.device(HOST)) is numbers
    assert transfer.to_host(transfer.to_device([VOCABULARY, 1], torch.device(HOST))) == [512, 1]
