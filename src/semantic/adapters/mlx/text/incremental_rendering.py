"""What a template writes behind an answer, whatever was said before: found in a short stand-in.

In the stand-in only what comes after the answer is the conversation's own. Knows messages and
tokens; no template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from semantic.domain.chat import Chat, Message
from semantic.domain.errors import InvalidRequestError
from semantic.domain.prefix import common_prefix
from semantic.ports.chat import RenderedChat

Render = Callable[[Chat], RenderedChat]

_ASKED = Message("user", "x")
_SAID = "y"


class Continuation:
    """Continues conversations by one template, if that can be done with it.

    `render` renders a whole conversation; `ends` are the tokens that end an answer; `thinks` says
    whether the model marks thoughts.
    """

    def __init__(self, render: Render, ends: frozenset[int], *, thinks: bool) -> None:
        self._render = render
        self._ends = ends
        self.works = self._try()
        self.keeps_history = self._keeps(thinks=thinks)

    def after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """See `ChatFormat.render_after`."""
        return self._after(chat, n_messages) if self.works else None

    def _after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        said = chat.messages[n_messages - 1]
        calls = tuple(replace(call, arguments="{}") for call in said.tool_calls)
        stand_in = replace(said, content=_SAID, reasoning="", tool_calls=calls)
        # Templates look whether there are tools at all; how many, they say at the beginning.
        short = replace(chat, tools=chat.tools[:1])
        later = chat.messages[n_messages:]
        asked = self._render(replace(short, messages=(_ASKED,))).tokens
        whole = self._render(replace(short, messages=(_ASKED, stand_in, *later)))
        begin = common_prefix(asked, whole.tokens)
        for at in range(begin, len(whole.tokens)):
            if whole.tokens[at] in self._ends:
                return replace(whole, tokens=whole.tokens[at:])
        return None

    def _keeps(self, *, thinks: bool) -> bool:
        """Whether the template, left alone, writes history as it was: thoughts too, and as before
        when a later question follows."""
        asked = Message("user", "probe1")
        answer, other = (Message("assistant", "probe2", thought) for thought in ("no", "yes"))
        try:
            first, second, third = (
                self._render(Chat((asked, *(answer, asked) * n))).tokens for n in range(3)
            )
            shows = second != self._render(Chat((asked, other, asked))).tokens
        except InvalidRequestError:
            return False
        # A prompt ends with what opens an answer, and in history an answer may begin otherwise.
        opening = first[common_prefix(first, second) :]
        return second[common_prefix(second, third) :] == opening and (shows or not thinks)

    def _try(self) -> bool:
        """Whether what is found in a stand-in is what the template writes in a conversation, right
        behind the answer."""
        asked = Message("user", "probe1")
        last = []
        try:
            for text in ("probe2", "probe3"):
                answer = Message("assistant", text)
                chat = Chat((asked, answer, asked, answer, asked))
                whole = self._render(chat).tokens
                after = self._after(chat, 4)
                if after is None or whole[-len(after.tokens) :] != after.tokens:
                    return False
                last.append(whole[: -len(after.tokens)][-1:])
        except InvalidRequestError:
            return False
        return last[0] != last[1]
