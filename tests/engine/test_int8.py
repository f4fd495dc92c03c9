"""Linear layers of 8 bits: the kernel against torch, and what becomes of a model."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch")

from tests.engine.tiny_models import build, tiny_config  # noqa: E402 - needs torch
from torch import nn  # noqa: E402 - needs torch

from triolet.core import EngineRequest, RequestId, SamplingParams  # noqa: E402
from triolet.engine import int8, native  # noqa: E402
from triolet.engine.architecture import little_changes_in  # noqa: E402
from triolet.engine.gguf import find_packaged_model  # noqa: E402
from triolet.engine.int8 import (  # noqa: E402
    BLOCK,
    Int8Kernel,
    Int8Linear,
    Int8Weight,
    check_quantizable,
    load_kernel,
    quantize_linear_layers,
    round_to_blocks,
    rounded,
    rounded_twice,
)
from triolet.engine.linear import PackedLinear  # noqa: E402
from triolet.engine.local import EngineOptions, load_engine  # noqa: E402
from triolet.engine.native import NoLibraryError  # noqa: E402
from triolet.errors import ConfigError, UnsupportedModelError  # noqa: E402
from triolet.prompt.huggingface import load_tokenizer  # noqa: E402

pytestmark = pytest.mark.torch

COMPILER = next(filter(None, map(shutil.which, native.COMPILERS)), None)
#: What makes the source choose each of its variants, where the processor has what it takes.
VARIANTS = {"native": "-march=native", "avx2": "-mavx2 -mfma -mno-avx512f", "plain": "-O3"}
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """The kernel in all variants that this machine can run, by name."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    built = {}
    for name, flags in VARIANTS.items():
        if name == "avx2" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            continue
        chosen = [flag for flag in native.FLAGS if flag != "-march=native"] + flags.split()
        library = folder / f"{name}.so"
        source = native.SOURCES / "int8_linear.cpp"
        subprocess.run([COMPILER, *chosen, "-o", str(library), str(source)], check=True)
        built[name] = Int8Kernel(ctypes.CDLL(str(library)))
    return built


