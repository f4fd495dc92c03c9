"""What a load test sends, and when: decided before it begins, from a seed.

- Closed loop: so many requests are always in flight, and the next is sent when one ends. The
  server sets the pace, so a server that stalls is asked less: latencies flatter it.
- Open loop: requests are sent at times that do not depend on the server, as users do. What a
  request waits because the client or a limit held it back is part of its latency, which is
  why the figures count from the intended time (Tene, "How NOT to Measure Latency", 2013, calls
  the other way "coordinated omission").
- Gaps are gamma distributed with mean ``1 / rate``. ``burstiness`` is the shape: 1 is a Poisson
  process, below 1 is burstier, and large values approach a metronome.
- Prompts are random common words, each of which is one token in most vocabularies. How many
  words make how many tokens is measured (:func:`fit`), since templates add their own.
"""

from __future__ import annotations

import random
from itertools import accumulate

import attrs

_WORDS = """
the of and to in is was for that on with as his they at be this from have or by one had
not but what all were when we there can an your which their said if do will each about how
up out them then she many some so these would other into has more her two like him see
time could no make than first been its who now people my made over did down only way find
use may water long little very after words called just where most know get through back
much before go good new write our me man too any day same right look think also around
another came come work three word must because does part even place well such here take
why things help put years different away again off went old number great tell men say
small every found still between name should home big give air line set own under read last
never us left end along while might next sound below saw something thought both few those
always looked show large often together asked house world going want school important
until form food keep children feet land side without boy once animals life enough took
sometimes four head above kind began almost live page got earth need far hand high year
mother light parts country father let night following picture being study second eyes soon
times story boys since white days ever paper hard near sentence better best across during
today others however sure means knew
"""
#: Words that byte-pair vocabularies of every family hold whole, with a space before them.
WORDS = tuple(_WORDS.split())


@attrs.frozen
class Load:
    """A load test, without the server that it is for."""

    requests: int
    #: Requests in flight at most; ``None`` is no limit, which only an open loop can have.
    concurrency: int | None = 1
    #: Requests per second; ``None`` is a closed loop.
    rate: float | None = None
    burstiness: float = 1.0
    #: Tokens of each prompt, the chat template's included.
    input_len: int = 64
    #: Of these, how many all prompts have in common, from the start.
    shared_prefix: int = 0
    #: Output tokens to ask for.
    output_len: int = 128
    seed: int = 0

    def describe(self) -> str:
        """One line for a report."""
        if self.rate is None:
            loop = f"closed loop, {self.concurrency} at once"
        else:
            limit = "" if self.concurrency is None else f", at most {self.concurrency} at once"
            loop = f"open loop, {self.rate:g}/s, burstiness {self.burstiness:g}{limit}"
        shared = f" ({self.shared_prefix} shared)" if self.shared_prefix else ""
        return f"{loop}, {self.input_len} in{shared} / {self.output_len} out, seed {self.seed}"


@attrs.frozen
class Scale:
    """How many tokens so many words make: ``overhead + words * per_word``."""

    overhead: float = 0.0
    per_word: float = 1.0

    def words(self, tokens: int) -> int:
        """Words for a prompt of so many tokens; at least one."""
        return max(1, round((tokens - self.overhead) / self.per_word))


def fit(short: tuple[int, int], long: tuple[int, int]) -> Scale:
    """The scale through two measured prompts, as pairs of words and tokens.

    A pair that no tokenizer gives (the longer prompt has no more tokens) is not believed.
    """
    words, tokens = long[0] - short[0], long[1] - short[1]
    if words <= 0 or tokens <= 0:
        return Scale()
    per_word = tokens / words
    return Scale(max(0.0, short[1] - short[0] * per_word), per_word)


def arrivals(load: Load) -> tuple[float, ...]:
    """When each request of an open loop is to be sent, in seconds after the first.

    Raises:
        ValueError: The load is a closed loop.
    """
    if load.rate is None:
        raise ValueError("a closed loop has no schedule")
    noise = _noise(load.seed, "arrivals")
    scale_s = 1 / (load.rate * load.burstiness)
    gaps = (noise.gammavariate(load.burstiness, scale_s) for _ in range(load.requests - 1))
    return tuple(accumulate(gaps, initial=0.0))


def prompts(load: Load, scale: Scale, *, warmup: int = 0) -> tuple[tuple[str, ...], ...]:
    """The texts of warm-up and test: two tuples, no text of which is in both.

    All start with the same words, as ``shared_prefix`` says; no two go on in the same way, other
    than by chance.
    """
    total = scale.words(load.input_len)
    shared = min(total - 1, scale.words(load.shared_prefix)) if load.shared_prefix else 0
    prefix = sentence(load.seed, "prefix", shared)

    def texts(kind: str, count: int) -> tuple[str, ...]:
        return tuple(
            " ".join((*prefix, *sentence(load.seed, f"{kind} {number}", total - shared)))
            for number in range(count)
        )

    return texts("warm-up", warmup), texts("prompt", load.requests)


def sentence(seed: int, name: str, words: int) -> tuple[str, ...]:
    """Random words: always the same ones for the same seed and name."""
    noise = _noise(seed, name)
    return tuple(noise.choices(WORDS, k=words))


def _noise(seed: int, name: str) -> random.Random:
    return random.Random(f"{seed} {name}")  # noqa: S311 - a schedule is no secret
