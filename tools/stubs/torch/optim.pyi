from typing import Any

class AdamW:
    param_groups: list[dict[str, Any]]
    def __init__(
        self,
        params: object,
        *,
        lr: float = ...,
        betas: tuple[float, float] = ...,
        weight_decay: float = ...,
        fused: bool = ...,
    ) -> None: ...
    def step(self) -> None: ...
    def zero_grad(self, set_to_none: bool = ...) -> None: ...
