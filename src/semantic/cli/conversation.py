"""A conversation as the tokens that the model has seen.

Each prompt extends the one before, token by token, so that an agent's cache covers all that was
said. Knows the chat template through the tokenizer; neither engine nor screen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest
from semantic.ports.outbound import Tokenizer

Message = dict[str, str]

_MESSAGES = "messages"


class Conversation:
    """Messages, and the tokens they were prompted and answered with."""

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self.messages: list[Message] = []
        self._seen: tuple[int, ...] = ()
        self._prompt: tuple[int, ...] = ()
        self.reset()

    def reset(self) -> None:
        """Begin again with nothing but the system message."""
        self.messages = [] if self._system is None else [message("system", self._system)]
        self._seen = ()

    def ask(self, text: str) -> tuple[int, ...]:
        """The prompt for what the user says next; nothing is remembered before `answered`.

        Raises InvalidRequestError when the chat template refuses it.
        """
        rendered = self._tokenizer.render_chat([*self.messages, message("user", text)])
        self._prompt = self._on_top_of_seen(rendered)
        return self._prompt

    def answered(self, question: str, answer: str, tokens: Sequence[int]) -> None:
        """The model answered the last `ask` with `tokens`, which read `answer`."""
        self.messages += [message("user", question), message("assistant", answer)]
        self._seen = (*self._prompt, *tokens)

    def note(self, question: str) -> str:
        """What to keep with the prompt of `question`, for `resume` to begin with."""
        return json.dumps({_MESSAGES: [*self.messages, message("user", question)]})

    def resume(self, manifest: Manifest) -> bool:
        """Go on where an agent stopped; False, and nothing changes, when its note is no `note`.

        The note holds the messages up to the last question; the answer is what the tokens after
        its prompt say. Raises InvalidRequestError when it has another system message than this
        conversation, which was given one.
        """
        messages = _read_note(manifest.note)
        if messages is None:
            return False
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        if self._system not in (None, system):
            raise InvalidRequestError("it began with another system message; --new begins afresh")
        self._system = system
        answer = [
            token
            for token in manifest.token_ids[manifest.prompt_tokens :]
            if token not in self._tokenizer.eos_token_ids
        ]
        self.messages = [*messages, message("assistant", self._tokenizer.decode(answer))]
        self._seen = manifest.token_ids
        return True

    def _on_top_of_seen(self, rendered: Sequence[int]) -> tuple[int, ...]:
        """The rendered conversation, in the tokens already seen as far as its text is the same.

        A model may write a text in other tokens than the tokenizer would, and the cache holds
        the model's. When the template writes past turns differently (it may leave out what a
        model thought), it wins and the cache is used up to the first difference.
        """
        text = self._tokenizer.decode(rendered)
        seen = self._tokenizer.decode(self._seen)
        # A text that does not give its tokens back hides some (a BOS): it proves nothing.
        if not text.startswith(seen) or self._encode(text) != list(rendered):
            return tuple(rendered)
        extended = (*self._seen, *self._encode(text[len(seen) :]))
        return extended if self._tokenizer.decode(extended) == text else tuple(rendered)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def message(role: str, content: str) -> Message:
    """One message, as chat templates take it."""
    return {"role": role, "content": content}


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether the model's tokenizer can render a conversation."""
    try:
        tokenizer.render_chat([message("user", "Hello")])
    except InvalidRequestError:
        return False
    return True


def _read_note(note: str) -> list[Message] | None:
    """The messages of `Conversation.note`, the last one a question; None for any other text."""
    try:
        fields = json.loads(note)
    except (ValueError, RecursionError):
        return None
    messages = fields.get(_MESSAGES) if isinstance(fields, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return None
    return messages if messages and messages[-1]["role"] == "user" else None


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )
