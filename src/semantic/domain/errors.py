"""The errors of this package, as one tree sorted by what the caller must do next.

    SemanticError
    ├── RequestError                 change the request
    │   ├── InvalidRequestError          a field is wrong
    │   ├── ContextOverflowError         longer than the model's context
    │   ├── AgentNotFoundError           no agent of that name
    │   ├── PinLimitError                pins would exceed the tenant's part of the store
    │   ├── ModelNotFoundError           no such model, or its folder is broken
    │   └── CacheReconstructionError     the cache given does not belong to this model
    ├── CapacityError                retry later, or send a smaller request
    │   ├── OverloadedError              the queue is full
    │   │   └── TenantLimitError             the tenant already uses its part
    │   ├── PoolExhaustedError           the block pool has no room for the request
    │   ├── WeightsTooLargeError         a model's weights need more memory than is available
    │   └── UncheckedGrammarError        a possibly expensive grammar is not checked yet
    ├── AnswerError                  retry: the answer is unusable
    │   └── ToolCallError                a tool call that does not parse
    └── OperatorError                a person must act
        ├── UnsupportedModelError        the model's cache is of an unsupported kind
        ├── BackendError                 the model failed while running
        │   └── NotFiniteError               it computed NaN or infinite values
        ├── ModelLoadError               one of several models does not load
        ├── StoreError                   the store's folder is not usable as it is
        └── IntegrityError               an internal count is wrong: a bug

Each class also derives from a built-in exception.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.domain.grammar import Grammar

GRAMMAR_FAILED = "the grammar failed"
"""Begins the message of an answer whose grammar failed."""
NOT_FINITE = "the model computed NaN or infinite values; nothing computed for this answer is kept"
"""The message of an answer that ended because of NaN or infinity."""


class SemanticError(Exception):
    """Root of all errors that this package raises on purpose."""


class RequestError(SemanticError):
    """The engine cannot serve the request as it is; a retry is useless."""


class InvalidRequestError(RequestError, ValueError):
    """A field of the request is wrong. The message names the field and the expected value."""


class ContextOverflowError(RequestError, ValueError):
    """The prompt and one token of an answer exceed the model's context.

    `prompt_tokens` may be a lower bound. `is_chat` says that the prompt is a conversation.
    """

    def __init__(
        self, message: str, *, prompt_tokens: int, limit: int, is_chat: bool = True
    ) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.is_chat = is_chat


class AgentNotFoundError(RequestError, LookupError):
    """No agent has the name in the request, or the agent belongs to another tenant."""


class PinLimitError(RequestError, ValueError):
    """The tenant would pin more than its part of the store."""


class ModelNotFoundError(RequestError, LookupError):
    """The model does not exist, or its files do not load."""


class CacheReconstructionError(RequestError, ValueError):
    """The backend cannot restore a cache from the blocks."""


class CapacityError(SemanticError):
    """Capacity is exhausted for now. A smaller or later request may succeed."""


class PoolExhaustedError(CapacityError, ValueError):
    """The block pool cannot allocate the blocks, even after evicting idle caches."""


class OverloadedError(CapacityError):
    """The queue is full; the client may try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TenantLimitError(OverloadedError):
    """The tenant already uses its whole part of the queue."""


class WeightsTooLargeError(CapacityError):
    """The model's weights, `n_bytes`, exceed the available memory."""

    def __init__(self, message: str, *, n_bytes: int) -> None:
        super().__init__(message)
        self.n_bytes = n_bytes


class UncheckedGrammarError(CapacityError):
    """The `grammars` may be expensive to compile and need a check first.

    If `compiles`, each grammar is for a whole answer. Otherwise it is a part of such a grammar.
    """

    def __init__(self, grammars: Sequence[Grammar], *, compiles: bool) -> None:
        super().__init__("the grammar of the answer is not checked yet; retry")
        self.grammars = tuple(grammars)
        self.compiles = compiles


class AnswerError(SemanticError):
    """The generated answer is unusable; a retry may succeed."""


class ToolCallError(AnswerError, ValueError):
    """A generated tool call cannot be parsed; the message says why."""


class OperatorError(SemanticError):
    """The operator must act; retrying is useless."""


class UnsupportedModelError(OperatorError, NotImplementedError):
    """The model's kind of cache cannot be part of a batch. The message names the kind."""


class BackendError(OperatorError, RuntimeError):
    """The model failed while running. The message is the framework's own."""


class NotFiniteError(BackendError):
    """The model computed NaN or infinite values."""

    def __init__(self) -> None:
        super().__init__(NOT_FINITE)


class ModelLoadError(OperatorError, RuntimeError):
    """One of several models does not load. Clients may read `public`, which contains no path."""

    def __init__(self, message: str, *, public: str) -> None:
        super().__init__(message)
        self.public = public


class StoreError(OperatorError, OSError):
    """A store cannot be opened, because it is foreign, unsafe or of a newer format."""


class IntegrityError(OperatorError, RuntimeError):
    """Internal counts disagree. Input never causes this error: report it as a bug."""
