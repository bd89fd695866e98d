"""Preparation: renders, encodes and validates a request before it is submitted.

For worker threads: templates, tokenizers and grammars are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal

from semantic.application.chat.grammar_checks import GrammarChecks
from semantic.application.chat.replay import Replay, Replayed
from semantic.domain.chat import Attachment, Chat, in_call_order
from semantic.domain.errors import ContextOverflowError, InvalidRequestError, UncheckedGrammarError
from semantic.domain.fair_share import FairLru
from semantic.domain.grammar import Grammar
from semantic.domain.request_parts import Parts, parts_of
from semantic.domain.value_objects import SamplingParams, ThinkingBudget, Thoughts
from semantic.ports.chat import ChatFormat, Marks, RenderedChat
from semantic.ports.generation import Tokenizer
from semantic.ports.serving import Ask, Prompt


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for submission. `chat`, `replayed` and `parts` are None for a plain prompt.
    The prompt ends inside reasoning if `opens_thought`, and after reasoning if `closes_thought`."""

    tokens: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    chat: Chat | None
    opens_thought: bool
    replayed: Replayed | None = None
    parts: Parts | None = None
    closes_thought: bool = False


_ALWAYS_TOKENIZED = 1 << 18
"""The maximum length in characters of a prompt that is always tokenized, in up to 0.3 s."""
_SAMPLED = 8
"""The number of characters to sample from a longer prompt, per token of the context. Usual text has
2 or 3 per token."""
_DENSE = 2
"""The maximum number of tokens in the sample, as a multiple of the context."""


_MOST_MESSAGES = 1 << 15
_MOST_TOOLS = 1 << 12


ImageInput = Literal["note", "reject-once", "reject"]
_MOST_REFUSED = 1 << 14


class Attachments:
    """Refuses attachments that the model cannot read. The policy "reject-once" refuses each
    attachment once, since clients repeat messages. Thread-safe."""

    def __init__(self, policy: ImageInput) -> None:
        self._policy = policy
        self._refused: FairLru[bytes, bool] = FairLru(_MOST_REFUSED)
        self._lock = Lock()

    def check(self, fresh: Sequence[Attachment], tenant: str) -> None:
        """Raise InvalidRequestError if the policy refuses an attachment in `fresh`."""
        if not fresh or self._policy == "note":
            return
        with self._lock:
            unseen = [one for one in fresh if not self._refused.peek(tenant, one.digest)]
            for one in unseen:
                self._refused.put(tenant, one.digest, value=True)
        refused = fresh if self._policy == "reject" else unseen
        if not refused:
            return
        hint = "" if self._policy == "reject" else "; if sent again, it is left out"
        raise InvalidRequestError(
            f"cannot read {refused[0].what}: this model reads text only; describe it in words{hint}"
        )


