"""Compiles grammars up to their first mask, in a function or in a separate process.

The process never imports `semantic`. It reads frames from its standard input: a header, the bytes
of all tokens, then grammars. A frame is its length in four bytes, big-endian, and its content. The
answer to a grammar is a frame with the grammar's error, or an empty frame.

A grammar that exceeds a limit ends the process. For CPU time the process ends by SIGPROF, for
memory with `OUT_OF_MEMORY` or an abort.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, TypedDict, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

OUT_OF_MEMORY = 77
"""Exit status of a process that used too much memory."""

_FRAME = 4
"""The number of bytes that hold a frame's length."""
_STACK = 512 << 20
"""Bytes of address space for the deep stack, which takes memory only as it grows."""
_POLL_S = 0.02
"""The number of seconds between two checks of the memory in use."""
_SMALL_STACK = 1 << 20
"""Bytes of every other thread's stack."""
_THREADS = 64 << 20
"""Bytes of address space for other threads."""
_FRESH = 4
"""The process ends itself once its memory has grown by a quarter of its limit."""
_NICE = 10
"""The process's niceness."""
_PAGES = Path("/proc/self/statm")
"""The numbers of pages of address space and of memory. `ru_maxrss` would include the parent's."""
_LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's default limits are for a step, not for compiling. Verbose errors quote grammars."""


class Header(TypedDict):
    """Data that the process needs before the first grammar."""

    lengths: list[int]  # bytes in each token
    special: list[int]
    eos: list[int]
    cpu_s: float  # limit for each grammar
    memory: int  # bytes for all grammars together, in addition to the vocabulary


def start(trie: LLTokenizer, source: str) -> LLMatcher:
    """Return a matcher whose first mask is computed, or a matcher in an error state."""
    matcher = LLMatcher(trie, source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return matcher
    mask = int.from_bytes(next_mask(matcher, trie), "little")
    if matcher.is_error() or not mask:
        return matcher
    # A grammar that soon exceeds limits fails here and not in a batch.
    trial = matcher.deep_copy()
    trial.consume_token((mask & -mask).bit_length() - 1)
    trial.compute_bitmask()
    return trial if trial.is_error() else matcher


def next_mask(matcher: LLMatcher, trie: LLTokenizer) -> bytes:
    """Return the mask of the next token: one bit per token, lowest first."""
    mask = matcher.compute_bitmask()
    if mask.count(0) != len(mask) - 1:
        return mask
    bits = int.from_bytes(mask, "little")
    token = bits.bit_length() - 1
    if bits != 1 << token or not trie.is_special_token(token) or matcher.validate_tokens([token]):
        return mask
    # The grammar forces text that the tokenizer encodes with a special token, which the parser does
    # not accept as text.
    plain = trie.greedy_tokenize(matcher.compute_ff_bytes().decode(errors="ignore"))
    return (1 << plain[0]).to_bytes(len(mask), "little") if plain else mask


# llguidance recurses into nested input, and a stack overflow in native code ends the process, so
# its compiler runs on a thread with a stack large enough for the longest grammar.

Result = TypeVar("Result")

_stack_size_lock = threading.Lock()


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """Call `function` on a thread with a deep stack; return its result or raise its error."""
    with ThreadPoolExecutor(1, "deep-stack") as pool:
        with _stack_size_lock:  # the size is global, for every thread that starts
            before = threading.stack_size(_STACK)
            try:
                pool.submit(int)  # starts the thread; `function` may start others
            finally:
                threading.stack_size(before)
        return pool.submit(function).result()


# Frames


def write_frame(to: IO[bytes], content: bytes) -> None:
    """Write one frame. Raises OSError if the reader has closed the other end."""
    to.write(len(content).to_bytes(_FRAME, "big") + content)
    to.flush()


def read_frame(source: IO[bytes]) -> bytes | None:
    """Return the next frame's content; None if `source` has ended."""
    length = source.read(_FRAME)
    if len(length) < _FRAME:
        return None
    size = int.from_bytes(length, "big")
    content = source.read(size)
    return content if len(content) == size else None


# The process


class _Tokens:
    bos_token_id = None

    def __init__(self, header: Header, joined: bytes) -> None:
        self.tokens: list[bytes] = []
        at = 0
        for length in header["lengths"]:
            self.tokens.append(joined[at : at + length])
            at += length
        self.eos_token_id = header["eos"][0]
        self.special_token_ids = header["special"]
        self.trie: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        return [] if self.trie is None else self.trie.greedy_tokenize(text.decode())


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    given, joined = read_frame(requests), read_frame(requests)
    if given is None or joined is None:
        return
    header: Header = json.loads(given)
    tokens = _Tokens(header, joined)
    trie = tokens.trie = LLTokenizer(TokenizerWrapper(tokens), eos_token=header["eos"])
    most = _memory() + header["memory"]
    fresh = _memory() + header["memory"] // _FRESH
    _limit_address_space(header["memory"])
    write_frame(answers, b"")
    while _memory() <= fresh and (source := read_frame(requests)) is not None:
        write_frame(answers, _problem(trie, source.decode(), header["cpu_s"], most).encode())


def _problem(trie: LLTokenizer, source: str, cpu_s: float, most: int) -> str:
    """Return a grammar's error, or an empty text. Exceeding a limit ends the process."""
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(done, most), daemon=True)
    watch.start()
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    problem = start(trie, source).get_error()
    signal.setitimer(signal.ITIMER_PROF, 0)
    done.set()
    watch.join()
    return problem


def _watch(done: threading.Event, most: int) -> None:
    while not done.wait(_POLL_S):
        if _memory() > most:
            os._exit(OUT_OF_MEMORY)


def _memory() -> int:
    try:
        return int(_PAGES.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _limit_address_space(n_bytes: int) -> None:
    """Allow only `n_bytes` more address space, if possible."""
    with suppress(OSError, ValueError):  # the file exists only on Linux
        used = int(_PAGES.read_text().split()[0]) * resource.getpagesize()
        most = used + n_bytes + _THREADS
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C and closes the input
    os.nice(_NICE)
    os.set_blocking(sys.stderr.fileno(), False)  # the parent reads it after the process ends
    threading.stack_size(_SMALL_STACK)
    on_deep_stack(lambda: _serve(sys.stdin.buffer, sys.stdout.buffer))


if __name__ == "__main__":
    _main()
