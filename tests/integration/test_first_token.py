"""When the first token of a sequence is returned, counted in forward passes of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch
from semantic.domain.errors import BackendError
from semantic.domain.value_objects import SamplingParams, SequenceId
from tests.support.in_pages import SUFFIX, tiny_backend
from tests.support.reference import generate, same_answer
from tests.support.rig import cache_bytes
from tests.support.tiny_models import VOCAB, tiny_model

PROMPTS = [tuple((seed * 13 + i * 7) % VOCAB for i in range(5 + seed)) for seed in range(3)]
forms = pytest.mark.parametrize("name", ["llama", "llama" + SUFFIX, "llama padded"])
launches = pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "queued"])


class Steps:
    """The steps that batches have launched."""

    def __init__(self, patch: pytest.MonkeyPatch, *, blocks: bool) -> None:
        self.launched = 0
        self.fails = False
        whole, launch = ContinuousBatch.__init__, ContinuousBatch._launch

        def made(batch: ContinuousBatch, model: object, **_: object) -> None:
            whole(batch, model, launch_blocks=blocks)  # type: ignore[arg-type]

        def counted(batch: ContinuousBatch, inputs: object) -> None:
            if self.fails:
                raise RuntimeError("out of memory")
            self.launched += 1
            launch(batch, inputs)  # type: ignore[arg-type]

        patch.setattr(ContinuousBatch, "__init__", made)
        patch.setattr(ContinuousBatch, "_launch", counted)


def started(backend: MLXBackend, prompt: Sequence[int]) -> SequenceId:
    sequence = backend.open(256)
    backend.prefill(sequence, prompt[:-1])
    backend.start(sequence, prompt[-1], prompt[:-1], SamplingParams(), 0)
    return sequence


def said(backend: MLXBackend) -> dict[SequenceId, int]:
    return {one.sequence: one.token for one in backend.decode()}


@forms
@launches
def test_a_first_token_is_returned_before_the_step_after_it_is_launched(
    name: str, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, blocks=blocks)
    backend = tiny_backend(name)
    alone = started(backend, PROMPTS[0])
    assert set(said(backend)) == {alone}
    assert steps.launched == 1, "the step of its last prompt token and no other"
    for n in range(3, 6):
        assert set(said(backend)) == {alone}
        assert steps.launched == n, "later tokens are read when the next step is on its way"


@forms
def test_where_launching_blocks_a_first_token_comes_first_beside_others_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch, blocks=True)
    backend = tiny_backend(name)
    running = started(backend, PROMPTS[0])
    for _ in range(3):
        said(backend)
    second = started(backend, PROMPTS[1])
    assert set(said(backend)) == {running}
    joined = steps.launched
    assert set(said(backend)) == {running, second}
    assert steps.launched == joined, "nothing was launched after the step that it joined"


@forms
def test_elsewhere_a_newcomer_stops_no_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, blocks=False)
    backend = tiny_backend(name)
    running = started(backend, PROMPTS[0])
    for _ in range(3):
        said(backend)
    second = started(backend, PROMPTS[1])
    for n in range(1, 5):
        before = steps.launched
        assert set(said(backend)) == ({running} if n == 1 else {running, second})
        assert steps.launched == before + 1, "one step in advance all the time"


@forms
@launches
@pytest.mark.parametrize("leaves_after", [1, 2, 3])
def test_a_first_token_is_in_the_cache_that_leaves_and_the_others_go_on(
    name: str, blocks: bool, leaves_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch has one that leaves, one that stays, and one that joins when the other leaves."""
    Steps(monkeypatch, blocks=blocks)
    backend = tiny_backend(name)
    sequences = [started(backend, prompt) for prompt in PROMPTS[:2]]
    found: list[list[int]] = [[], [], []]
    for _ in range(leaves_after):
        tokens = said(backend)
        for n, sequence in enumerate(sequences):
            found[n] += [tokens[sequence]] if sequence in tokens else []
    sequences.append(started(backend, PROMPTS[2]))
    if leaves_after == 2:
        tokens = said(backend)
        for n, sequence in enumerate(sequences):
            found[n] += [tokens[sequence]] if sequence in tokens else []
    length = backend.length(sequences[0])
    assert length == len(PROMPTS[0]) + len(found[0])
    backend.pause(sequences[0])
    whole = [*PROMPTS[0], *generate(tiny_model("llama"), PROMPTS[0], 12)]
    backend.start(sequences[0], whole[length], whole[:length], SamplingParams(), 0)
    found[0].append(whole[length])
    for _ in range(4):
        tokens = said(backend)
        for n, sequence in enumerate(sequences):
            found[n] += [tokens[sequence]] if sequence in tokens else []
    for prompt, answer in zip(PROMPTS, found, strict=True):
        expected = generate(tiny_model("llama"), prompt, len(answer))
        assert same_answer(tiny_model("llama"), prompt, answer, expected)


def test_a_step_that_fails_while_one_leaves_fails_the_others_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, blocks=True)
    backend = tiny_backend("llama")
    first, second = (started(backend, prompt) for prompt in PROMPTS[:2])
    said(backend)
    steps.fails = True
    with pytest.raises(BackendError, match="out of memory"):
        backend.close(first)
    steps.fails = False
    third = started(backend, PROMPTS[2])
    with pytest.raises(BackendError, match="the batch failed"):
        backend.decode()
    backend.close(second)
    assert said(backend) == {}, "what was lost decodes no more"
    backend.close(third)
    assert cache_bytes(backend) == 0


def test_a_batch_asks_the_device_whether_launching_blocks() -> None:
    batch = tiny_backend("llama")._batch
    assert isinstance(batch, ContinuousBatch)
    assert batch._launch_blocks == (mx.default_device() == mx.Device(mx.cpu))
