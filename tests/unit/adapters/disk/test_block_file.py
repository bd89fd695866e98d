"""The frame of a block file: what was written comes back, anything else is refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from semantic.adapters.stores.disk.block_file import (
    HEADER_BYTES,
    decode_header,
    encode_header,
    layout_stamp,
    require_same,
)
from semantic.adapters.stores.disk.entries import DamagedError, MismatchError, NewerFormatError
from semantic.domain.block_hash import BlockKey, Part, Scope
from semantic.domain.stored import BlockHeader, StoredBlock
from tests.support import store_blocks as make

LINK = make.chain(256 + 7)[1]
BLOCK = make.block(LINK)
HEADER = encode_header(BLOCK)
SIZE = HEADER_BYTES + len(BLOCK.body)
KEY = BLOCK.header.key


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=256),
    start=st.integers(0, 2**40),
    part=st.sampled_from(list(Part)),
    layout=st.text(max_size=4000).filter(lambda text: text.isprintable()),
    body=st.binary(max_size=300),
)
def test_a_header_comes_back(
    tokens: list[int], start: int, part: Part, layout: str, body: bytes
) -> None:
    scope = Scope(b"n" * 32, b"t" * 32)
    (link,) = scope.chain(tokens, start=start)
    header = BlockHeader(link, part, layout)
    data = encode_header(StoredBlock(header, body))
    assert len(data) == HEADER_BYTES
    found = decode_header(data, header.key, HEADER_BYTES + len(body))
    require_same(found, header)
    assert found.header == replace(header, layout=layout_stamp(layout))
    assert found.body_bytes == len(body)


def test_every_flipped_bit_of_a_header_is_found() -> None:
    for at in range(8 * HEADER_BYTES):
        flipped = bytearray(HEADER)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises((DamagedError, NewerFormatError)):
            decode_header(bytes(flipped), KEY, SIZE)


@given(data=st.binary(max_size=2 * HEADER_BYTES))
def test_no_other_bytes_are_a_header(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode_header(data, KEY, SIZE)


@given(at=st.integers(0, HEADER_BYTES - 1), junk=st.binary(min_size=1, max_size=64))
def test_junk_inside_a_header_is_found(at: int, junk: bytes) -> None:
    data = (HEADER[:at] + junk + HEADER[at + len(junk) :])[:HEADER_BYTES]
    if data != HEADER:
        with pytest.raises((DamagedError, NewerFormatError)):
            decode_header(data, KEY, SIZE)


@pytest.mark.parametrize("size", [0, HEADER_BYTES, SIZE - 1, SIZE + 1, 1 << 62])
def test_a_file_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(DamagedError, match=r"truncated|too long"):
        decode_header(HEADER, KEY, size)


def test_a_header_under_another_name_is_refused() -> None:
    other = make.chain(256)[0]
    with pytest.raises(DamagedError, match="identity"):
        decode_header(HEADER, other.key(Part.FULL), SIZE)
    with pytest.raises(DamagedError, match="identity"):
        decode_header(HEADER, BlockKey(KEY.hash, Part.WINDOW), SIZE)


def test_a_sound_frame_around_tokens_of_another_block_is_refused() -> None:
    """With our checksum alone no tokens can be made to fit a hash."""
    lying = replace(LINK, tokens=(*LINK.tokens[:-1], LINK.tokens[-1] ^ 1))
    data = encode_header(replace(BLOCK, header=replace(BLOCK.header, link=lying)))
    with pytest.raises(DamagedError, match="tokens"):
        decode_header(data, KEY, SIZE)


def test_a_newer_version_is_told_from_damage() -> None:
    newer = HEADER[:8] + (2).to_bytes(4, "little") + HEADER[12:]
    with pytest.raises(NewerFormatError):
        decode_header(newer, KEY, SIZE)


@pytest.mark.parametrize(
    ("field", "link"),
    [
        ("start", replace(LINK, start=512)),
        ("namespace", replace(LINK, scope=replace(LINK.scope, namespace=b"x" * 32))),
        ("tenant", replace(LINK, scope=replace(LINK.scope, tenant=b"x" * 32))),
        ("parent", replace(LINK, parent=LINK.hash)),
        ("tokens", replace(LINK, tokens=LINK.tokens[:-1])),
    ],
)
def test_a_sound_header_must_also_be_the_one_asked_for(field: str, link: object) -> None:
    found = decode_header(HEADER, KEY, SIZE)
    assert isinstance(link, type(LINK))
    with pytest.raises(MismatchError, match=field):
        require_same(found, replace(BLOCK.header, link=link))
    with pytest.raises(MismatchError, match="layout"):
        require_same(found, replace(BLOCK.header, layout="another"))


@pytest.mark.parametrize("n_tokens", [0, 257])
def test_a_block_of_impossible_length_is_not_written(n_tokens: int) -> None:
    link = replace(LINK, tokens=tuple(range(n_tokens)))
    with pytest.raises(ValueError, match="1 to 256 tokens"):
        encode_header(replace(BLOCK, header=replace(BLOCK.header, link=link)))


def test_random_headers_with_a_right_checksum_do_not_crash_the_decoder() -> None:
    """The checksum keeps chance out; whatever comes past it must still be refused in order."""
    random = Random(1)
    for _ in range(3000):
        data = bytearray(HEADER)
        for _ in range(random.randint(1, 6)):
            data[random.randrange(12, 1300)] = random.randrange(256)
        data[-16:] = xxhash.xxh3_128_digest(bytes(data[:-16]))
        if data == bytearray(HEADER):
            continue
        try:
            found = decode_header(bytes(data), KEY, SIZE)
            require_same(found, BLOCK.header)
        except (DamagedError, MismatchError):
            continue
        assert found.body_bytes == len(BLOCK.body)
