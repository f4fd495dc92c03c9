"""A tokenizer in which every byte is a token: exact for any text, and nothing to install.

The scripted engine speaks through it, so that tests and examples see what they wrote.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import attrs

from triolet.core import Vocabulary
from triolet.errors import InvalidRequestError
from triolet.prompt.tokenizer import check_chat_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: In the order of their ids, which follow the 256 bytes.
SPECIAL_TOKENS: Final = (
    "<|bos|>",
    "<|eos|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
)
BYTE_BOS_ID: Final = 256
BYTE_EOS_ID: Final = 257
BYTE_VOCAB_SIZE: Final = 256 + len(SPECIAL_TOKENS)

#: Roles without a marker of their own speak through the nearest one that has.
_MARKERS: Final = {
    "user": "<|user|>",
    "tool": "<|user|>",
    "function": "<|user|>",
    "assistant": "<|assistant|>",
    "system": "<|system|>",
    "developer": "<|system|>",
}
_IDS: Final = {token: 256 + index for index, token in enumerate(SPECIAL_TOKENS)}
_SPECIAL: Final = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")
_BYTES: Final = (
    *(bytes([byte]) for byte in range(256)),
    *(token.encode() for token in SPECIAL_TOKENS),
)
_VOCABULARY: Final = Vocabulary(_BYTES, frozenset(_IDS.values()))


@attrs.frozen
class ByteTokenizer:
    """Implements :class:`triolet.prompt.tokenizer.Tokenizer`. Stateless, safe from any thread."""

    @property
    def vocabulary(self) -> Vocabulary:
        """256 bytes, then the special tokens."""
        return _VOCABULARY

    @property
    def has_chat_template(self) -> bool:
        """Always: the rendering is fixed."""
        return True

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """UTF-8 bytes of ``text``, special tokens as their ids, after ``<|bos|>`` if asked.

        Raises:
            InvalidRequestError: ``text`` holds half of a surrogate pair.
        """
        ids = [BYTE_BOS_ID] if add_special_tokens else []
        for part in _SPECIAL.split(text):
            if part in _IDS:
                ids.append(_IDS[part])
                continue
            try:
                ids.extend(part.encode())
            except UnicodeEncodeError:
                raise InvalidRequestError(
                    "The text holds half of a surrogate pair, which is not Unicode text."
                ) from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``ids``; bytes that are no character become U+FFFD.

        Raises:
            InvalidRequestError: An id is outside the vocabulary.
        """
        for token_id in ids:
            self.token_text(token_id)
        shown = BYTE_BOS_ID if skip_special_tokens else BYTE_VOCAB_SIZE
        joined = b"".join(_BYTES[token_id] for token_id in ids if token_id < shown)
        return joined.decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        """A special token's text, or a byte: as a printable ASCII character, else as ``<0xNN>``.

        Raises:
            InvalidRequestError: The id is outside the vocabulary.
        """
        if not 0 <= token_id < BYTE_VOCAB_SIZE:
            raise InvalidRequestError(f"The token id {token_id} is outside the vocabulary.")
        if token_id >= BYTE_BOS_ID:
            return SPECIAL_TOKENS[token_id - BYTE_BOS_ID]
        character = chr(token_id)
        printable = character.isascii() and character.isprintable()
        return character if printable else f"<0x{token_id:02X}>"

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """``<|bos|>``, then marker, content and ``<|end|>`` per message, then ``<|assistant|>``.

        Args:
            messages: Roles and texts.
            add_generation_prompt: End with ``<|assistant|>``.
            continue_final_message: End with the last content, without its ``<|end|>``.
            template_kwargs: Ignored: nothing here can vary.

        Raises:
            InvalidRequestError: A role or content that cannot be rendered; ``param`` is
                ``messages``. An argument that cannot be met; ``param`` is its name.
        """
        check_chat_arguments(add_generation_prompt, continue_final_message, template_kwargs or {})
        parts = ["<|bos|>"]
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or role not in _MARKERS:
                raise InvalidRequestError(f"The role {role!r} is unknown.", param="messages")
            if content is None:
                content = ""
            if not isinstance(content, str):
                raise InvalidRequestError("The content must be text.", param="messages")
            parts += [_MARKERS[role], content, "<|end|>"]
        if continue_final_message:
            if not messages or messages[-1].get("content") is None:
                raise InvalidRequestError(
                    "The last message cannot be continued: it needs text as its content.",
                    param="continue_final_message",
                )
            parts.pop()
        if add_generation_prompt:
            parts.append("<|assistant|>")
        return "".join(parts)