@pytest.fixture(scope="session")
def kernel(kernels):
    return kernels["native"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(inputs, weight, bias=None):
    """The same, in float64: exact but for the rounding to blocks."""
    product = rounded_twice(inputs) @ rounded(weight).double().T
    return (product if bias is None else product + bias).float()


def same_bits(one, other):
    """Equal, NaN included, and the sign of zeros too."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 33, 64])
@pytest.mark.parametrize(("outputs", "width"), [(16, 32), (1, 64), (35, 96), (100, 1536)])
def test_every_variant_computes_what_torch_does(kernels, variant, rows, outputs, width):
    if variant not in kernels:
        pytest.skip("this processor cannot run it")
    # Activations of very different sizes, as trained models have them.
    inputs = normal(rows, width) * normal(rows, width, seed=1).exp()
    weight, bias = normal(outputs, width, seed=2), normal(outputs, seed=3)
    packed = Int8Weight.of(weight)

    got = kernels[variant].multiply(inputs, packed, bias)

    own = expected(inputs, weight, bias)
    assert (got - own).norm() <= 1e-6 * own.norm()
    # The rules of the kernel say which bits come out, whatever computes them.
    assert same_bits(got, kernels["plain"].multiply(inputs, packed, bias))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_is_the_same_bits_among_any_neighbours_and_threads(kernels, variant):
    if variant not in kernels:
        pytest.skip("this processor cannot run it")
    kernel, width = kernels[variant], 10 * BLOCK
    inputs, packed = normal(21, width), Int8Weight.of(normal(200, width, seed=1))
    alone = torch.cat([kernel.multiply(row[None], packed, None) for row in inputs])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for start, stop in ((0, 21), (3, 20), (5, 6), (1, 9)):
                got = kernel.multiply(inputs[start:stop], packed, None)
                assert same_bits(got, alone[start:stop])
    finally:
        torch.set_num_threads(threads)
    # A neighbour's fate is its own, too.
    inputs[7, 5] = NAN
    got = kernel.multiply(inputs, packed, None)
    assert got[7].isnan().all()
    others = [row for row in range(21) if row != 7]
    assert same_bits(got[others], alone[others])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_that_are_no_activations_do_not_get_lost(kernels, variant):
    if variant not in kernels:
        pytest.skip("this processor cannot run it")
    width = 2 * BLOCK
    weight = normal(20, width)
    inputs = normal(9, width, seed=1)
    inputs[0, 3] = NAN
    inputs[1, 40] = INF
    inputs[2, 40] = -INF
    inputs[3] = 0.0
    inputs[4, :BLOCK], inputs[4, BLOCK:] = 1e-40, 1e-31
    inputs[5] *= 1e36
    inputs[6] *= 1e-28
    inputs[7, :BLOCK] = -0.0
    inputs[8, 0] = 1e6

    got = kernels[variant].multiply(inputs, Int8Weight.of(weight), None)

    assert got[:3].isnan().all()
    assert (got[3:5] == 0).all()
    own = expected(inputs[5:], weight)
    assert ((got[5:] - own).norm(dim=-1) <= 1e-6 * own.norm(dim=-1)).all()
    # An outlier takes the precision of its own block, of no other.
    exact = inputs[8, BLOCK:] @ weight[:, BLOCK:].T
    rest = inputs[8:].clone()
    rest[:, :BLOCK] = 0
    assert (kernels[variant].multiply(rest, Int8Weight.of(weight), None)[0] - exact).norm() < (
        0.02 * exact.norm()
    )


def test_rounding_errs_by_half_a_step_and_keeps_the_largest():
    values = normal(7, 4 * BLOCK)
    blocks = round_to_blocks(values)

    assert blocks.integers.abs().amax(-1).eq(127).all()
    error = (blocks.integers * blocks.scales - values.unflatten(-1, (-1, BLOCK))).abs()
    assert (error <= blocks.scales * 0.5001).all()
    assert torch.equal(rounded(rounded(values)), rounded(values))


def test_beside_a_huge_number_the_others_keep_their_bits():
    values = normal(5, BLOCK)
    values[:, 3] = 100.0
    values[4, 3] = 1.0

    error = (rounded_twice(values) - values).norm(dim=-1)

    assert (error[:4] < 0.1 * (rounded(values) - values).norm(dim=-1)[:4]).all()
    # Not needed where nothing is huge.
    assert torch.equal(rounded_twice(values)[4].float(), rounded(values)[4])


def test_a_block_that_is_not_finite_has_no_scale():
    values = torch.zeros(3, BLOCK)
    values[0, 1], values[1, 1] = NAN, INF

    blocks = round_to_blocks(values)

    assert blocks.integers.eq(0).all()
    assert blocks.scales.flatten().isnan().tolist() == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_takes_what_a_linear_layer_takes(kernel, bias):
    linear = nn.Linear(64, 50, bias=bias).requires_grad_(requires_grad=False)
    layer = Int8Linear(linear, kernel)
    # Two dimensions of rows, and not contiguous.
    inputs = normal(2, 64, 3).transpose(1, 2)

    got = layer(inputs)

    assert got.shape == (2, 3, 50)
    assert (got - linear(inputs)).norm() < 0.02 * linear(inputs).norm()
    assert same_bits(layer(inputs.double()), got)
    assert layer(inputs[:0]).shape == (0, 3, 50)
    with pytest.raises(ValueError, match="32 inputs for a layer of 64"):
        layer(torch.ones(2, 32))
    assert (torch.ones(1, 64) @ layer.weight.T).isnan().all()


class Model(nn.Module):
    """Layers of all kinds, the output layer tied to the embedding."""

    class Doubling(nn.Linear):
        """A layer that is a Linear and does not compute one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.body = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64))
        self.odd = nn.Linear(40, 64)
        self.gate = nn.Linear(64, 2)
        self.halved = nn.Linear(64, 64).bfloat16()
        self.other = self.Doubling(64, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(requires_grad=False)

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)))


@pytest.fixture
def use(monkeypatch):
    """Let a kernel be the one that is found, or none."""

    def use(kernel):
        def load(_progress):
            if kernel is None:
                raise NoLibraryError("there is no C++ compiler")
            return kernel

        monkeypatch.setattr(int8, "load_kernel", load)

    return use


@pytest.mark.slow
def test_plain_layers_of_float32_are_replaced_and_no_others(kernel, use):
    use(kernel)
    model = Model()
    before = model.embedding.weight.clone()
    assert quantize_linear_layers(model, progress=print) == 3

    kinds = [type(layer) for layer in (*model.body, model.head)]
    assert kinds == [Int8Linear] * 3
    assert (type(model.odd), type(model.gate)) == (nn.Linear, nn.Linear)
    assert (type(model.halved), type(model.other)) == (nn.Linear, Model.Doubling)
    assert torch.equal(model.embedding.weight, before)


