"""The whole engine on the packaged model, and settings that cannot be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from triolet.core import EngineRequest, RequestId, SamplingParams  # noqa: E402 - needs torch
from triolet.engine.gguf import find_packaged_model  # noqa: E402
from triolet.engine.local import EngineOptions, load_engine  # noqa: E402
from triolet.engine.weights import load_model  # noqa: E402
from triolet.errors import ConfigError  # noqa: E402
from triolet.prompt.huggingface import load_tokenizer  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.model, pytest.mark.slow]

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rivers.",
    "Count to ten in German, then say what you like about numbers.",
    "Say hello.",
)
TOKENS = 40


def options(**changes) -> EngineOptions:
    plain = {
        "threads": 1,
        "max_model_len": 512,
        "max_num_seqs": 4,
        # Prompts are cut in the middle.
        "max_num_batched_tokens": 24,
        "block_size": 16,
        "kv_cache_bytes": None,
    }
    return EngineOptions(**plain | changes)


@pytest.fixture(scope="module")
def source():
    packaged = find_packaged_model()
    if packaged is None:
        pytest.skip("the packaged model is not installed")
    return str(packaged.path)


@pytest.fixture(scope="module")
def local(source):
    return load_engine(source, options(), progress=lambda _: None)


@pytest.fixture(scope="module")
def reference(source):
    """Prompts, and what ``model.generate`` makes of them: untouched weights, own attention."""
    weights = load_model(source, progress=lambda _: None, attn_implementation="sdpa")
    tokenizer = load_tokenizer(source, gguf_metadata=weights.gguf_metadata)
    answers = {}
    for question in QUESTIONS:
        text = tokenizer.render_chat([{"role": "user", "content": question}])
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
        with torch.inference_mode():
            output = weights.model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False
            )
        answers[prompt] = output[0, len(prompt) :].tolist()
    return answers


def run(local, prompts) -> list[list[int]]:
    """What the engine makes of prompts that arrive together."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0)
        local.engine.add(EngineRequest(RequestId(str(number)), prompt, sampling))
    got: list[list[int]] = [[] for _ in prompts]
    while local.engine.has_work:
        step = local.engine.step()
        for output in step.outputs:
            got[int(output.request_id)] += output.token_ids
    statistics = local.engine.statistics()
    assert (statistics.used_blocks, statistics.used_rows) == (0, 0)
    return got


def test_greedy_output_is_that_of_generate_alone_and_among_strangers(local, reference):
    prompts = list(reference)
    expected = [reference[prompt] for prompt in prompts]
    assert [run(local, [prompt])[0] for prompt in prompts] == expected
    assert run(local, prompts) == expected


def test_a_length_the_model_was_not_made_for_is_refused(source):
    with pytest.raises(ConfigError, match="8192 tokens this model was made for") as refused:
        load_engine(source, options(max_model_len=9000), progress=lambda _: None)
    assert refused.value.param == "max_model_len"


def test_a_cache_too_small_for_one_request_is_refused_and_told_the_size(source):
    with pytest.raises(ConfigError, match="23,592,960 bytes with --kv-cache-memory") as refused:
        load_engine(source, options(kv_cache_bytes=2**20), progress=lambda _: None)
    assert refused.value.param == "kv_cache_memory"
