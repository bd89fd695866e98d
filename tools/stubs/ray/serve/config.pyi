class AutoscalingPolicy:
    def __init__(self, *, policy_function: str) -> None: ...

class AutoscalingConfig:
    def __init__(
        self,
        *,
        min_replicas: int,
        max_replicas: int,
        upscale_delay_s: float,
        downscale_delay_s: float,
        look_back_period_s: float,
        policy: AutoscalingPolicy,
    ) -> None: ...

class RequestRouterConfig:
    def __init__(self, *, request_router_class: str) -> None: ...
