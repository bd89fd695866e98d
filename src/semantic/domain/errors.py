"""The errors of this package, as one tree sorted by what the caller must do next.

    SemanticError
    ├── RequestError                 change the request
    │   ├── InvalidRequestError          a field is wrong
    │   ├── ContextOverflowError         longer than the model's context
    │   ├── AgentNotFoundError           no agent of that name
    │   ├── PinLimitError                more pinned than the tenant's part of the store
    │   ├── ModelNotFoundError           no such model, or its folder is broken
    │   └── CacheReconstructionError     the cache given does not belong to this model
    ├── CapacityError                retry later, or send a smaller request
    │   ├── OverloadedError              the queue is full
    │   │   └── TenantLimitError             the tenant has its part of what all share
    │   ├── PoolExhaustedError           the block pool cannot hold it
    │   ├── WeightsTooLargeError         a model's weights need more memory than there is for them
    │   └── UncheckedGrammarError        a grammar that may be expensive still needs its check
    ├── AnswerError                  retry: the answer is unusable
    │   └── ToolCallError                a tool call that does not parse
    └── OperatorError                a person must act
        ├── UnsupportedModelError        the model's cache is of an unsupported kind
        ├── BackendError                 the model failed while running
        │   └── NotFiniteError               it computed NaN or infinite values
        ├── ModelLoadError               one of several models does not load
        ├── StoreError                   the store's folder is not usable as it is
        └── IntegrityError               an internal count is wrong: a bug

Each class also derives from the built-in exception that a caller without this module would
expect. Knows nothing of the display of errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.domain.grammar import Grammar

GRAMMAR_FAILED = "the grammar failed"
"""How the cause begins when an answer's own grammar ended it. Clients may read all of it."""
NOT_FINITE = "the model computed NaN or infinite values; nothing computed for this answer is kept"
"""The reason for the end of such an answer. Clients may read it."""


class SemanticError(Exception):
    """Root of every error this package raises on purpose."""


class RequestError(SemanticError):
    """The server cannot serve the request as it is; a retry is useless."""


class InvalidRequestError(RequestError, ValueError):
    """A field of the request is wrong; the message names it and the expected value."""


class ContextOverflowError(RequestError, ValueError):
    """The prompt and at least one token of an answer exceed the model's context. `prompt_tokens`
    may be a lower bound; `is_chat`: the prompt is a conversation."""

    def __init__(
        self, message: str, *, prompt_tokens: int, limit: int, is_chat: bool = True
    ) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.is_chat = is_chat


class AgentNotFoundError(RequestError, LookupError):
    """There is no agent of that name, or it is another tenant's."""


class PinLimitError(RequestError, ValueError):
    """A tenant would have pinned more than its part of the store; it must unpin others."""


class ModelNotFoundError(RequestError, LookupError):
    """There is no such model, or its files do not load."""


class CacheReconstructionError(RequestError, ValueError):
    """Blocks cannot become a cache: another model's, another shape, or incomplete."""


class CapacityError(SemanticError):
    """No capacity is left now; a smaller request, or the same one later, may succeed."""


class PoolExhaustedError(CapacityError, ValueError):
    """The block pool cannot allocate the blocks, even after evicting idle caches."""


class OverloadedError(CapacityError):
    """The queue is full; retry after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TenantLimitError(OverloadedError):
    """A tenant has as much at once as it may have beside others."""


class WeightsTooLargeError(CapacityError):
    """A model's weights, of `n_bytes`, need more memory than there is; the loader read none."""

    def __init__(self, message: str, *, n_bytes: int) -> None:
        super().__init__(message)
        self.n_bytes = n_bytes


class UncheckedGrammarError(CapacityError):
    """`grammars` may be expensive to compile and need a check first. `compiles`: they belong to
    answers; else they are parts of such."""

    def __init__(self, grammars: Sequence[Grammar], *, compiles: bool) -> None:
        super().__init__("the grammar of the answer is not checked yet; retry")
        self.grammars = tuple(grammars)
        self.compiles = compiles


class AnswerError(SemanticError):
    """The generated answer is unusable; a retry may succeed."""


class ToolCallError(AnswerError, ValueError):
    """A generated tool call does not parse; the message contains the reason."""


class OperatorError(SemanticError):
    """The operator must act; retrying is useless."""


class UnsupportedModelError(OperatorError, NotImplementedError):
    """No batch can hold the model's kind of cache; the message names it."""


class BackendError(OperatorError, RuntimeError):
    """The model failed while running; the message is the framework's own."""


class NotFiniteError(BackendError):
    """The model computed NaN or infinite values from a request: nothing that follows is valid."""

    def __init__(self) -> None:
        super().__init__(NOT_FINITE)


class ModelLoadError(OperatorError, RuntimeError):
    """One of several models does not load with its files or this budget. Clients may read `public`,
    which names no path."""

    def __init__(self, message: str, *, public: str) -> None:
        super().__init__(message)
        self.public = public


class StoreError(OperatorError, OSError):
    """A store does not open: foreign, unsafe, or of a newer format. The folder stays as it was."""


class IntegrityError(OperatorError, RuntimeError):
    """Internal counts disagree. Never caused by input: report it as a bug."""