class Preparation:
    """Prepares requests for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        replay: Replay,
        check_grammar: Callable[[Grammar], None],
        context_tokens: int,
        default_max_tokens: int | None = None,
        *,
        longest_token: int,
        checks: GrammarChecks | None = None,
        image_input: ImageInput = "reject-once",
    ) -> None:
        """`checks` tries unknown grammars in another process, and `check_grammar` in this process.
        `longest_token` is the length of the model's longest token in characters."""
        self._tokenizer = tokenizer
        self._format = chat_format
        self._replay = replay
        self._check_grammar = check_grammar
        self._context_tokens = context_tokens
        self._default_max_tokens = default_max_tokens
        self._longest_token = longest_token
        self._checks = checks
        self._attachments = Attachments(image_input)

    def prepare(self, ask: Ask) -> Prepared:
        """Return the request, ready for submission. Raises InvalidRequestError,
        ContextOverflowError, or UncheckedGrammarError if a grammar needs `check` first."""
        prompt = _ordered(ask.prompt)
        if isinstance(prompt, Chat):
            self._attachments.check(prompt.fresh, ask.tenant)
        rendered, replayed = self._rendered(prompt, ask.tenant, keep=ask.keep)
        if not rendered.tokens:
            raise InvalidRequestError("prompt must not be empty")
        chat = prompt if isinstance(prompt, Chat) else None
        sampling, closes = ask.sampling, False
        if chat is not None:
            closes = rendered.opens_thought and ask.thinking_tokens == 0
            if closes:
                rendered = RenderedChat((*rendered.tokens, *self._format.thought_end_tokens))
            grammar = self._format.call_grammar(
                chat, opens_thought=rendered.opens_thought, tenant=ask.tenant
            )
            sampling = sampling if grammar is None else replace(sampling, grammar=grammar)
            budget = self._budget(chat, ask.thinking_tokens, opened=rendered.opens_thought)
            if budget is not None and sampling.grammar is not None:
                budget = replace(budget, only_first=True)
            thoughts = self._thoughts(sampling.stop, opened=rendered.opens_thought and not closes)
            sampling = replace(sampling, thinking=budget, thoughts=thoughts)
        if sampling.grammar is not None:
            own = replace(sampling.grammar, tenant=ask.tenant)
            self._check_grammar(own)
            sampling = replace(sampling, grammar=own)
        n_prompt = len(rendered.tokens)
        max_tokens = self._max_tokens(
            n_prompt, ask.max_tokens, ask.context_tokens, is_chat=chat is not None
        )
        opens = rendered.opens_thought
        parts = _parts(chat, replayed)
        replayed = replayed if ask.keep else None
        return Prepared(rendered.tokens, max_tokens, sampling, chat, opens, replayed, parts, closes)

    async def check(self, unchecked: UncheckedGrammarError, tenant: str) -> None:
        """See `GrammarChecks.check`."""
        if self._checks is None:
            raise unchecked
        await self._checks.check(unchecked, tenant)

    def close(self) -> None:
        if self._checks is not None:
            self._checks.close()

    def tokens(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt, even if they exceed the context. Raises
        InvalidRequestError, and ContextOverflowError for a text too long to tokenize."""
        rendered, _ = self._rendered(
            _ordered(prompt), tenant, keep=False, add_special_tokens=add_special_tokens
        )
        return rendered.tokens

    def _budget(self, chat: Chat, tokens: int | None, *, opened: bool) -> ThinkingBudget | None:
        marks, end_tokens = self._format.thought_marks, self._format.thought_end_tokens
        if tokens is None or marks is None or not end_tokens:
            return None
        calls = self._format.call_marks if chat.may_call else Marks("", "")
        return ThinkingBudget(
            tokens, marks.start, marks.end, end_tokens, opened, calls.start, calls.end
        )

    def _thoughts(self, stop: Sequence[str], *, opened: bool) -> Thoughts | None:
        """Return the marks between which stop strings have no effect."""
        marks, headers = self._format.thought_marks, self._format.headers
        if headers is not None:
            return Thoughts(headers.starts[0], headers.answer, opened=True) if stop else None
        return Thoughts(marks.start, marks.end, opened) if stop and marks is not None else None

    def _rendered(
        self, prompt: Prompt, tenant: str, *, keep: bool, add_special_tokens: bool = True
    ) -> tuple[RenderedChat, Replayed | None]:
        if length_of(prompt) > _ALWAYS_TOKENIZED:
            self._require_plausible_length(prompt)
        if isinstance(prompt, Chat):
            replayed = self._replay.render(prompt, tenant, keep=keep)
            return replayed.rendered, replayed
        if isinstance(prompt, str):
            encoded = self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return RenderedChat(tuple(encoded)), None
        return RenderedChat(prompt), None

    def _require_plausible_length(self, prompt: Prompt) -> None:
        """Raise ContextOverflowError for a text that cannot fit the context."""
        length, is_chat = length_of(prompt), isinstance(prompt, Chat)
        self._max_tokens(length // self._longest_token, None, None, is_chat=is_chat)
        n_sampled = _SAMPLED * self._context_tokens
        if length > n_sampled:
            n_tokens = len(self._tokenizer.encode(_beginning(prompt, n_sampled)))
            if n_tokens > _DENSE * self._context_tokens:
                self._max_tokens(n_tokens, None, None, is_chat=is_chat)

    def _max_tokens(
        self, n_prompt: int, wanted: int | None, context: int | None, *, is_chat: bool
    ) -> int:
        limit = min(self._context_tokens, context or self._context_tokens)
        room = limit - n_prompt
        if room < 1:
            whose = "this model's" if limit == self._context_tokens else "the request's"
            raise ContextOverflowError(
                f"{whose} context is {limit} tokens; the prompt has "
                f"{n_prompt}, and an answer needs at least one more",
                prompt_tokens=n_prompt,
                limit=limit,
                is_chat=is_chat,
            )
        limits = (room, self._default_max_tokens if wanted is None else wanted)
        return min(limit for limit in limits if limit is not None)


def _ordered(prompt: Prompt) -> Prompt:
    if not isinstance(prompt, Chat):
        return prompt
    _require_renderable(prompt)
    return replace(prompt, messages=in_call_order(prompt.messages))


def _require_renderable(chat: Chat) -> None:
    """Raise InvalidRequestError if messages or tools would take over two seconds to render."""
    for name, n, most in (
        ("messages", len(chat.messages), _MOST_MESSAGES),
        ("tools", len(chat.tools), _MOST_TOOLS),
    ):
        if n > most:
            raise InvalidRequestError(f"{name}: expected at most {most}, got {n}")


def _parts(chat: Chat | None, replayed: Replayed | None) -> Parts | None:
    if chat is None or replayed is None:
        return None
    return parts_of(chat, replayed.n_replayed, replayed.answers, replayed.tool_texts)


def _beginning(prompt: Prompt, n: int) -> str:
    if not isinstance(prompt, Chat):
        return prompt[:n] if isinstance(prompt, str) else ""
    found, room = list[str](), n
    for message in prompt.messages:
        for text in (message.content, *(call.arguments for call in message.tool_calls)):
            found.append(text[:room])
            room -= len(found[-1])
    return "".join(found)


def length_of(prompt: Prompt) -> int:
    """Return the number of characters in a prompt; 0 for token ids."""
    if isinstance(prompt, tuple):
        return 0
    return prompt.length if isinstance(prompt, Chat) else len(prompt)
