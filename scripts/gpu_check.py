"""Check the CUDA path against references on the CPU, then time it: one command, no network.

    python scripts/gpu_check.py                # on a machine with a GPU; under ten minutes
    python scripts/gpu_check.py --dry-run      # anywhere: a plain kernel, recordings that only call

All models have random weights made here. Greedy tokens are compared in float32, where the GPU must
give those of transformers' ``generate`` on the CPU; in half precision logits are compared, since
one rounding decides a token of a random model. Writes ``gpu_check.json`` and ``gpu_check.txt``
to ``$OUT`` if that is set, after every part, so that a run that is cut off leaves what it had.
The exit status is 1 if any check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import platform
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from triolet.core import EngineRequest, RequestId, SamplingParams
from triolet.engine import graphs, varlen
from triolet.engine.attention import Step
from triolet.engine.blocks import BlockPool
from triolet.engine.forward import compute_logits
from triolet.engine.kv import KvPool, KvShape, bytes_per_block
from triolet.engine.loop import Engine
from triolet.engine.plan import BlockCopy, Chunk, StepPlan
from triolet.engine.prefix import PrefixIndex
from triolet.engine.runner import TorchRunner, build_runner
from triolet.engine.scheduler import Scheduler
from triolet.engine.sizing import largest_step, measure_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

#: Largest error of half-precision logits against float32 on the CPU, as a share of their spread.
HALF_TOLERANCE = 0.1
#: The same between two ways to compute them in half precision on one device.
SAME_TOLERANCE = 0.05
#: Longer than a page of 256 and than any window below.
PROMPT, NEW = 300, 24
WINDOW = 40

BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    # Tied, random weights say the same token for ever.
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {**BASE, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**BASE),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=32),
    "mistral": lambda: MistralConfig(**BASE, sliding_window=WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **GEMMA, layer_types=["sliding_attention"] * 3 + ["full_attention"]
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=512, n_embd=64, n_layer=4, n_head=4, n_positions=1024, initializer_range=0.2,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    ),
    # Soft cap and sinks: gathered, whatever the device.
    "gemma2": lambda: Gemma2Config(**GEMMA),
    "gpt-oss": lambda: GptOssConfig(
        **BASE, head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters=ROPE,
    ),
    # Reads a position back in its forward: cannot be recorded, must be served all the same.
    "dynamic-rope": lambda: LlamaConfig(
        **BASE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
}  # fmt: skip


def plain_varlen(  # noqa: PLR0913 - the signature is torch's
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None,
    max_q: int, max_k: int, *, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What ``varlen_attn`` computes, in plain torch, and what it demands of its arguments."""
    assert seqused_k is not None
    assert block_table is not None
    assert cu_seq_k is not None
    integers = (cu_seq_q, cu_seq_k, seqused_k, block_table)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in integers)
    assert all(t.stride(-1) == 1 for t in (query, key, value))
    assert enable_gqa or query.shape[1] == key.shape[2]
    rows = len(seqused_k)
    assert cu_seq_q.shape == cu_seq_k.shape == (rows + 1,)
    assert block_table.shape[0] == rows
    assert block_table.shape[1] * key.shape[1] >= int(seqused_k.max()) <= max_k
    out = torch.empty_like(query)
    bounds = cu_seq_q.tolist()
    group = query.shape[1] // key.shape[2]
    for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
        length = int(seqused_k[row])
        assert 0 < end - begin <= max_q
        pages = block_table[row].long()
        k, v = (pool[pages].flatten(0, 1)[:length].float() for pool in (key, value))
        k, v = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        q = query[begin:end].float().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        at = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        keys = torch.arange(length, device=q.device)
        left, right = window_size
        hidden = torch.zeros_like(scores[0], dtype=torch.bool)
        if left >= 0:
            hidden |= keys < at - left
        if right >= 0:
            hidden |= keys > at + right
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def play_by_calling(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """A capture that records nothing: to play it is to compute again."""
    result = compute()

    def play() -> None:
        result.copy_(compute())

    return result, play


@contextlib.contextmanager
def pretended_kernel() -> Iterator[None]:
    """Let pools on the CPU, of any dtype, be attended to with :func:`plain_varlen`."""
    real = varlen.find_kernel, varlen.why_gathered, graphs.why_gathered
    varlen.find_kernel = lambda: plain_varlen  # type: ignore[assignment]  # a stand-in
    varlen.why_gathered = graphs.why_gathered = lambda _pool: None
    try:
        yield
    finally:
        varlen.find_kernel, varlen.why_gathered, graphs.why_gathered = real


@attrs.define(eq=False)
class Bench:
    """Where and how large, and what has been found so far."""

    device: torch.device
    dry: bool
    started: float = attrs.field(factory=time.monotonic)
    results: dict[str, Any] = attrs.field(factory=dict)
    failed: list[str] = attrs.field(factory=list)
    lines: list[str] = attrs.field(factory=list)

    @property
    def capture(self) -> Callable[[], graphs.Capture]:
        """Makes what records decode steps here."""
        if self.device.type == "cpu":
            return lambda: play_by_calling
        return functools.partial(graphs.CudaCapture, self.device)

    def say(self, line: str) -> None:
        """Print a line of the report."""
        self.lines.append(line)
        print(f"[{time.monotonic() - self.started:6.1f} s] {line}", flush=True)

    def part(self, name: str, work: Callable[[Bench], Any]) -> None:
        """Run one part; what goes wrong in it fails it and nothing else."""
        try:
            self.results[name] = work(self)
            verdict = "ok"
        except Exception as error:  # noqa: BLE001 - the report must go on
            traceback.print_exc()
            self.results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            verdict = "FAILED"
            self.failed.append(name)
        self.say(f"{verdict:6} {name}")
        self.save()

    def save(self) -> None:
        """Write what there is to ``$OUT``."""
        folder = os.environ.get("OUT")
        if folder:
            report = {"failed": self.failed, "results": self.results}
            Path(folder, "gpu_check.json").write_text(json.dumps(report, indent=1))
            Path(folder, "gpu_check.txt").write_text("\n".join(self.lines) + "\n")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def build(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model with random weights, the same each time, made on the CPU."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(device, dtype).eval()


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random ids, the same each time."""
    dice = torch.Generator().manual_seed(1000 * length + seed)
    return tuple(torch.randint(3, 512, (length,), generator=dice).tolist())


PROMPTS = (prompt_of(PROMPT), prompt_of(7), prompt_of(270), prompt_of(1), prompt_of(65))


def generate(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    """What transformers itself makes of a prompt, greedily."""
    tensor = torch.tensor([prompt], device=model.device)
    out = model.generate(
        tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=NEW, do_sample=False
    )
    return list(out[0, len(prompt) :].tolist())


def new_engine(
    runner: TorchRunner, *, blocks: int = 64, rows: int = 8, budget: int = 90, reuse: bool = False
) -> Engine:
    """A scheduler in front of the runner; with ``reuse``, its prompts share what is computed."""
    size = runner.block_size
    scheduler = Scheduler(
        BlockPool(blocks, size, index=PrefixIndex(size) if reuse else None),
        max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=1024,
        eos_token_ids=frozenset(),
    )  # fmt: skip
    return Engine(scheduler, runner)


def serve(
    runner: TorchRunner,
    prompts: Sequence[tuple[int, ...]],
    *,
    engine: Engine | None = None,
    abort_at: dict[int, int] | None = None,
) -> list[list[int]]:
    """Greedy tokens of all prompts, in chunks beside each other; some aborted after some steps."""
    engine = engine or new_engine(runner)
    sampling = SamplingParams(max_tokens=NEW, temperature=0.0)
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(RequestId(str(number)), prompt, sampling))
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in itertools.count():
        for number, when in (abort_at or {}).items():
            if when == step:
                engine.abort(RequestId(str(number)))
        if not engine.has_work:
            break
        result = engine.step()
        for output in result.outputs if result else ():
            outputs[int(output.request_id)] += output.token_ids
        assert not (result and result.failures), result
    assert engine.statistics().used_blocks == 0, "blocks were left behind"
    return outputs


def runner_of(
    bench: Bench, model: PreTrainedModel, *, blocks: int = 64, recorded: bool
) -> TorchRunner:
    """A runner with pages for the kernel."""
    return build_runner(
        model, num_blocks=blocks, block_size=varlen.CUDA_PAGE, max_num_seqs=8,
        capture=bench.capture if recorded else None, max_model_len=1024,
    )  # fmt: skip


def forced_logits(model: PreTrainedModel, kind: type[Step], dtype: torch.dtype) -> Tensor:
    """All logits of two texts, in uneven chunks and scattered pages, decode beside prefill."""
    pool = KvPool(
        KvShape.of(model.config), num_blocks=6, block_size=varlen.CUDA_PAGE, dtype=dtype,
        device=model.device,
    )  # fmt: skip
    texts, tables = (prompt_of(PROMPT, 1), prompt_of(280, 2)), ((5, 1, 3), (0, 4))
    cuts = ([0, 130, 258, 259, 260, 300], [0, 1, 250, 270, 279, 280])
    logits: list[list[Tensor]] = [[], []]
    for part in range(5):
        chunks = [
            Chunk(
                request_id=RequestId(str(i)), row=i, token_ids=texts[i][cut[part] : cut[part + 1]],
                start=cut[part], blocks=tables[i], samples=True,
                sampling=SamplingParams(max_tokens=1, temperature=0.0), output_index=0,
            )
            for i, cut in enumerate(cuts)
        ]  # fmt: skip
        step = kind(chunks, pool)
        rows = compute_logits(model, step, torch.arange(step.slots.numel(), device=pool.device))
        for i, last in enumerate(step.last_tokens):
            logits[i].append(rows[last - len(chunks[i].token_ids) + 1 : last + 1])
    return torch.cat([torch.cat(parts) for parts in logits]).float().cpu()


def error_of(got: Tensor, wanted: Tensor) -> float:
    """Median over the positions of the error's share of the logits' spread."""
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((got - wanted).norm(dim=-1) / spread).median())


def environment(bench: Bench) -> dict[str, Any]:
    """What this ran on."""
    found = {
        "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "device": str(bench.device),
        "kernel": varlen.find_kernel() is not None,
    }  # fmt: skip
    if bench.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(bench.device)
        found["bytes"] = torch.cuda.mem_get_info(bench.device)[1]
    bench.say(json.dumps(found))
    return found


def kernel_itself(bench: Bench) -> dict[str, float]:
    """Torch's kernel against plain torch: chunks, windows, groups, decode rows, long tables."""
    kernel = varlen.find_kernel()
    if kernel is None:
        bench.say("       this torch has no kernel that knows pages: everything is gathered")
        return {}
    errors = {}
    dice = torch.Generator().manual_seed(0)
    for queries, heads, dim, window in itertools.product(
        ((1, 1, 1), (1, 200, 3)), ((8, 8), (8, 2)), (64, 128, 256), (None, 40)
    ):
        lengths = [700, 300, 4]
        pages = [
            torch.randn(9, 256, heads[1], dim, generator=dice).to(bench.device, torch.bfloat16)
            for _ in range(2)
        ]
        query = torch.randn(1, heads[0], sum(queries), dim, generator=dice)
        table = [8, 2, 5, 1, 7, 7, 3, 3, 3]
        rows = varlen.PagedRows(
            starts=torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            tables=torch.tensor(table, dtype=torch.int32).view(3, 3),
            most_queries=max(queries), most_keys=768,
        )  # fmt: skip
        rows = varlen.PagedRows(
            *(t.to(bench.device) for t in (rows.starts, rows.lengths, rows.tables)),
            most_queries=rows.most_queries, most_keys=rows.most_keys,
        )  # fmt: skip
        query = query.to(bench.device, torch.bfloat16)
        got = rows.attend(query, (pages[0], pages[1]), window, None)
        wanted = plain_varlen(
            query[0].transpose(0, 1), *pages, rows.starts, rows.key_starts, max(queries), 768,
            window_size=(-1, 0) if window is None else (window - 1, 0), enable_gqa=True,
            seqused_k=rows.lengths, block_table=rows.tables,
        )  # fmt: skip
        name = f"queries {queries} heads {heads} dim {dim} window {window}"
        errors[name] = float((got.float() - wanted.float()).abs().max())
        assert errors[name] < 0.03, (name, errors[name])  # bfloat16 at 1 to 3
    return errors


def half_precision(model: PreTrainedModel, wanted: Tensor) -> dict[str, float]:
    """How far a model in bfloat16 is from the reference's logits, by each way to attend."""
    gathered = forced_logits(model, Step, torch.bfloat16)
    found = {"bfloat16, gathered": error_of(gathered, wanted)}
    if varlen.find_kernel() is not None:
        kernel = forced_logits(model, varlen.VarlenStep, torch.bfloat16)
        found["bfloat16, kernel"] = error_of(kernel, wanted)
        found["kernel against gathered"] = error_of(kernel, gathered)
        assert found["kernel against gathered"] < SAME_TOLERANCE, found
    assert max(found.values()) < HALF_TOLERANCE, found
    return found


def family(name: str) -> Callable[[Bench], dict[str, Any]]:
    """One family: tokens in float32, logits in half; gathered, recorded, aborted, reused."""

    def check(bench: Bench) -> dict[str, Any]:
        found: dict[str, Any] = {}
        reference = build(FAMILIES[name](), torch.device("cpu"))
        expected = [generate(reference, prompt) for prompt in PROMPTS]
        model = build(FAMILIES[name](), bench.device)
        for recorded in (False, True):
            runner = runner_of(bench, model, recorded=recorded)
            runner.warm_up()
            got = serve(runner, PROMPTS)
            assert got == expected, f"float32 tokens differ from generate's; recorded: {recorded}"
            # Two are aborted between steps, one in its prompt and one while it decodes.
            got = serve(runner, PROMPTS, abort_at={0: 2, 1: 9})
            assert got[2:] == expected[2:], "an abort changed a stranger's tokens"
            assert 0 < len(got[1]) < NEW, "the abort came at the wrong time to mean anything"
            assert got[1] == expected[1][: len(got[1])]
            engine = new_engine(runner, reuse=True)
            for turn in ("first", "second"):
                got = serve(runner, PROMPTS, engine=engine)
                assert got == expected, f"tokens differ where prefixes are kept, {turn} time"
            hits = engine.statistics().prefix_hit_tokens
            assert hits == sum(len(prompt) - 1 for prompt in PROMPTS), f"{hits} tokens were reused"
        found["float32"] = "tokens of generate, recorded or not, beside aborts, prefixes reused"
        half = build(FAMILIES[name](), bench.device, torch.bfloat16)
        eager = serve(runner_of(bench, half, recorded=False), PROMPTS)
        played = serve(runner_of(bench, half, recorded=True), PROMPTS)
        pairs = zip(itertools.chain(*eager), itertools.chain(*played), strict=True)
        found["bfloat16 tokens alike, recorded or not"] = sum(a == b for a, b in pairs) / sum(
            map(len, eager)
        )
        runner_of(bench, reference, recorded=False)  # for its attention to be ours
        with torch.inference_mode():
            found |= half_precision(half, forced_logits(reference, Step, torch.float32))
        bench.say(f"       {name}: {json.dumps(found)}")
        return found

    return check


def waits(bench: Bench) -> dict[str, int]:
    """How often the host waits for the GPU in a step, as torch itself counts it."""
    if bench.device.type == "cpu":
        return {}
    found = {}
    model = build(FAMILIES["llama"](), bench.device, torch.bfloat16)
    samplings = {
        "greedy": SamplingParams(max_tokens=1, temperature=0.0),
        "top-p": SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9),
        "all of it": SamplingParams(
            max_tokens=1, temperature=1.0, min_p=0.01, repetition_penalty=1.1, logprobs=5,
            logit_bias=((5, 1.0),), min_tokens=1,
        ),
    }  # fmt: skip
    for recorded, (name, sampling) in itertools.product((False, True), samplings.items()):
        runner = runner_of(bench, model, recorded=recorded)
        for tokens, samples in ((1, True), (40, True), (40, False)):
            plan = plan_of(4, start=200, tokens=tokens, pages=64, samples=samples)
            copies = (BlockCopy(source=60, target=0, tokens=9), BlockCopy(61, 1, 200))
            chunks = tuple(
                attrs.evolve(chunk, sampling=sampling, prompt_ids=chunk.token_ids)
                for chunk in plan.chunks
            )
            runner.run(StepPlan(chunks=chunks, copies=copies))
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                runner.run(StepPlan(chunks=chunks, copies=copies))
            torch.cuda.set_sync_debug_mode("default")
            count = sum("synchroniz" in str(each.message) for each in caught)
            case = f"{tokens} tokens{'' if samples else ' half-way'}"
            found[f"{name}, {case}, {'graphs' if recorded else 'eager'}"] = count
    bench.say(f"       {json.dumps(found)}")
    assert set(found.values()) == {1}, found
    return found


def midsize(bench: Bench) -> PreTrainedModel:
    """Random weights of the shape of a Llama of 1.5 B parameters, made where they are used."""
    sizes: dict[str, Any] = {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 20, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "max_position_embeddings": 8192, "eos_token_id": None,
    }  # fmt: skip
    if bench.dry:
        sizes |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
                  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    # In memory that exists: on the CPU first, 3 GB would take longer than all the rest.
    with torch.device(bench.device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
        finally:
            torch.set_default_dtype(previous)
    return model.eval()


def plan_of(rows: int, *, start: int, tokens: int, pages: int, samples: bool = True) -> StepPlan:
    """A step of ``rows`` chunks, each in pages of its own."""
    size = varlen.CUDA_PAGE
    used = -(-(start + tokens) // size)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    chunks = [
        Chunk(
            request_id=RequestId(str(row)), row=row,
            token_ids=tuple(range(3, 3 + min(tokens, 200))) * (tokens // 200 + 1), start=start,
            blocks=tuple((row * used + page) % pages for page in range(used)), samples=samples,
            sampling=sampling, output_index=0,
        )
        for row in range(rows)
    ]  # fmt: skip
    chunks = [attrs.evolve(chunk, token_ids=chunk.token_ids[:tokens]) for chunk in chunks]
    return StepPlan(chunks=tuple(chunks))


def milliseconds(bench: Bench, work: Callable[[], object], least: float) -> float:
    """The median time of one call, the device's work included, over ``least`` seconds."""
    for _ in range(3):
        work()
    times = []
    end = time.perf_counter() + least
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):  # enough for a median
        bench.synchronize()
        begin = time.perf_counter()
        work()
        bench.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2] * 1e3


def speed(bench: Bench) -> dict[str, Any]:
    """Decode and prefill of the mid-size model, with and without recordings."""
    model = midsize(bench)
    batches, contexts = ((1, 8, 64, 256), (500, 4000)) if not bench.dry else ((1, 3), (20,))
    cases = list(itertools.product(contexts, batches))
    if bench.device.type == "cuda":
        block = bytes_per_block(model.config, block_size=varlen.CUDA_PAGE, dtype=model.dtype)
        # A half: gathered, the largest case is in memory twice.
        fit = torch.cuda.mem_get_info(bench.device)[0] // 2 // block
        cases = [case for case in cases if pages_of(*case) < fit]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    found: dict[str, Any] = {"bytes of weights": weights}
    for recorded in (False, True):
        found |= speed_of(bench, model, cases, recorded=recorded)
    for name, case in found.items():
        if name.startswith("decode"):
            case["weights GB/s"] = weights / case["ms"] / 1e6
    return found


def pages_of(context: int, batch: int) -> int:
    """Pages that so many sequences of one length take, the next token included."""
    return batch * -(-(context + 1) // varlen.CUDA_PAGE)


def speed_of(
    bench: Bench, model: PreTrainedModel, cases: Sequence[tuple[int, int]], *, recorded: bool
) -> dict[str, Any]:
    """The same for one way to run decode steps."""
    pages = max(pages_of(*case) for case in cases) + 1
    runner = build_runner(
        model, num_blocks=max(pages, 40), block_size=varlen.CUDA_PAGE,
        max_num_seqs=max(batch for _, batch in cases),
        capture=bench.capture if recorded else None, max_model_len=8192,
    )  # fmt: skip
    least = 0.1 if bench.dry else 1.0
    way = "graphs" if recorded else "eager"
    begin = time.perf_counter()
    runner.warm_up()
    found: dict[str, Any] = {
        "attention": runner.how_it_attends,
        f"warm-up s, {way}": time.perf_counter() - begin,
    }
    plans = {
        f"decode, batch {batch}, context {context}, {way}": plan_of(
            batch, start=context, tokens=1, pages=pages
        )
        for context, batch in cases
    }
    if not recorded:
        for tokens in (40,) if bench.dry else (512, 2048, 8000):
            plans[f"prefill, {tokens} tokens"] = plan_of(1, start=0, tokens=tokens, pages=40)
    for name, plan in plans.items():
        ms = milliseconds(bench, functools.partial(runner.run, plan), least)
        tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
        found[name] = {"ms": ms, "tokens/s": tokens / ms * 1e3}
        bench.say(f"       {name}: {ms:8.2f} ms {tokens / ms * 1e3:10.0f} tokens/s")
    return found


def sizing(bench: Bench) -> dict[str, Any]:
    """What the KV cache would get beside the mid-size model, and that a full step then fits."""
    model = midsize(bench)
    budget, rows = (2048, 256) if not bench.dry else (64, 4)
    plan = largest_step(
        max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=8192,
        block_size=varlen.CUDA_PAGE,
    )  # fmt: skip
    runner = build_runner(
        model, num_blocks=1, block_size=varlen.CUDA_PAGE, max_num_seqs=rows,
        capture=bench.capture, max_model_len=8192,
    )  # fmt: skip
    if bench.device.type == "cpu":
        runner.run(plan)
        return {"measured": "only on a GPU"}
    size = measure_cache(runner, plan, bench.device, recorded=True, utilization=0.9)
    block = bytes_per_block(model.config, block_size=varlen.CUDA_PAGE, dtype=model.dtype)
    runner.resize(size // block)
    runner.warm_up()
    runner.run(plan)
    free, total = torch.cuda.mem_get_info(bench.device)
    found = {"cache bytes": size, "tokens": size // block * varlen.CUDA_PAGE,
             "in use afterwards": (total - free) / total}  # fmt: skip
    bench.say(f"       {json.dumps(found)}")
    assert found["in use afterwards"] < 0.95, "more is in use than was allowed"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with stand-ins")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --dry-run runs with stand-ins on the CPU")
    bench = Bench(torch.device("cpu" if options.dry_run else "cuda"), options.dry_run)
    with pretended_kernel() if options.dry_run else contextlib.nullcontext():
        bench.part("environment", environment)
        bench.part("kernel", kernel_itself)
        for name in options.families:
            bench.part(name, family(name))
        bench.part("waits", waits)
        bench.part("sizing", sizing)
        bench.part("speed", speed)
    bench.say(f"{len(bench.failed)} of {len(bench.results)} parts failed: {bench.failed}")
    bench.save()
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
