"""Makes the prompt that continues an agent's conversation."""

from __future__ import annotations

from collections.abc import Sequence

from semantic.application.chat.transcript import messages_in
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest
from semantic.ports.generation import Tokenizer

Message = dict[str, str]


def next_prompt(tokenizer: Tokenizer, agent: Manifest, text: str) -> tuple[int, ...] | None:
    """Return the prompt for the user's message `text`, or None for an agent without a conversation.
    Raises InvalidRequestError if the chat template refuses the messages."""
    saved = messages_in(agent.note)
    if saved is None:
        return None
    answer = agent.token_ids[agent.prompt_tokens :]
    said = tokenizer.decode([token for token in answer if token not in tokenizer.eos_token_ids])
    messages = [message(one.role, one.content) for one in saved]
    messages += [message("assistant", said), message("user", text)]
    return _extended(tokenizer, agent.token_ids, tokenizer.render_chat(messages))


def _extended(
    tokenizer: Tokenizer, past: Sequence[int], rendered: Sequence[int]
) -> tuple[int, ...]:
    """Return `rendered`, with the agent's own tokens for the earlier turns if their text is the
    same. The tokenizer may split a text in another way than the model."""
    text, before = tokenizer.decode(rendered), tokenizer.decode(past)
    # If decoding and encoding again changes the tokens, the text hides some (such as a BOS), so
    # texts cannot be compared.
    hides = tokenizer.encode(text, add_special_tokens=False) != list(rendered)
    if hides or not text.startswith(before):
        return tuple(rendered)
    more = tokenizer.encode(text[len(before) :], add_special_tokens=False)
    extended = (*past, *more)
    return extended if tokenizer.decode(extended) == text else tuple(rendered)


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def has_chat_template(tokenizer: Tokenizer) -> bool:
    """Return True if the tokenizer can render a conversation."""
    try:
        tokenizer.render_chat([message("user", "Hello")])
    except InvalidRequestError:
        return False
    return True
