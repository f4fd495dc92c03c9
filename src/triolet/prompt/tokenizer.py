"""What the server asks of a tokenizer, whichever library stands behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from triolet.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from triolet.core import Vocabulary


#: Arguments of what renders a template, not variables of one: ``chat_template`` would let a client
#: bring a program of its own. Those with a field of their own in a request are set only there.
RESERVED_VARIABLES: Final = frozenset({
    "self",
    "conversation",
    "conversations",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})


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

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``ids``.

        Raises:
            InvalidRequestError: An id is outside the vocabulary.
        """

    def token_text(self, token_id: int) -> str:
        """How the vocabulary writes a token: for people, not to be joined.

        Raises:
            InvalidRequestError: The id is outside the vocabulary.
        """

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text of a chat.

        Args:
            messages: Dicts with ``role`` and string ``content``, and whatever else the
                client sent in them.
            add_generation_prompt: End with the header of the assistant's turn.
            continue_final_message: Leave the last message open, so that the output goes on in
                it; excludes ``add_generation_prompt``.
            template_kwargs: Variables for the template, as the client sent them.

        Raises:
            InvalidRequestError: The template refused the messages; ``param`` is ``messages``.
                An argument cannot be met; ``param`` is its name, with ``chat_template_kwargs``
                for the last.
        """


def check_chat_arguments(
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, object],
) -> None:
    """Refuse arguments of :meth:`Tokenizer.render_chat` that no implementation takes.

    Raises:
        InvalidRequestError: See there.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "The last message cannot be continued and followed by a new turn: set"
            " add_generation_prompt to false.",
            param="continue_final_message",
        )
    reserved = sorted(RESERVED_VARIABLES & template_kwargs.keys())
    if reserved:
        raise InvalidRequestError(
            f"{reserved[0]} cannot be set through chat_template_kwargs.",
            param="chat_template_kwargs",
        )
