"""The errors a caller can meet, as one tree sorted by what the caller must do next.

    SemanticError
    ├── RequestError                 change the request
    │   ├── InvalidRequestError          a field is wrong
    │   ├── ModelNotFoundError           no such model, or its folder is broken
    │   └── CacheReconstructionError     the cache given does not belong to this model
    ├── CapacityError                retry later, or ask for less
    │   └── PoolExhaustedError           the block pool cannot hold it
    └── OperatorError                a person must act
        ├── UnsupportedModelError        the model keeps a cache that we cannot manage
        ├── BackendError                 the model failed while running
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


class ModelNotFoundError(RequestError, LookupError):
    """No model is where the request says, or what is there cannot be loaded."""


class CacheReconstructionError(RequestError, ValueError):
    """Blocks cannot become a cache: another model's, another shape, or incomplete."""


class CapacityError(SemanticError):
    """There is no room now; a smaller request, or the same one later, may succeed."""


class PoolExhaustedError(CapacityError, ValueError):
    """The block pool cannot give the blocks asked for, even when idle caches are dropped."""


class OperatorError(SemanticError):
    """Only a person can mend this."""


class UnsupportedModelError(OperatorError, NotImplementedError):
    """The model's cache is of a kind that cannot be batched; the message names it."""


class BackendError(OperatorError, RuntimeError):
    """The model failed while running; the message is the framework's own."""


class IntegrityError(OperatorError, RuntimeError):
    """An account disagrees with itself. Never raised by wrong input: report it."""
