from collections.abc import Callable, Mapping

from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

class Application: ...

class Deployment:
    def bind(self, *args: object) -> Application: ...

class DeploymentStatus:
    message: str
    replica_states: Mapping[str, int]

class ApplicationStatus:
    deployments: Mapping[str, DeploymentStatus]

class ServeStatus:
    applications: Mapping[str, ApplicationStatus]

def deployment(
    *,
    name: str,
    ray_actor_options: Mapping[str, float],
    max_replicas_per_node: int,
    max_ongoing_requests: int,
    max_queued_requests: int,
    graceful_shutdown_timeout_s: float,
    graceful_shutdown_wait_loop_s: float,
    health_check_period_s: float,
    max_constructor_retry_count: int,
    logging_config: LoggingConfig,
    request_router_config: RequestRouterConfig,
    **scaling: object,
) -> Callable[[type[object]], Deployment]: ...
def start(*, proxy_location: str, logging_config: LoggingConfig) -> None: ...
def run(target: Application, *, name: str, route_prefix: str | None) -> DeploymentHandle: ...
def status() -> ServeStatus: ...
def delete(name: str, _blocking: bool = ...) -> None: ...
def shutdown() -> None: ...
