"""Every family that ``docs/reference/models.md`` names, against ``model.generate``.

The page's tables are written by ``python -m tests.engine.test_families``, from the lists below
and from what the models tell the attention function.
"""

# ruff: noqa: E402 - what needs torch is imported after importorskip
from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import attrs
from tests.engine.tiny_models import SIZES, UNEVEN, build, greedy, prompt, tiny_config
from transformers import CONFIG_MAPPING

from triolet.core import EngineRequest, RequestId
from triolet.engine import attention
from triolet.engine.architecture import longest_context
from triolet.engine.blocks import BlockPool
from triolet.engine.loop import Engine
from triolet.engine.plan import Chunk, StepPlan
from triolet.engine.runner import build_runner
from triolet.engine.scheduler import Scheduler
from triolet.errors import UnsupportedModelError

# What they cover others do too, and being measured takes them twice the time.
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.no_cover]

#: By what ``model_type`` in ``config.json`` says.
FAMILIES = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "bitnet", "codegen", "cohere"),
    *("cohere2", "cohere2_moe", "ctrl", "cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma", "gemma2"),
    *("gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode"),
    *("gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa"),
    *("granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
    *("hyperclovax", "jais2", "kolibri1", "laguna", "llama", "mellum", "minicpm3", "minimax_m2"),
    *("ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat", "olmo"),
    *("olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma"),
    "youtu",
)

SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
#: Settings that change what a family computes, beyond what its tiny model has anyway.
VARIANTS = {
    "dynamic rotary embeddings": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "linear rotary embeddings": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **SCALED}}),
    "llama3 rotary embeddings": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **SCALED,
            }
        },
    ),
    "longrope, up to its original context": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "a sliding window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9},
    ),
    "layers without positions": ("smollm3", {"no_rope_layers": [1, 0]}),
    "multipliers": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "scores scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "a window longer than the context": ("phimoe", {"sliding_window": 128}),
    "text without images": (
        "gemma3",
        {
            "text_config": tiny_config("gemma3_text").to_dict(),
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
    ),
}
NO_INTERFACE = "does not use transformers' attention interface"
#: By model type: settings, and what the refusal says.
REFUSED = {
    "bert": ({}, "attention is not causal"),
    "bloom": ({"n_head": 4}, NO_INTERFACE),
    "deepseek_v32": ({"index_topk": 8}, "layers of type indexed_attention"),
    "doge": ({}, "attention mask of its own"),
    "falcon": ({}, NO_INTERFACE),
    "gemma4_text": (UNEVEN, "keys and values of one size"),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]], "num_layers": 2}, NO_INTERFACE),
    "jamba": ({}, NO_INTERFACE),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "llama4_text": ({"intermediate_size_mlp": 64}, "layers of type chunked_attention"),
    "mamba": ({}, NO_INTERFACE),
    "mimo_v2_flash": ({}, "keys and values are"),
    "moshi": ({}, "other logits"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, NO_INTERFACE),
    "nemotron": ({}, "does not pass keyword arguments on"),
    "qwen3_5_text": ({}, NO_INTERFACE),
    "qwen3_next": ({}, NO_INTERFACE),
    "recurrent_gemma": ({}, "state other than keys and values"),
    "stablelm": ({}, NO_INTERFACE),
}

