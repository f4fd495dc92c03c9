"""Tokenizers of the Hugging Face family: a folder, a hub id, or a GGUF file's metadata.

Ids come from the ``tokenizers`` library's own object, built from ``tokenizer.json`` as it is.
transformers' class for a model is not asked where that file exists: for some models it swaps
the pre-tokenizer or changes which tokens are special, and gives other ids. transformers only
renders the chat template, in its sandbox. Nothing here imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import jinja2
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from triolet.core import Vocabulary
from triolet.errors import InvalidRequestError, ModelLoadError
from triolet.prompt.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens
from triolet.prompt.tokenizer import check_chat_arguments
from triolet.prompt.vocabulary import build_vocabulary, library_errors_as

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: All that a tokenizer may need of a repository, and nothing that can carry code.
TOKENIZER_FILES: Final = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
_SPECIAL_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
#: The library reads ids as unsigned 32-bit integers, and raises on others.
MAX_ID: Final = 2**32


@attrs.define(eq=False)
class HuggingFaceTokenizer:
    """Implements :class:`triolet.prompt.tokenizer.Tokenizer` on the ``tokenizers`` library."""

    vocabulary: Vocabulary
    _tokenizer: Tokenizer
    #: Holds the template and the names of the special tokens, but no vocabulary.
    _renderer: PreTrainedTokenizerFast

    @classmethod
    def build(
        cls,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        vocab_size: int | None = None,
    ) -> HuggingFaceTokenizer:
        """Wrap a tokenizer.

        Args:
            tokenizer: Taken over: padding and truncation are switched off in it.
            chat_template: Jinja text; ``None`` where the model has no chat.
            special_tokens: ``bos_token`` and the like, for the template to name.
            vocab_size: The width of the model's logits; see :func:`build_vocabulary`.
        """
        # Files of encoder models ask for both, and either would change a prompt unseen.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        renderer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # theirs has no types
            tokenizer_object=Tokenizer(models.BPE()),
            chat_template=chat_template,
            **special_tokens,
        )
        return cls(build_vocabulary(tokenizer, vocab_size), tokenizer, renderer)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model came with a template for chats."""
        return self._renderer.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. Special tokens written out in ``text`` become their ids.

        Raises:
            InvalidRequestError: ``text`` holds half of a surrogate pair, names a token that
                the model has no embedding for, or breaks the tokenizer.
        """
        _check_unicode(text, param=None)
        with library_errors_as(
            InvalidRequestError("The tokenizer of this model fails on this text.")
        ):
            # The call for one text keeps the GIL to its end, the call for many gives it away.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids = encoding.ids
        if ids and max(ids) >= len(self.vocabulary):
            raise InvalidRequestError("The text holds a special token that this model lacks.")
        return list(ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``ids``, as the library decodes them.

        Raises:
            InvalidRequestError: An id is outside the vocabulary, or the ids break the tokenizer.
        """
        for token_id in ids:
            self.token_text(token_id)
        with library_errors_as(
            InvalidRequestError("The tokenizer of this model fails on these ids.")
        ):
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """How the vocabulary writes a token: for people, not to be joined.

        Raises:
            InvalidRequestError: The id is outside the vocabulary.
        """
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < MAX_ID else None
        if token is None or token_id >= len(self.vocabulary):
            raise InvalidRequestError(f"The token id {token_id} is outside the vocabulary.")
        return str(token)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a chat.

        The text already holds the special tokens it needs: encode it without adding any. The
        template comes with the model and is trusted to end: its sandbox has no limit of time.

        Args:
            messages: See :meth:`triolet.prompt.tokenizer.Tokenizer.render_chat`.
            add_generation_prompt: End with the header of the assistant's turn.
            continue_final_message: Leave the last message open; excludes the former.
            template_kwargs: Variables for the template.

        Raises:
            InvalidRequestError: There is no template, or it refused the messages; ``param`` is
                ``messages``. An argument cannot be met; ``param`` is its name, with
                ``chat_template_kwargs`` for the last.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        variables: dict[str, Any] = dict(template_kwargs or {})
        check_chat_arguments(add_generation_prompt, continue_final_message, variables)
        try:
            text = self._renderer.apply_chat_template(
                # Annotated too narrowly upstream: templates take any JSON in a message.
                [dict(message) for message in messages],  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except jinja2.TemplateError as error:
            # Templates refuse on purpose through raise_exception, with a sentence for the user.
            raise InvalidRequestError(
                f"The chat template of this model refused the messages: {error.message}",
                param="messages",
            ) from error
        except Exception as error:  # a template is a program of the model's author
            if continue_final_message and isinstance(error, ValueError):
                raise InvalidRequestError(
                    "The last message cannot be continued: it needs text as its content, and the"
                    " chat template of this model has to show it unchanged.",
                    param="continue_final_message",
                ) from error
            raise InvalidRequestError(
                "The chat template of this model cannot render these messages.", param="messages"
            ) from error
        rendered = str(text)
        _check_unicode(rendered, param="messages")
        return rendered


def load_tokenizer(
    source: str,
    *,
    revision: str | None = None,
    gguf_metadata: Mapping[str, object] | None = None,
    vocab_size: int | None = None,
) -> HuggingFaceTokenizer:
    """Load the tokenizer of a model.

    Args:
        source: A folder, a GGUF file, or a hub id.
        revision: Branch, tag or commit of a hub id.
        gguf_metadata: Required for a GGUF file: what :func:`triolet.engine.gguf.open_gguf` read
            of it. A ``tokenizer.json`` beside the file is used instead of the file's own.
        vocab_size: The width of the model's logits; see :func:`build_vocabulary`.

    Raises:
        ModelLoadError: Files are missing or broken, or the hub cannot be reached.
        UnsupportedModelError: The tokenizer is of a kind that would give wrong ids or text.
    """
    if gguf_metadata is not None:
        beside = Path(source).with_name("tokenizer.json")
        template = gguf_metadata.get("tokenizer.chat_template")
        return HuggingFaceTokenizer.build(
            _read_tokenizer(beside) if beside.is_file() else build_gguf_tokenizer(gguf_metadata),
            chat_template=template if isinstance(template, str) else None,
            special_tokens=gguf_special_tokens(gguf_metadata),
            vocab_size=vocab_size,
        )
    folder = Path(source)
    if not folder.is_dir():
        folder = _download(source, revision)
    if not (folder / "tokenizer.json").is_file():
        return _convert(folder, vocab_size)
    config = _read_config(folder / "tokenizer_config.json")
    return HuggingFaceTokenizer.build(
        _read_tokenizer(folder / "tokenizer.json"),
        chat_template=_chat_template(folder, config),
        special_tokens=_special_tokens(config),
        vocab_size=vocab_size,
    )


def _download(source: str, revision: str | None) -> Path:
    try:
        path = snapshot_download(source, revision=revision, allow_patterns=list(TOKENIZER_FILES))
    except (OSError, HFValidationError) as error:
        raise ModelLoadError(
            f"The tokenizer of {source!r} is neither a folder here nor on a hub that can be"
            " reached; check the name and the network, or give a local folder."
        ) from error
    return Path(path)


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"The tokenizer.json of this model is damaged: {error}.") from error


def _read_config(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"The {path.name} of this model is not JSON.") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"The {path.name} of this model is not a JSON object.")
    return config


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name; "default" is the one for plain chats
        named = {str(entry.get("name")): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Named special tokens, which files write as text or as an object around it."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _convert(folder: Path, vocab_size: int | None) -> HuggingFaceTokenizer:
    """Let transformers build the tokenizer from older files, where there is no tokenizer.json."""
    try:
        # Reached through the package on use, not imported above: it would bring torch in.
        loaded = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelLoadError(
            "This model has no tokenizer.json, and its older files cannot be converted."
        ) from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ModelLoadError("This model has no tokenizer.json; save its tokenizer in that form.")
    template = loaded.chat_template
    return HuggingFaceTokenizer.build(
        loaded.backend_tokenizer,
        chat_template=template if isinstance(template, str) else None,
        special_tokens={name: str(value) for name, value in loaded.special_tokens_map.items()},
        vocab_size=vocab_size,
    )


def _check_unicode(text: str, *, param: str | None) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "The text holds half of a surrogate pair, which is not Unicode text.", param=param
        ) from None
