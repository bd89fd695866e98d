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
    │   └── UncheckedGrammarError        a grammar that may be expensive was not checked yet
    ├── AnswerError                  retry: the answer is unusable
    │   └── ToolCallError                a tool call that cannot be parsed
    └── OperatorError                a person must act
        ├── UnsupportedModelError        the model's cache is of an unsupported kind
        ├── BackendError                 the model failed while running
        │   └── NotFiniteError               it computed NaN or infinite values
        ├── ModelLoadError               one of several models cannot be loaded
        ├── StoreError                   the store's folder cannot be used as it is
        └── IntegrityError               an internal count is wrong: a bug

Each class also derives from the built-in exception that a caller without this module would
expect. Knows nothing of how errors are displayed.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.domain.grammar import Grammar

GRAMMAR_FAILED = "the grammar failed"
"""How the cause begins when an answer's own grammar ended it. Clients may read all of it."""
NOT_FINITE = "the model computed NaN or infinite values; nothing computed for this answer is kept"
"""Why an answer ends that was computed from such values. Clients may read it."""


class SemanticError(Exception):
    """Root of every error this package raises on purpose."""


class RequestError(SemanticError):
    """The request cannot be served as it is; retrying it is useless."""


class InvalidRequestError(RequestError, ValueError):
    """A field of the request is wrong; the message names it and what was expected."""


class ContextOverflowError(RequestError, ValueError):
    """The prompt and at least one token of an answer exceed the model's context.

    `prompt_tokens` may be a lower bound; `is_chat`: the prompt is a conversation.
    """

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
    """There is no such model, or its files cannot be loaded."""


class CacheReconstructionError(RequestError, ValueError):
    """Blocks cannot become a cache: another model's, another shape, or incomplete."""


class CapacityError(SemanticError):
    """Capacity is exhausted now; a smaller request, or the same one later, may succeed."""


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
    """A model's weights, of `n_bytes`, need more memory than there is for them; none was read."""

    def __init__(self, message: str, *, n_bytes: int) -> None:
        super().__init__(message)
        self.n_bytes = n_bytes


class UncheckedGrammarError(CapacityError):
    """`grammars` may be expensive to compile and must be checked before.

    `compiles`: they are those of answers; else parts of them.
    """

    def __init__(self, grammars: Sequence[Grammar], *, compiles: bool) -> None:
        super().__init__("the grammar of the answer is not checked yet; retry")
        self.grammars = tuple(grammars)
        self.compiles = compiles


class AnswerError(SemanticError):
    """The generated answer is unusable; a retry may succeed."""


class ToolCallError(AnswerError, ValueError):
    """A generated tool call cannot be parsed; the message contains the reason."""


class OperatorError(SemanticError):
    """The operator must act; retrying is useless."""


class UnsupportedModelError(OperatorError, NotImplementedError):
    """The model's cache is of a kind that cannot be batched; the message names it."""


class BackendError(OperatorError, RuntimeError):
    """The model failed while running; the message is the framework's own."""


class NotFiniteError(BackendError):
    """The model computed NaN or infinite values from a request: nothing that follows is valid."""

    def __init__(self) -> None:
        super().__init__(NOT_FINITE)


class ModelLoadError(OperatorError, RuntimeError):
    """One of several models cannot be loaded as its files or the budget are. `public` is what
    clients may read of it: no path."""

    def __init__(self, message: str, *, public: str) -> None:
        super().__init__(message)
        self.public = public


class StoreError(OperatorError, OSError):
    """A store cannot be opened: foreign, unsafe, or of a newer format. Nothing was changed."""


class IntegrityError(OperatorError, RuntimeError):
    """Internal counts disagree. Never caused by input: report it as a bug."""
