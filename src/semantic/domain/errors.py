"""The errors a caller can meet, as one tree sorted by what the caller must do next.

    SemanticError
    ├── RequestError                 change the request
    │   ├── InvalidRequestError          a field is wrong
    │   ├── ContextOverflowError         longer than the model's context
    │   ├── AgentNotFoundError           no agent of that name
    │   ├── ModelNotFoundError           no such model, or its folder is broken
    │   └── CacheReconstructionError     the cache given does not belong to this model
    ├── CapacityError                retry later, or ask for less
    │   ├── OverloadedError              the queue is full
    │   └── PoolExhaustedError           the block pool cannot hold it
    ├── AnswerError                  ask again: the answer is of no use
    │   └── ToolCallError                it calls a tool in a way that cannot be read
    └── OperatorError                a person must act
        ├── UnsupportedModelError        the model keeps a cache that we cannot manage
        ├── BackendError                 the model failed while running
        ├── StoreError                   the store's folder cannot be used as it is
        └── IntegrityError               an internal account is wrong: a bug

Each class also derives from the built-in exception that a caller without this module would
expect. Nothing here knows how an error is shown.
"""


class SemanticError(Exception):
    """Root of every error this package raises on purpose."""


class RequestError(SemanticError):
    """The request cannot be served as it is; sending it again changes nothing."""


class InvalidRequestError(RequestError, ValueError):
    """A field of the request is wrong; the message names it and what was expected."""


class ContextOverflowError(RequestError, ValueError):
    """The prompt and what may be answered are longer than the model's context.

    `prompt_tokens` may be the least that it has; `is_chat` says whether the prompt is a
    conversation.
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


class ModelNotFoundError(RequestError, LookupError):
    """No model is where the request says, or what is there cannot be loaded."""


class CacheReconstructionError(RequestError, ValueError):
    """Blocks cannot become a cache: another model's, another shape, or incomplete."""


class CapacityError(SemanticError):
    """There is no room now; a smaller request, or the same one later, may succeed."""


class PoolExhaustedError(CapacityError, ValueError):
    """The block pool cannot give the blocks asked for, even when idle caches are dropped."""


class OverloadedError(CapacityError):
    """The queue has no room; `retry_after` is when to come again, in seconds."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class AnswerError(SemanticError):
    """What the model wrote is of no use; asked again it may write something else."""


class ToolCallError(AnswerError, ValueError):
    """The model wrote a tool call that cannot be read; the message says what is wrong with it."""


class OperatorError(SemanticError):
    """Only a person can mend this."""


class UnsupportedModelError(OperatorError, NotImplementedError):
    """The model's cache is of a kind that cannot be batched; the message names it."""


class BackendError(OperatorError, RuntimeError):
    """The model failed while running; the message is the framework's own."""


class StoreError(OperatorError, OSError):
    """A store cannot be opened: not ours, not safe, or of a newer format. Nothing was changed."""


class IntegrityError(OperatorError, RuntimeError):
    """An account disagrees with itself. Never raised by wrong input: report it."""
