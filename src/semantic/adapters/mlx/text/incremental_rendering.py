"""Incremental rendering: what a chat template writes after an answer, without rendering history.

Renders a short substitute for the history with the same later messages and takes the tokens after
the answer's end. Knows messages and tokens; no template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from semantic.domain.chat import Chat, Message
from semantic.domain.errors import InvalidRequestError
from semantic.domain.prefix import common_prefix
from semantic.ports.chat import RenderedChat

Render = Callable[[Chat], RenderedChat]

_QUESTION = Message("user", "x")
_ANSWER_TEXT = "y"


class IncrementalRenderer:
    """Continues chats by one template. Tries at construction whether the template allows it.

    `is_supported`: the tokens after an answer do not depend on the history. `preserves_history`:
    a full rendering shows earlier answers, thoughts included, as they were generated.
    """

    def __init__(self, render: Render, eos: frozenset[int], *, thinks: bool) -> None:
        """`render` renders a whole chat, `eos` tokens end an answer, `thinks` is whether the model
        marks thoughts."""
        self._render = render
        self._eos = eos
        self.is_supported = self._is_supported()
        self.preserves_history = self._preserves_history(thinks=thinks)

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """See `ChatFormat.render_after`."""
        return self._render_after(chat, n_messages) if self.is_supported else None

    def _render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        answer = chat.messages[n_messages - 1]
        calls = tuple(replace(call, arguments="{}") for call in answer.tool_calls)
        substitute = replace(answer, content=_ANSWER_TEXT, reasoning="", tool_calls=calls)
        # After the beginning, templates only test whether there are tools: one is as good as all.
        short = replace(chat, tools=chat.tools[:1])
        later = chat.messages[n_messages:]
        question = self._render(replace(short, messages=(_QUESTION,))).tokens
        whole = self._render(replace(short, messages=(_QUESTION, substitute, *later)))
        begin = common_prefix(question, whole.tokens)
        for at in range(begin, len(whole.tokens)):
            if whole.tokens[at] in self._eos:
                return replace(whole, tokens=whole.tokens[at:])
        return None

    def _is_supported(self) -> bool:
        """Whether a substitute's tokens are those of a full rendering, right after the answer."""
        question = Message("user", "probe1")
        last = []
        try:
            for text in ("probe2", "probe3"):
                answer = Message("assistant", text)
                chat = Chat((question, answer, question, answer, question))
                whole = self._render(chat).tokens
                after = self._render_after(chat, 4)
                if after is None or whole[-len(after.tokens) :] != after.tokens:
                    return False
                last.append(whole[: -len(after.tokens)][-1:])
        except InvalidRequestError:
            return False
        return last[0] != last[1]

    def _preserves_history(self, *, thinks: bool) -> bool:
        """Whether an answer is rendered as generated, also when a later question follows."""
        question = Message("user", "probe1")
        answer, other = (Message("assistant", "probe2", thought) for thought in ("no", "yes"))
        try:
            first, second, third = (
                self._render(Chat((question, *(answer, question) * n))).tokens for n in range(3)
            )
            shows = second != self._render(Chat((question, other, question))).tokens
        except InvalidRequestError:
            return False
        # The generation prompt ends `first`; in history an answer may begin otherwise.
        generation_prompt = first[common_prefix(first, second) :]
        return second[common_prefix(second, third) :] == generation_prompt and (shows or not thinks)
