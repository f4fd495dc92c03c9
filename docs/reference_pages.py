"""Writes the reference pages that say what the code says: errors, fields, metrics, testing.

Run it after a change of an error, a request field, a metric or a public name of
:mod:`triolet.testing`; a test compares the pages with what this prints.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from pathlib import Path

import attrs

from triolet import errors
from triolet.core import EngineStatistics
from triolet.observe.metrics import Metrics, ServerState
from triolet.testing import (
    asgi,
    checkpoints,
    counting,
    engine,
    faults,
    pipe,
    schedule,
    settled,
    storm,
    streams,
    wire,
    wire_client,
)
from triolet.wire import common, sampling
from triolet.wire.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPLATE_KWARGS_BYTES,
    ChatMessage,
    ChatRequest,
)
from triolet.wire.codec import Length, Within
from triolet.wire.completions import (
    MAX_CHOICES,
    MAX_PROMPT_IDS,
    MAX_PROMPTS,
    CompletionRequest,
)
from triolet.wire.tokenize import DetokenizeRequest, TokenizeRequest

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/reference_pages.py; do not edit. -->\n\n"

ERRORS = """\
# Errors

Whatever goes wrong before the first byte of a response is answered with an HTTP status and this
body, on every route:

```json
{"error": {"message": "…", "type": "…", "param": null, "code": "…"}}
```

`message` is a sentence that its reader can act on.
`param` is the field at fault, as in `messages[1].role`, or `null` where no single one is.
`code` is for programs: it does not change.
`type` is a coarse class, in the words that OpenAI's SDKs know.

Once a stream has begun, its status stands at 200.
The same object then comes as the last event, see [event streams](event-stream.md).

## What a client can meet

"""
ERROR_HEADERS = """
## Headers

`Retry-After`
: With `queue_full`, `not_ready` and `draining`: seconds after which another try makes sense.
  For a full queue it follows the rate at which requests have ended lately or, where their
  tokens are too many, at which the engine has begun with prompt tokens.

`x-should-retry: false`
: With `timeout`: a deadline that passed once would pass again.
  OpenAI's SDKs heed it and do not try.

`WWW-Authenticate: Bearer`
: With `invalid_api_key`.

`Allow`
: With `method_not_allowed`: the methods that the route has.

`X-Request-Id`
: With every response.
"""
CAUSES = {
    "CancelledRequestError": "`client_cancel`, `slow_client` or `shutdown`",
    "RequestTimeoutError": "`timeout`",
}

FIELDS = """\
# Request fields

Every field of OpenAI's two completion endpoints, and of vLLM's well-known extensions, is in one of
three places: supported, accepted without effect, or refused.
A field that would change the result and cannot be honoured is never ignored.
A field that nobody knows is ignored.

Types are strict: `"false"` is no boolean, `1.0` is no integer, and nothing is coerced.
`null` means that the field was left out.
Fields are checked in a fixed order and the first error is the answer, with its field in `param`.

