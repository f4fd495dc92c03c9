"""What the server asks of a tokenizer, whichever library stands behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triolet.core import Vocabulary


class Tokenizer(Protocol):
    """Turns text and chats into token ids, and tells the bytes of each id.

    Implementations are safe to call from any one thread at a time.
    """

    @property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each id."""

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` can work at all."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``. Special tokens written out in ``text`` become their ids."""

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt text of a chat, ready for the assistant's turn.

        Args:
            messages: Dicts with ``role`` and string ``content``, and whatever else the
                client sent in them.

        Raises:
            InvalidRequestError: The template refused the messages; ``param`` is ``messages``.
        """
