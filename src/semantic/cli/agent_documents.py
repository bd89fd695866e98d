"""An agent as a JSON document for those who read what a command prints."""

from __future__ import annotations

from semantic.application.agents.footprint import AgentFootprint
from semantic.application.agents.origin import asker_in, parent_of
from semantic.cli.agent_lookup import shown_id
from semantic.cli.report import Json, match_json


def agent_json(facts: AgentFootprint) -> Json:
    """An agent in one line of a list."""
    manifest = facts.manifest
    session, client = asker_in(manifest.note)
    return {
        "name": manifest.agent_id,
        "model": manifest.model,
        "model_id": shown_id(manifest, whole=True),
        "tokens": len(manifest.token_ids),
        "blocks": len(facts.chain),
        "stored_blocks": facts.stored_blocks,
        "bytes": facts.n_bytes,
        "shared_bytes": facts.shared_bytes,
        "pinned": manifest.pinned,
        "generation": manifest.generation,
        "parent": parent_of(manifest),
        "session": session,
        "client": client,
        "saved_at": manifest.saved_at,
    }


def detailed_json(facts: AgentFootprint) -> Json:
    """An agent with all that is known of it, its tokens left out."""
    manifest = facts.manifest
    return {
        **agent_json(facts),
        "prompt_tokens": manifest.prompt_tokens,
        "note": manifest.note,
        "match": match_json(manifest.match),
        "chain": [
            {
                "start": link.start,
                "stop": link.stop,
                "hash": link.hash.hex(),
                "parts": {part.value: n_bytes for part, n_bytes in facts.parts(link).items()},
            }
            for link in facts.chain
        ],
    }
