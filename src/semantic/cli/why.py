"""`semantic agents why`: how much of an agent's prompt the cache has, and why not more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from semantic.application.cache.agent_notes import (
    TokenReader,
    cache_miss_reason,
    end_reason,
    explain,
    first_difference,
)
from semantic.cli.agent_lookup import AgentName, AsText, ModelId, find_agent, open_store
from semantic.cli.conversation import next_prompt
from semantic.cli.options import AsJson, StoreOptions
from semantic.cli.report import Json, match_json, show_name, to_line
from semantic.cli.terminal import read_stdin, require_text
from semantic.composition.named_models import load_tokenizer
from semantic.domain.block_hash import Part
from semantic.domain.prefix import common_prefix
from semantic.domain.stored import Manifest
from semantic.ports.generation import Tokenizer
from semantic.ports.store import CacheStorePort


def why(
    store: StoreOptions,
    name: AgentName,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Compare this prompt instead of the last one; - reads it from stdin.",
            show_default=False,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="TEXT is the whole prompt, not the next turn of a chat.")
    ] = False,
    text: AsText = False,
    model_id: ModelId = None,
    as_json: AsJson = False,
) -> None:
    """Explain how much of an agent's last prompt the cache had, and why not more."""
    given = None if prompt is None else _prompt_text(prompt)
    with open_store(store) as disk:
        agent = find_agent(disk, name, model_id)
        tokenizer = load_tokenizer(agent.model) if text or given is not None else None
        match = None
        if tokenizer is not None and given is not None:
            match = match_prompt(disk, agent, _tokens(tokenizer, agent, given, raw=raw))
    read = _reader(tokenizer)
    if as_json:
        typer.echo(to_line(to_json(agent, match, read)))
        return
    if match is None:
        name = show_name(agent.agent_id)
        typer.echo(
            "\n".join(show_name(one, whole=True) for one in explain(name, agent.match, read))
        )
    else:
        typer.echo("\n".join(compare(agent, match, read)))


def compare(agent: Manifest, match: PromptMatch, read: TokenReader) -> Iterator[str]:
    """Yield lines of text that compare a prompt with the agent's last prompt."""
    name = show_name(agent.agent_id)
    yield (
        f"this prompt: {match.prompt_tokens} tokens; the first {match.common_tokens} are among the "
        f"{match.agent_tokens} of {name}"
    )
    if match.got is not None and match.expected is not None:
        yield first_difference(match.common_tokens, match.expected, match.got, read)
    if match.n_missing:
        yield (
            f"{match.n_missing} of the {len(match.present)} blocks that hold them are missing, the "
            f"first of them after {match.stored_tokens} tokens"
        )
    elif match.common_tokens:
        yield f"all {len(match.present)} blocks that hold them are there"
    yield f"at least {match.prompt_tokens - match.stored_tokens} tokens to compute"


def to_json(agent: Manifest, match: PromptMatch | None, read: TokenReader) -> Json:
    """Return a JSON document with the report on the last prompt. It also contains the match of the
    given prompt, or null."""
    last = match_json(agent.match)
    if last is not None and agent.match is not None:
        last |= {
            "expected_text": read(agent.match.expected),
            "got_text": read(agent.match.got),
            "reason": end_reason(agent.match),
        }
        if agent.match.lost is not None:
            last["lost"] = {**asdict(agent.match.lost), "reason": cache_miss_reason(agent.match)}
    prompt: Json | None = None
    if match is not None:
        prompt = {
            **asdict(match),
            "n_missing": match.n_missing,
            "expected_text": read(match.expected),
            "got_text": read(match.got),
        }
    return {"name": agent.agent_id, "match": last, "prompt": prompt}


def _reader(tokenizer: Tokenizer | None) -> TokenReader:
    def read(token: int | None) -> str | None:
        return None if tokenizer is None or token is None else tokenizer.decode([token])

    return read


def _prompt_text(prompt: str) -> str:
    # Remove the newline that the shell appends.
    return require_text(read_stdin().removesuffix("\n") if prompt == "-" else prompt)


def _tokens(tokenizer: Tokenizer, agent: Manifest, text: str, *, raw: bool) -> tuple[int, ...]:
    prompt = None if raw else next_prompt(tokenizer, agent, text)
    return tuple(tokenizer.encode(text)) if prompt is None else prompt


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """The part of a prompt that matches an agent's tokens, and the part of it in the store."""

    prompt_tokens: int
    agent_tokens: int
    common_tokens: int
    """The number of tokens at the start that the prompt and the agent have in common."""
    expected: int | None
    """The agent's next token, or None."""
    got: int | None
    """The prompt's next token, or None."""
    present: tuple[bool, ...]
    """For each block of the common tokens, True if the store has the block."""
    stored_tokens: int
    """The number of tokens before the first missing block."""

    @property
    def n_missing(self) -> int:
        """The number of blocks of the common tokens that the store lacks."""
        return len(self.present) - sum(self.present)


def match_prompt(store: CacheStorePort, manifest: Manifest, prompt: Sequence[int]) -> PromptMatch:
    """Compare `prompt` with the agent's tokens and with the blocks in the store."""
    tokens = manifest.token_ids
    common = common_prefix(tokens, prompt)
    # A block that matches only in part is useful up to the difference.
    chain = [link for link in manifest.scope.chain(tokens) if link.start < common]
    found = store.find([link.key(Part.FULL) for link in chain])
    present = tuple(link.key(Part.FULL) in found for link in chain)
    gap = present.index(False) if False in present else None
    return PromptMatch(
        prompt_tokens=len(prompt),
        agent_tokens=len(tokens),
        common_tokens=common,
        expected=tokens[common] if common < len(tokens) else None,
        got=prompt[common] if common < len(prompt) else None,
        present=present,
        stored_tokens=common if gap is None else chain[gap].start,
    )