VOCABULARY = SIZES["vocab_size"]
NEW = 20
BLOCK = 16
#: Longer than a window and a block, longer than two of them, shorter than either.
LENGTHS = (18, 31, 5)
PROMPTS = tuple(tuple(token % VOCABULARY for token in prompt(length)) for length in LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def config_of(family):
    model_type, changes = VARIANTS.get(family, (family, {}))
    return tiny_config(model_type, **changes)


def generate(model, ids):
    tensor = torch.tensor([ids])
    mask = torch.ones_like(tensor)
    output = model.generate(tensor, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return output[0, len(ids) :].tolist()


def run(runner, prompts, *, blocks, budget):
    """What a whole engine puts out, and how often it preempted somebody."""
    scheduler = Scheduler(
        BlockPool(total_blocks=blocks, block_size=BLOCK),
        max_num_seqs=len(PROMPTS),
        max_num_batched_tokens=budget,
        max_model_len=4 * BLOCK,
        eos_token_ids=frozenset(),
    )
    engine = Engine(scheduler, runner)
    for number, ids in enumerate(prompts):
        engine.add(EngineRequest(RequestId(str(number)), ids, greedy(NEW)))
    outputs = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[int(output.request_id)] += output.token_ids
    return outputs, engine.statistics().preemptions


def next_token(runner, ids, *, start, blocks):
    chunk = Chunk(
        request_id=RequestId("a"),
        row=0,
        token_ids=ids[start:],
        start=start,
        blocks=blocks,
        samples=True,
        sampling=greedy(1),
        output_index=0,
    )
    [sample] = runner.run(StepPlan(chunks=(chunk,))).samples
    return sample.token_id


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_greedy_output_is_that_of_generate(family):
    """Alone; among others in chunks, with too few blocks for all; on another one's first block."""
    model = build(config_of(family))
    expected = [generate(model, ids) for ids in PROMPTS]
    # Random weights can say one token for ever, whatever attention does.
    assert max(len(set(output)) for output in expected) > NEW // 4
    runner = build_runner(model, num_blocks=8, block_size=BLOCK, max_num_seqs=len(PROMPTS))

    alone = [run(runner, [ids], blocks=8, budget=100)[0][0] for ids in PROMPTS]
    together, preemptions = run(runner, PROMPTS, blocks=5, budget=7)

    assert alone == expected
    assert together == expected
    assert preemptions > 0
    ids = PROMPTS[1]
    next_token(runner, ids, start=0, blocks=(6, 2))
    assert next_token(runner, ids, start=BLOCK, blocks=(6, 4)) == expected[1][0]


def refusal_of(family):
    changes, _ = REFUSED[family]
    with pytest.raises(UnsupportedModelError) as refused:
        build_runner(
            build(tiny_config(family, **changes)), num_blocks=8, block_size=4, max_num_seqs=2
        )
    return refused.value.message


@pytest.mark.parametrize("family", REFUSED)
def test_what_would_be_computed_wrongly_is_refused(family):
    assert REFUSED[family][1] in refusal_of(family)


def test_a_longrope_model_is_served_up_to_its_original_context():
    """Beyond it, whoever is beside a longer text would get that one's frequencies."""
    config = config_of("longrope, up to its original context")
    model = build(config)
    ids = torch.tensor([[5, 6, 7]])

    def second(positions):
        return model(ids, position_ids=torch.tensor([positions])).logits[0, 1]

    assert config.max_position_embeddings == 128
    assert longest_context(config) == 64
    assert torch.equal(second([0, 1, 63]), second([0, 1, 2]))
    assert not torch.allclose(second([0, 1, 64]), second([0, 1, 2]), atol=1e-3)


# The page


@attrs.define
class Heard:
    """What a model's attention told ours, over all layers."""

    windows: set[int | None] = attrs.field(factory=set)
    softcaps: set[float | None] = attrs.field(factory=set)
    sinks: bool = False


def features_of(family):
    """What is special about a family, as far as its own attention calls and modules say."""
    heard = Heard()

    def listening(*tensors, **kwargs):
        heard.windows.add(kwargs.get("sliding_window"))
        heard.softcaps.add(kwargs.get("softcap"))
        heard.sinks |= kwargs.get("s_aux") is not None
        return attention.attend(*tensors, **kwargs)

    model = build(config_of(family))
    registry = attention.AttentionInterface._global_mapping
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry, attention.NAME, listening)
        build_runner(model, num_blocks=1, block_size=BLOCK, max_num_seqs=1)
    windows = {None: "", 1: "sliding window", 2: "sliding window in some layers"}
    sliding = len(heard.windows) if heard.windows != {None} else None
    names = {name for name, _ in model.named_modules()}
    features = (
        windows[sliding],
        "soft-capped scores" if heard.softcaps != {None} else "",
        "attention sinks" if heard.sinks else "",
        "latent attention" if getattr(model.config, "kv_lora_rank", None) else "",
        "experts" if any("expert" in name for name in names) else "",
        "" if any("rotary" in name for name in names) else "no rotary module",
    )
    return ", ".join(filter(None, features))


def class_of(model_type):
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - for the page only
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def tables():
    """The page's three tables, in its order."""
    families = ["| `model_type` | class | what its tiny model has |", "| --- | --- | --- |"]
    families += [f"| `{f}` | `{class_of(f)}` | {features_of(f)} |" for f in FAMILIES]
    variants = ["| setting | checked on |", "| --- | --- |"]
    variants += [f"| {name} | `{model_type}` |" for name, (model_type, _) in VARIANTS.items()]
    refused = ["| `model_type` | refused with |", "| --- | --- |"]
    # Without figures, which are another machine's.
    refused += [f"| `{f}` | {re.sub(r' .relative.*[)]', '', refusal_of(f))} |" for f in REFUSED]
    return ["\n".join(table) for table in (families, variants, refused)]


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def test_the_page_lists_what_is_checked_here():
    page = PAGE.read_text()

    for table in tables():
        assert f"\n\n{table}\n" in page, "run: python -m tests.engine.test_families"


def test_every_family_is_one_that_transformers_has():
    assert set(FAMILIES) <= set(CONFIG_MAPPING)
    assert len(set(FAMILIES)) == len(FAMILIES)


def write_page():
    """Put the tables where the page has its old ones."""
    parts = PAGE.read_text().split("\n\n")
    # Further ones are written by hand.
    places = [i for i, part in enumerate(parts) if part.startswith("|")]
    for place, table in zip(places, tables(), strict=False):
        parts[place] = table
    PAGE.write_text("\n\n".join(parts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_page()