@pytest.mark.slow
def test_without_a_kernel_the_same_weights_are_computed_in_float32(kernel, use):
    ids, lines = torch.arange(12), []
    plain, fast, slow = Model(), Model(), Model()
    fast.load_state_dict(plain.state_dict())
    slow.load_state_dict(plain.state_dict())
    use(kernel)
    quantize_linear_layers(fast, progress=print)
    use(None)
    assert quantize_linear_layers(slow, progress=lines.append) == 3

    assert [type(layer) for layer in slow.body] == [PackedLinear, PackedLinear]
    assert lines[0].endswith("no gain in speed or memory: there is no C++ compiler")
    with torch.inference_mode():
        exact, quick, careful = plain(ids), fast(ids), slow(ids)
        torch.testing.assert_close(
            slow.body[0](normal(3, 64)), normal(3, 64) @ rounded(plain.body[0].weight).T
        )
    assert 0 < (careful - exact).norm() < 0.02 * exact.norm()
    assert 0 < (quick - exact).norm() < 0.02 * exact.norm()


@pytest.mark.slow
def test_a_build_that_computes_something_else_is_not_used(kernels, monkeypatch):
    class Wrong:
        """Another library with a function of that name."""

        @staticmethod
        def triolet_int8_linear(*arguments):
            rows, outputs, y = arguments[1], arguments[3], arguments[7]
            ctypes.memset(y, 0, 4 * rows * outputs)

    assert isinstance(load_kernel(lambda _: None), Int8Kernel)
    monkeypatch.setattr(int8, "load_library", lambda *_, **__: Wrong)
    with pytest.raises(NoLibraryError, match="something else than torch"):
        load_kernel(lambda _: None)


def model_of(**changes):
    return build(tiny_config("llama", **changes)).requires_grad_(requires_grad=False)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: model_of().bfloat16(), "leave --dtype at auto"),
        (
            lambda: model_of(hidden_size=24, intermediate_size=24, head_dim=6),
            "no layer in this model",
        ),
        (lambda: setattr(it := model_of(), "is_quantized", True) or it, "not quantized yet"),
        (lambda: model_of().to("meta"), "add --device cpu"),
    ],
)
def test_what_int8_is_not_for_is_refused(model, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        check_quantizable(model())
    assert refused.value.param == "quantization"


def test_weights_that_change_too_much_are_refused():
    model = model_of(initializer_range=0.05)
    model.set_attn_implementation("triolet")
    with little_changes_in(model):
        model.lm_head.weight.mul_(1.01)
    with (
        pytest.raises(UnsupportedModelError, match="rounded weights than without"),
        little_changes_in(model),
    ):
        model.lm_head.weight.copy_(normal(*model.lm_head.weight.shape))
    with (
        pytest.raises(UnsupportedModelError, match="nan"),
        little_changes_in(model),
    ):
        model.lm_head.weight.fill_(NAN)


QUESTIONS = ("What is the capital of France?", "Write a haiku about rivers.", "Say hello.")


@pytest.fixture(scope="module")
def local():
    packaged = find_packaged_model()
    if packaged is None:
        pytest.skip("the packaged model is not installed")
    options = EngineOptions(
        threads=1,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        block_size=16,
        kv_cache_bytes=None,
        quantization="int8",
    )
    return load_engine(str(packaged.path), options, progress=lambda _: None)


def run(local, prompts):
    """What the engine makes of prompts that arrive together, and in how many steps each grew."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=24, temperature=0)
        local.engine.add(EngineRequest(RequestId(str(number)), prompt, sampling))
    got, steps = [[] for _ in prompts], [0 for _ in prompts]
    while local.engine.has_work:
        for output in local.engine.step().outputs:
            got[int(output.request_id)] += output.token_ids
            steps[int(output.request_id)] += 1
    return got, steps


@pytest.mark.model
@pytest.mark.slow
def test_the_packaged_model_still_makes_sense_token_by_token(local):
    weights = local.weights
    tokenizer = load_tokenizer(str(weights.path), gguf_metadata=weights.gguf_metadata)
    prompts = [
        tuple(
            tokenizer.encode(
                tokenizer.render_chat([{"role": "user", "content": question}]),
                add_special_tokens=False,
            )
        )
        for question in QUESTIONS
    ]

    answers, steps = run(local, prompts)

    assert "Paris" in tokenizer.decode(answers[0], skip_special_tokens=True)
    assert steps == [len(answer) for answer in answers]
    if COMPILER is not None:
        assert any(type(part) is Int8Linear for part in weights.model.modules())
        assert type(weights.model.lm_head) is Int8Linear
