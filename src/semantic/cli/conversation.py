"""A conversation as the tokens of its prompts and answers.

Each prompt extends the tokens before it, so that an agent's cached prefix covers every past turn.
Knows the chat template through the tokenizer; no engine and no output.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.application.chat.transcript import message_of, messages_in, transcript_of
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest
from semantic.ports.generation import Tokenizer

Message = dict[str, str]


class Conversation:
    """Messages, and the tokens of their prompts and answers."""

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._system = system
        self.messages: list[Message] = []
        self._past: tuple[int, ...] = ()
        self._prompt: tuple[int, ...] = ()
        self.reset()

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.messages = [] if self._system is None else [message("system", self._system)]
        self._past = ()

    def next_prompt(self, text: str) -> tuple[int, ...]:
        """The prompt for the user's message `text`; the conversation changes in `add_turn` only.

        Raises InvalidRequestError when the chat template refuses it.
        """
        rendered = self._tokenizer.render_chat([*self.messages, message("user", text)])
        self._prompt = self._extend_past(rendered)
        return self._prompt

    def add_turn(self, question: str, answer: str, tokens: Sequence[int]) -> None:
        """Append the last `next_prompt` and its answer: `tokens`, with the text `answer`."""
        self.messages += [message("user", question), message("assistant", answer)]
        self._past = (*self._prompt, *tokens)

    def note(self, question: str) -> str:
        """The text to store with the prompt of `question`; `resume` reads it."""
        return transcript_of(
            [message_of(one) for one in (*self.messages, message("user", question))]
        )

    def resume(self, manifest: Manifest) -> bool:
        """Continue an agent's conversation; False, without a change, when it has no `note`.

        The note holds the messages up to the last question; its answer is decoded from the tokens
        after the prompt. Raises InvalidRequestError when this conversation was given another
        system message.
        """
        saved = messages_in(manifest.note)
        if saved is None:
            return False
        messages = [message(one.role, one.content) for one in saved]
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
        self._past = manifest.token_ids
        return True

    def _extend_past(self, rendered: Sequence[int]) -> tuple[int, ...]:
        """The rendered conversation, with the tokens of past turns where the text is the same.

        A model may generate other tokens for a text than the tokenizer does, and the cache holds
        the model's. Where the template renders past turns differently (without thinking, for
        instance), the rendered tokens are used, and the cache up to the first difference.
        """
        text = self._tokenizer.decode(rendered)
        past = self._tokenizer.decode(self._past)
        # Without a round trip the text hides tokens (a BOS, for instance): it cannot be compared.
        if not text.startswith(past) or self._encode(text) != list(rendered):
            return tuple(rendered)
        extended = (*self._past, *self._encode(text[len(past) :]))
        return extended if self._tokenizer.decode(extended) == text else tuple(rendered)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def message(role: str, content: str) -> Message:
    """One message in the form of chat templates."""
    return {"role": role, "content": content}


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer can render a conversation."""
    try:
        tokenizer.render_chat([message("user", "Hello")])
    except InvalidRequestError:
        return False
    return True