"""
#: What a field means. A field without an entry here is an error of this script.
MEANINGS = {
    "model": "One of the names that `/v1/models` lists.",
    "stream": "Answer as an event stream.",
    "stream_options": "Only with `stream`; see below.",
    "max_tokens": "Output tokens at most; as many as fit where left out.",
    "max_completion_tokens": "The newer name of `max_tokens`; both must agree.",
    "n": "Choices of each prompt.",
    "best_of": "Only as another way to write `n`: choices are not ranked.",
    "min_tokens": "Nothing but the limit ends a choice before it has so many tokens.",
    "temperature": "0 is greedy.",
    "top_p": "Keep the likeliest tokens up to this probability; 1 is all.",
    "top_k": "Keep so many of the likeliest tokens; 0 or -1 is all.",
    "min_p": "Keep tokens at least this likely, as a share of the likeliest one's probability.",
    "repetition_penalty": "Divides the logits of all ids in prompt and output; 1 is off.",
    "presence_penalty": "Taken off the logits of all ids in the output, once; 0 is off.",
    "frequency_penalty": "The same for each time that an id is in the output.",
    "logit_bias": "Added to logits: an object of token id to number.",
    "allowed_token_ids": "No other token can be chosen.",
    "bad_words": "Words that cannot be completed, at the start of a text or within it.",
    "prompt_logprobs": "Logprobs of the prompt's tokens, with so many of the likeliest ones.",
    "return_token_ids": "`prompt_token_ids`, and `token_ids` with each choice or chunk.",
    "return_tokens_as_token_ids": "Call tokens `token_id:N` in logprobs.",
    "seed": "A seeded request draws the same random numbers whatever it is batched with.",
    "stop": "One string, or an array of strings, that end the text.",
    "stop_token_ids": "Token ids that end the text.",
    "ignore_eos": "Go on past the model's end of sequence.",
    "include_stop_str_in_output": "Leave what ended the text in it.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "timeout": "Seconds in all; the server's `--request-timeout` where that is less.",
    "priority": "Lower goes first. Other than 0 only with `--scheduling-policy priority`.",
    "cache_salt": "Only requests with the same one reuse each other's computed prefixes.",
    "messages": "The conversation; see below.",
    "logprobs": "How likely each output token was; see below.",
    "top_logprobs": "With each, so many of the likeliest ones. Only with `logprobs`.",
    "add_generation_prompt": "Begin the assistant's turn; where left out, unless the last message "
    "is continued.",
    "continue_final_message": "Go on with the last message; not with `add_generation_prompt`.",
    "chat_template_kwargs": "Variables of the chat template.",
    "add_special_tokens": "Special tokens that the tokenizer adds. True for texts where left out, "
    "false for chats, whose templates write them.",
    "prompt": "Text, or an array of token ids, or an array of these.",
    "echo": "Repeat the prompt before each choice, with its logprobs if those are asked for.",
    "include_usage": "A last chunk with the token counts, and `usage` in every other.",
    "continuous_usage_stats": "The counts so far in every chunk.",
    "keepalive": "Seconds of silence between comments, in place of `--keepalive`; 0 for none.",
    "role": "`system`, `developer` (the same), `user` or `assistant`.",
    "content": "A string, or an array of text parts, which are joined by line ends.",
    "name": "Passed on to the chat template.",
}
#: Fields that are read and change nothing.
WITHOUT_EFFECT = {
    "user": "a label",
    "metadata": "labels",
    "parallel_tool_calls": "there are no tools yet",
    "service_tier": "there is one tier",
    "prompt_cache_key": "a hint to other servers' caches",
    "prompt_cache_retention": "a hint to other servers' caches",
    "safety_identifier": "a label",
    "include_obfuscation": "chunks are not padded",
}
#: Limits of fields with a reader of their own, which no annotation tells.
LIMITS = {
    "priority": "32 bits, signed",
    "keepalive": "0, or at least 1",
    "n": "1 to `--max-n`",
    "best_of": "the value of `n`",
    "min_tokens": "at least 0, at most `max_tokens`",
    "logit_bias": f"{sampling.MAX_BIASES} entries of at most ±{sampling.MAX_BIAS:g}",
    "allowed_token_ids": f"1 to {sampling.MAX_ALLOWED_TOKEN_IDS} ids",
    "bad_words": f"{sampling.MAX_BAD_WORDS} strings of 1 to {sampling.MAX_BAD_WORD_CHARACTERS} "
    "characters",
    "prompt_logprobs": "0 to `--max-logprobs`",
    "top_logprobs": "0 to `--max-logprobs`",
    "chat_template_kwargs": f"{MAX_TEMPLATE_KWARGS_BYTES} bytes",
    "stop": f"{sampling.MAX_STOPS} strings of 1 to {sampling.MAX_STOP_CHARACTERS} characters, "
    f"{sampling.MAX_STOPS_CHARACTERS} in all",
    "seed": "64 bits",
    "top_k": "-1 or more",
    "messages": f"1 to {MAX_MESSAGES}",
    "content": f"1 to {MAX_PARTS} parts",
    "prompt": f"1 to {MAX_PROMPTS} prompts, not empty, of at most {MAX_PROMPT_IDS} ids; times `n`, "
    f"at most {MAX_CHOICES}",
    "metadata": f"{common.MAX_METADATA_PAIRS} pairs of strings of at most "
    f"{common.MAX_METADATA_KEY_CHARACTERS} and {common.MAX_METADATA_VALUE_CHARACTERS} characters",
}

#: What a field means on an endpoint where it is something else.
MEANINGS_AT = {
    (CompletionRequest, "logprobs"): "So many of the likeliest tokens with each; 0 for the output "
    "tokens alone.",
    (TokenizeRequest, "prompt"): "A text. Instead of `messages`.",
    (TokenizeRequest, "messages"): "A chat. Instead of `prompt`.",
    (TokenizeRequest, "model"): "May be left out.",
    (TokenizeRequest, "return_token_strs"): "How the vocabulary writes each token, too.",
    (DetokenizeRequest, "model"): "May be left out.",
    (DetokenizeRequest, "tokens"): "Token ids.",
}
LIMITS_AT = {
    (CompletionRequest, "logprobs"): "0 to `--max-logprobs`",
    (TokenizeRequest, "prompt"): "one text",
    (DetokenizeRequest, "tokens"): f"at most {MAX_PROMPT_IDS} ids",
}
DEFAULTS = """\
## What a field means that is left out

`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and, for chats, the limit of output
tokens come from the model's `generation_config.json` if it has them, and with
`--generation-config none` they do not.
Otherwise they are OpenAI's: 1, 1, off, off, off, and as many tokens as fit.
Text completions have at most 16, as at OpenAI.
Without a `seed`, each prompt draws one of its own, unless the server has `--seed`.

Bans and biases come first, then the penalties, the temperature, `min_p`, `top_k` and `top_p`.
"""
LOGPROBS = """\
## Logprobs

They are natural logarithms of the model's own distribution: before temperature, penalties, biases,
masks and cuts.
There is one entry for each output token, the one that ended the text included.

- The likeliest tokens are the true ones: the token that was chosen has its own entry and takes none
  of their places. In `top_logprobs` of `/v1/completions` it stands beside them.
- `token` is the token's own text, or `bytes:\\xNN…` where it is no whole character.
  `bytes` are its own bytes, so that those of all tokens, joined, are the text; `null` for a special
  token that the text leaves out.
- `text_offset` counts characters. Tokens of one character have the same one.
  With `echo` it counts those of the prompt's ids: special tokens that the prompt spells out
  are not in it.
  Behind a stop it goes on as if nothing had been cut off.
- What is less likely than `-9999.0` is written so. There is no NaN and no infinity.
- `prompt_logprobs` is vLLM's: `null` for the first token, then for each an object by token id.
  It stands in the choices of a text completion and beside those of a chat.
  In a stream it comes with the first text.
"""

METRICS = """\
# Metrics

`GET /metrics` answers in Prometheus' text format.
Counters and histograms of requests are written once per request, when it ends, whatever ended it.
A request that was refused counts too, on whatever route, also for a wrong path, method or key.
What the engine holds is read at the scrape, from one snapshot.

"""
OUTCOMES = """
## Outcomes

| `outcome` | Meaning |
| --- | --- |
| `finished` | All text was generated. |
| `rejected` | Refused with an error: bad input, no key, no such path, full queue, not ready. |
| `cancelled:disconnect` | The client left. |
| `cancelled:timeout` | The request's deadline passed, or its time in the queue. |
| `cancelled:slow_client` | The client took no byte for `--send-timeout` seconds. |
| `cancelled:shutdown` | A drain ran out of time, or was hurried by a second signal. |
| `cancelled:client_cancel` | The client asked for it, at `/v1/requests/{id}/cancel`. |
| `failed` | The engine or the output path failed. |

"""

TESTING = """\
# Python: `triolet.testing`

The tools that our own tests use.
They need neither torch nor sockets.
Those for apps, streams and checkpoints know nothing of Triolet: `AsgiClient` and `open_wire` take
any ASGI app, `FaultyStream` any Trio stream, `for_every_checkpoint` any Trio program.
`open_server` and `open_wire_server` start Triolet's own.

How to use them: [test an app that streams](../how-to/test-a-streaming-app.md),
[write a fault test](../how-to/write-a-fault-test.md).

"""
PUBLIC = {
    asgi: ("open_server", "AsgiServer", "AsgiClient", "AsgiExchange", "AsgiResponse"),
    engine: ("ScriptedBackend", "serve_script", "say", "echo", "Script"),
    faults: (
        *("SlowStep", "FailedStep", "Crash", "NeverReturns", "LateOutput"),
        *("OutOfBlocks", "FailedRequest", "WrongId"),
    ),
    wire: ("open_wire", "open_wire_server", "WireServer", "TrioletWire"),
    wire_client: ("WireClient", "http_request"),
    streams: (
        "FaultyStream",
        *("Delay", "Stall", "Dribble", "Reset", "HalfClose", "Cut"),
        *("fault_to_json", "fault_from_json", "reset_stream"),
    ),
    pipe: ("open_pipe", "PipeStream"),
    checkpoints: (
        *("for_every_checkpoint", "at_checkpoint", "count_checkpoints", "Checkpoints"),
        *("Checkpoint", "below", "run_seeded", "seeded_scheduling", "CheckpointNotReachedError"),
    ),
    settled: ("Witness",),
    counting: ("CountingBackend",),
    schedule: ("Schedule", "Stage", "Ask", "Pause", "Drain", "shrink"),
    storm: ("play", "find", "Play"),
}


def errors_page() -> str:
    """Errors with their status, code and type."""
    rows = ["| Status | `code` | `type` | When |", "| --- | --- | --- | --- |"]
    found = sorted(_leaves(errors.ClientError), key=lambda error: error.status)
    found += _leaves(errors.CapacityError)
    found += [errors.RequestTimeoutError, errors.CancelledRequestError]
    found += [errors.EngineError, errors.OutputError, errors.TrioletError]
    for error in found:
        code = CAUSES.get(error.__name__, f"`{error.code}`")
        when = (error.__doc__ or "").split("\n", 1)[0].split("; ``")[0].rstrip(".") + "."
        if error is errors.TrioletError:
            when = "A bug of ours; it is in the log."
        status = f"{error.status}"
        if error is errors.CancelledRequestError:
            status = "in a stream"
            when = "A running request was ended from outside."
        rows.append(f"| {status} | {code} | `{error.type}` | {_markdown(when)} |")
    return NOTE + ERRORS + "\n".join(rows) + "\n" + ERROR_HEADERS


def _leaves(error: type[errors.TrioletError]) -> list[type[errors.TrioletError]]:
    below = [leaf for child in error.__subclasses__() for leaf in _leaves(child)]
    concrete = error not in {errors.ClientError, errors.CapacityError}
    return [error, *below] if concrete else below


def fields_page() -> str:
    """Fields of both endpoints, by what happens to them."""
    shared = {field.name for field in attrs.fields(common.GenerationFields)}
    parts = [
        NOTE + FIELDS + "## Supported by both endpoints\n",
        _fields(common.GenerationFields, skip=set()),
        "## Supported by `/v1/chat/completions`\n",
        _fields(ChatRequest, skip=shared),
        "Each of `messages`:\n",
        _fields(ChatMessage, skip=set()),
        "## Supported by `/v1/completions`\n",
        _fields(CompletionRequest, skip=shared),
        "## `stream_options`\n",
        _fields(common.StreamOptions, skip=set()),
        DEFAULTS,
        LOGPROBS,
        "## `/tokenize` and `/detokenize`\n",
        _fields(TokenizeRequest, skip=set()),
        _fields(DetokenizeRequest, skip=set()),
        "## Accepted without effect\n",
        *(f"- `{name}`: {why}" for name, why in WITHOUT_EFFECT.items()),
        "\n## Refused\n",
        "With 400 and the field in `param`, unless the value is `null` or says nothing.\n",
        _refused("Both endpoints", common.REFUSED, {}),
        _refused("`/v1/chat/completions`", ChatRequest.refuses, common.REFUSED),
        _refused("A message", ChatMessage.refuses, {}),
        _refused("`/v1/completions`", CompletionRequest.refuses, common.REFUSED),
        _refused("`/tokenize`", TokenizeRequest.refuses, {}),
        _refused("`stream_options`", common.StreamOptions.refuses, {}),
    ]
    return "\n".join(parts)


def _fields(cls: type[attrs.AttrsInstance], *, skip: set[str]) -> str:
    rows = ["| Field | Limits | Meaning |", "| --- | --- | --- |"]
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in attrs.fields(cls):
        if field.name in skip or field.name in WITHOUT_EFFECT:
            continue
        place = (cls, field.name)
        limits = LIMITS_AT.get(place) or LIMITS.get(field.name) or _limits(hints[field.name])
        meaning = MEANINGS_AT.get(place) or MEANINGS[field.name]
        rows.append(f"| `{field.name}` | {limits} | {meaning} |")
    return "\n".join(rows) + "\n"


def _limits(hint: object) -> str:
    found = []
    for part in (hint, *typing.get_args(hint)):
        for limit in getattr(part, "__metadata__", ()):
            if isinstance(limit, Within):
                low = "above" if limit.low_open else "at least"
                high = "" if limit.high is None else f", at most {limit.high:g}"
                found.append(f"{low} {limit.low:g}{high}")
            elif isinstance(limit, Length):
                found.append(f"{limit.low} to {limit.high} {_unit(part)}")
    return ", ".join(dict.fromkeys(found))


def _unit(annotated: object) -> str:
    return "characters" if typing.get_args(annotated)[0] is str else "items"


def _refused(
    where: str,
    table: typing.Mapping[str, tuple[object, ...]],
    shown: typing.Mapping[str, tuple[object, ...]],
) -> str:
    names = []
    for name, neutral in table.items():
        if name in shown:
            continue
        values = " or ".join(f"`{json.dumps(value)}`" for value in neutral)
        names.append(f"- `{name}`" + (f", unless {values}" if values else ""))
    return f"{where}:\n\n" + "\n".join(names) + "\n"


def metrics_page() -> str:
    """Every metric, as a scrape shows it."""
    metrics = Metrics(lambda: ServerState(EngineStatistics(), live_requests=0, ready=True))
    rows = ["| Name | Type | Labels | Meaning |", "| --- | --- | --- | --- |"]
    metrics.ended(
        outcome="finished",
        prompt_tokens=1,
        output_tokens=1,
        duration_s=1,
        first_token_s=1,
        queue_s=1,
    )
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return NOTE + METRICS + "\n".join(rows) + "\n" + OUTCOMES


def testing_page() -> str:
    """The public names of the test tools, with their signatures and docstrings."""
    parts = [NOTE + TESTING]
    for module, names in PUBLIC.items():
        parts.append(f"## `{module.__name__}`\n")
        for name in names:
            parts += _described(name, getattr(module, name))
    return "\n".join(parts)


def _described(name: str, thing: Callable[..., object]) -> Iterator[str]:
    yield f"### `{name}`\n"
    if not isinstance(thing, type):
        yield f"```python\n{_signature(name, thing)}\n```\n"
    yield _markdown(inspect.getdoc(thing) or "") + "\n"
    if not isinstance(thing, type):
        return
    fields = attrs.fields(thing) if attrs.has(thing) else ()
    # As written: who structures such a class has the annotations in its fields resolved.
    written = {
        name: annotation
        for base in reversed(thing.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
    }
    shown = [f for f in fields if f.init and not f.name.startswith("_")]
    lines = [f"- `{f.name}: {written[f.name]}{_default(f.default)}`" for f in shown]
    lines += [
        f"- `{name}: {inspect.signature(found.fget).return_annotation}`"
        for name, found in vars(thing).items()
        if isinstance(found, property) and found.fget and name[0] != "_"
    ]
    if lines:
        yield "\n".join(lines) + "\n"
    for method, found in vars(thing).items():
        function = inspect.unwrap(found) if callable(found) else found
        first, *_ = (inspect.getdoc(function) or "").split("\n\n")
        if inspect.isfunction(function) and method[0] != "_" and not first.startswith("See "):
            yield f"```python\n{_signature(method, found)}\n```\n\n{_markdown(first)}\n"


def _default(default: object) -> str:
    if isinstance(default, (int, float, str, type(None))):
        return f" = {default!r}"
    return ""


def _signature(name: str, thing: Callable[..., object]) -> str:
    text = (
        str(inspect.signature(thing))
        .replace("'", "")
        .replace(engine.DEFAULT_REPLY, "DEFAULT_REPLY")
    )
    text = text.replace("(self, ", "(").replace("(self)", "()")
    if inspect.isasyncgenfunction(inspect.unwrap(thing)):
        text = text.replace("-> AsyncIterator[", "-> AbstractAsyncContextManager[")
    elif inspect.isgeneratorfunction(inspect.unwrap(thing)):
        text = text.replace("-> Iterator[", "-> AbstractContextManager[")
    return f"{'async ' if inspect.iscoroutinefunction(thing) else ''}def {name}{text}"


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", text.replace("``", "`"))
    return re.sub(r"\n(Raises|Args|Returns):\n", r"\n\1:\n\n", text)


PAGES: dict[str, Callable[[], str]] = {
    "errors.md": errors_page,
    "request-fields.md": fields_page,
    "metrics.md": metrics_page,
    "testing.md": testing_page,
}

if __name__ == "__main__":
    for file_name, page in PAGES.items():
        (FOLDER / file_name).write_text(page(), encoding="utf-8")
