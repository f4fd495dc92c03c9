"""Tiny random models, and a driver that plans their steps as a scheduler would, only simpler."""

from __future__ import annotations

import dataclasses
import random

import attrs
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from triolet.core import RequestId, SamplingParams, TokenLogprobs
from triolet.engine.plan import Chunk, StepPlan

VOCABULARY = 512
WINDOW = 8
BLOCK = 4

# Weights far larger than a trained model starts with: attention then decides what comes out,
# and a mistake in it shows in the very next token.
BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GEMMA = {**BASE, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}

UNEVEN = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 32,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
}

#: What the configurations of all families call the sizes that make a model small.
SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 9,
    "query_pre_attn_scalar": 12,
    "rotary_dim": 4,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Tied, random weights say the same token for ever.
    "tie_word_embeddings": False,
    # Feed-forward layers and experts.
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}


def tiny_config(model_type, **changes):
    """A small configuration of any family; one that has windows has a layer without, too."""
    kind = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    sizes = SIZES | (LATENT if "kv_lora_rank" in fields else {})
    settings = {name: size for name, size in sizes.items() if name in fields}
    if (
        "layer_types" not in kind.attribute_map
        and "layer_types" in fields
        and "sliding_attention" in (kind().layer_types or ())
    ):
        settings["layer_types"] = ["sliding_attention", "full_attention"]
    return kind(**settings | changes)


CONFIGS = {
    "llama": lambda: LlamaConfig(**BASE),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(
        **GEMMA,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        # Tied, random weights say the same token for ever.
        tie_word_embeddings=False,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=4,
        n_head=4,
        n_positions=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "mistral": lambda: MistralConfig(**BASE, sliding_window=WINDOW),
    # The window of the models as published: longer than any test's prompt.
    "mistral-long": lambda: MistralConfig(**BASE, sliding_window=256),
    "softcap": lambda: Gemma2Config(**GEMMA),
    "sinks": lambda: GptOssConfig(
        **BASE, **MOE, head_dim=16, sliding_window=WINDOW, rope_parameters=PLAIN
    ),
    "latent": lambda: tiny_config("deepseek_v3"),
    "dynamic-rope": lambda: LlamaConfig(**BASE, rope_parameters=DYNAMIC),
    "long-rope": lambda: LlamaConfig(**BASE, rope_parameters=LONG),
    # From here on: models that are refused.
    "chunked": lambda: Llama4TextConfig(
        **BASE, intermediate_size_mlp=128, head_dim=16, attention_chunk_size=8
    ),
    "convolution": lambda: Lfm2Config(**BASE, full_attn_idxs=[1, 3]),
    "short": lambda: LlamaConfig(**BASE | {"max_position_embeddings": 31}),
    "uneven": lambda: tiny_config("gemma4_text", **UNEVEN),
    # Its mask knows no window, its cache does.
    "forgetful": lambda: tiny_config("moshi"),
    "bidirectional": lambda: Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True),
}
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "mistral")


def build(name, *, dtype=torch.float32):
    """A model with random weights, the same each time, under transformers' own attention.

    ``name`` is one of ``CONFIGS``, or a configuration.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "encoder-decoder":
            model = T5ForConditionalGeneration(
                T5Config(
                    vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4
                )
            )
        else:
            config = name if isinstance(name, PreTrainedConfig) else CONFIGS[name]()
            model = AutoModelForCausalLM.from_config(config)
    return model.to(dtype).eval()


def prompt(length, seed=0):
    dice = random.Random(f"{length} {seed}")
    return tuple(dice.randrange(3, VOCABULARY) for _ in range(length))


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0.0)


@attrs.define(eq=False)
class Request:
    """One sequence for :func:`drive`: its prompt is cut into chunks of ``chunk`` tokens."""

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    chunk: int = 1000
    #: Steps of the others before its own first one.
    delay: int = 0
    output: list[int] = attrs.field(init=False, factory=list)
    computed: int = attrs.field(init=False, default=0)
    #: What the runner says of the prompt's tokens, and of the output's.
    prompt_logprobs: list[TokenLogprobs] = attrs.field(init=False, factory=list)
    logprobs: list[TokenLogprobs | None] = attrs.field(init=False, factory=list)
    blocks: list[int] = attrs.field(init=False, factory=list)

    @property
    def done(self):
        return len(self.output) == self.sampling.max_tokens

    def next_chunk(self, row, free):
        ids = (*self.prompt, *self.output)
        end = min(self.computed + self.chunk, len(ids))
        while len(self.blocks) * BLOCK < end:
            self.blocks.append(free.pop())
        return Chunk(
            request_id=RequestId(self.name),
            row=row,
            token_ids=ids[self.computed : end],
            start=self.computed,
            blocks=tuple(self.blocks),
            samples=end == len(ids),
            sampling=self.sampling,
            output_index=len(self.output),
            prompt_ids=self.prompt,
            output_ids=self.output,
            scores_prompt=(
                self.sampling.prompt_logprobs is not None and self.computed < len(self.prompt) - 1
            ),
        )


def drive(runner, requests, *, num_blocks, seed=0):
    """Run the requests to their ends, together; return what each one put out.

    Blocks come in random order, and so do the chunks within a step.
    """
    dice = random.Random(seed)
    free = list(range(num_blocks))
    dice.shuffle(free)
    step = 0
    while not all(request.done for request in requests):
        active = [
            (row, request)
            for row, request in enumerate(requests)
            if not request.done and request.delay <= step
        ]
        dice.shuffle(active)
        chunks = [request.next_chunk(row, free) for row, request in active]
        result = runner.run(StepPlan(chunks=tuple(chunks)))
        samples = iter(result.samples)
        for i, ((_, request), chunk) in enumerate(zip(active, chunks, strict=True)):
            request.computed += len(chunk.token_ids)
            request.prompt_logprobs += result.prompt_logprobs.get(i, ())
            if chunk.samples:
                sample = next(samples)
                request.output.append(sample.token_id)
                request.logprobs.append(sample.logprobs)
        assert next(samples, None) is None
        step += 1
    return [request.output for request in requests]
