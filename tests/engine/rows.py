"""Rows for the sampler, without a model."""

from __future__ import annotations

import torch

from triolet.core import RequestId
from triolet.engine.plan import Chunk
from triolet.engine.sampler import Sampler

#: More than the candidates, so that rows can overflow them; no multiple of the search's span.
VOCABULARY = 700


def chunk_of(row, sampling, *, name=None, index=None, choice=0, prompt=(1,), output=()):
    """A chunk that samples. Its position means nothing here."""
    return Chunk(
        request_id=RequestId(name or f"request {row}"),
        row=row,
        token_ids=(1,),
        start=0,
        blocks=(0,),
        samples=True,
        sampling=sampling,
        output_index=len(output) if index is None else index,
        choice=choice,
        prompt_ids=tuple(prompt),
        output_ids=list(output),
    )


def new_sampler(rows=64, **options):
    return Sampler(max_rows=rows, device=torch.device("cpu"), **options)


def sampled(sampler, logits, chunks):
    return [sample.token_id for sample in sampler.sample(logits, chunks)]


def random_logits(rows, *, seed=0, vocabulary=VOCABULARY, scale=3.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale
