"""A manifest's file: any agent comes back, and nothing but what was written is believed."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.stores.disk.entries import DamagedError, NewerFormatError
from semantic.adapters.stores.disk.manifest_file import (
    FiledManifest,
    decode_manifest,
    encode_manifest,
)
from semantic.domain.block_hash import Scope
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic.domain.stored import Manifest, TurnEnd

any_text = st.text(st.characters(codec=None, exclude_categories=()), max_size=40)
wholes = st.integers(0, 2**60)
parts = st.builds(
    Difference,
    st.sampled_from(list(PartKind)),
    st.sampled_from(list(Change)),
    st.none() | wholes,
    st.none() | any_text,
)
losses = st.builds(CacheMiss, wholes, st.floats(allow_nan=False), st.none() | parts)
matches = st.builds(
    MatchReport,
    wholes,
    wholes,
    st.sampled_from(list(MatchEnd)),
    any_text,
    st.none() | wholes,
    st.none() | wholes,
    st.none() | wholes,
    st.floats(allow_nan=False),
    st.none() | losses,
)
digests = st.binary(min_size=32, max_size=32)
scopes = st.builds(Scope, digests, digests, st.just(b"") | digests)
manifests = st.builds(
    Manifest,
    scope=scopes,
    agent_id=any_text,
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=30).map(tuple),
    generation=wholes,
    pinned=st.booleans(),
    parent=st.none() | any_text,
    prompt_tokens=wholes,
    note=any_text,
    model=any_text,
    saved_at=st.floats(allow_nan=False),
    match=st.none() | matches,
    earlier=st.just(()),
)
FILED = FiledManifest(
    Manifest(Scope(b"n" * 32, b"t" * 32), "agent", (1, 2, 3), generation=7, note="hello"), 5
)
DATA = encode_manifest(FILED)


@given(manifest=manifests, order=wholes)
def test_a_manifest_comes_back(manifest: Manifest, order: int) -> None:
    filed = FiledManifest(manifest, order)
    found = decode_manifest(encode_manifest(filed), filed.key, manifest.generation)
    assert found == filed
    assert found.manifest.scope.root == manifest.scope.root


def test_a_file_from_before_losses_were_told_is_read() -> None:
    match = MatchReport(5, 3, MatchEnd.DIVERGED, "pool", 3, 1, 2, 0.5, CacheMiss(1, 0.5))
    filed = FiledManifest(replace(FILED.manifest, match=match), 5)
    data = encode_manifest(filed)
    fields = json.loads(data[48:-12])
    del fields["match"]["lost"], fields["match"]["any_chip"], fields["salt"], fields["earlier"]
    text = json.dumps(fields).encode()
    rest = struct.pack("<QQ", len(text), 3) + text + data[-12:]
    older = struct.pack("<8sII16s", b"SEMAGENT", 1, 0, xxhash.xxh3_128_digest(rest)) + rest
    found = decode_manifest(older, filed.key, 7).manifest.match
    assert found == replace(match, lost=None)


def test_two_lone_surrogates_side_by_side_stay_two() -> None:
    filed = FiledManifest(replace(FILED.manifest, agent_id="\ud83d\ude00", note="\ud83d\ude00"), 1)
    found = decode_manifest(encode_manifest(filed), filed.key, 7)
    assert (found.manifest.agent_id, len(found.manifest.note)) == ("\ud83d\ude00", 2)


@pytest.mark.parametrize("order", [-1, 2**62 + 1, 2**63 - 1, 2**63, 10**400])
def test_a_counter_that_the_index_cannot_hold_is_refused(order: int) -> None:
    filed = FiledManifest(FILED.manifest, order)
    with pytest.raises(DamagedError, match="manifest fields"):
        decode_manifest(encode_manifest(filed), filed.key, 7)


def test_every_flipped_bit_is_found() -> None:
    for at in range(8 * len(DATA)):
        flipped = bytearray(DATA)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises((DamagedError, NewerFormatError)):
            decode_manifest(bytes(flipped), FILED.key, 7)


def test_every_other_length_is_found() -> None:
    for length in range(len(DATA)):
        with pytest.raises(DamagedError):
            decode_manifest(DATA[:length], FILED.key, 7)
    with pytest.raises(DamagedError):
        decode_manifest(DATA + b"\0", FILED.key, 7)


def test_another_agents_or_generations_file_is_refused() -> None:
    with pytest.raises(DamagedError, match="identity"):
        decode_manifest(DATA, b"k" * 32, 7)
    with pytest.raises(DamagedError, match="identity"):
        decode_manifest(DATA, FILED.key, 8)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"agent_id": 1}).encode(),
        json.dumps({"namespace": "xyz", "tenant": "", "agent_id": "a"}).encode(),
    ],
)
def test_a_sound_frame_around_nonsense_is_refused(text: bytes) -> None:
    rest = struct.pack("<QQ", len(text), 0) + text
    data = struct.pack("<8sII16s", b"SEMAGENT", 1, 0, xxhash.xxh3_128_digest(rest)) + rest
    with pytest.raises(DamagedError, match="manifest fields"):
        decode_manifest(data, FILED.key, 7)


@given(field=st.sampled_from(sorted(json.loads(DATA[48:-12]))), value=st.none() | st.just([]))
def test_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    fields = json.loads(DATA[48:-12])
    if (field in ("parent", "match") and value is None) or (field == "earlier" and value == []):
        return
    fields[field] = value
    text = json.dumps(fields).encode()
    rest = struct.pack("<QQ", len(text), 3) + text + DATA[-12:]
    data = struct.pack("<8sII16s", b"SEMAGENT", 1, 0, xxhash.xxh3_128_digest(rest)) + rest
    with pytest.raises(DamagedError):
        decode_manifest(data, FILED.key, 7)


def test_earlier_turns_come_back() -> None:
    filed = replace(FILED, manifest=replace(FILED.manifest, earlier=(TurnEnd(0, 1), TurnEnd(1, 3))))
    assert decode_manifest(encode_manifest(filed), filed.key, 7) == filed


@pytest.mark.parametrize(
    "turns", [[1], [[1]], [["a", 2]], [[2, 1]], [[0, 4]], [[-1, 2]], [[True, 2]], [[0, 1, 2]], {}]
)
def test_turns_that_cannot_be_are_refused(turns: object) -> None:
    fields = json.loads(DATA[48:-12]) | {"earlier": turns}
    text = json.dumps(fields).encode()
    rest = struct.pack("<QQ", len(text), 3) + text + DATA[-12:]
    data = struct.pack("<8sII16s", b"SEMAGENT", 1, 0, xxhash.xxh3_128_digest(rest)) + rest
    with pytest.raises(DamagedError, match="manifest fields"):
        decode_manifest(data, FILED.key, 7)


def test_absurd_lengths_are_refused_before_anything_is_allocated() -> None:
    for sizes in ((2**63, 3), (10, 2**62), (2**64 - 1, 2**64 - 1)):
        data = DATA[:32] + struct.pack("<QQ", *sizes) + DATA[48:]
        with pytest.raises(DamagedError, match="truncated"):
            decode_manifest(data, FILED.key, 7)
