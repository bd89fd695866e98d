"""Replicas as an application of Ray Serve. Ray selects a replica by consistent hashing of keys, and
skips full replicas."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from semantic.domain.errors import OperatorError, OverloadedError
from semantic_fleet.replicas.fleet_port import BuildReplica, PassedRequest, Piece, ResponseHead
from semantic_fleet.replicas.replica import Drain

if TYPE_CHECKING:
    from ray.serve import Deployment
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import LoggingConfig

APPLICATION: Final = "semantic"
_REPLICA: Final = "replica"
_ROUTER: Final = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_POLICY: Final = "semantic_fleet.replicas.autoscaling:by_queue"
_QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}
_OBJECT_BYTES: Final = 128 << 20
"""The size of Ray's object store in bytes. It contains only bodies of requests."""
_FOLDER: Final = "semantic-ray-"
_TRIES: Final = 2
_TO_SAVE: Final = 60.0
"""Seconds in which a stopping replica saves its agents."""
_DRAIN_LOOK: Final = 0.2
_HEALTH_LOOK: Final = 2.0
_STATUS_LOOK: Final = 0.2
_LOOK_BACK: Final = 11.0
"""Seconds over which Ray averages the load: more than the 10 between two of a handle's reports."""
_RETRY: Final = 5
_LONGEST_REASON: Final = 400
_ERROR_LINE: Final = re.compile(r"[\w.]+(?:Error|Exception): ")


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The fleet to run. It has at least `replicas` and at most `most` replicas."""

    replicas: int
    most: int
    requests: int
    """The maximum number of answers that a replica generates at once."""
    queued: int
    """The maximum number of requests that wait for a replica."""
    drain: float
    """The seconds in which a stopping replica may finish its answers."""
    folder: str
    per_machine: int
    """The maximum number of replicas on one machine."""
    more_after: float = 10.0
    """Seconds of waiting after which Ray adds a replica."""
    fewer_after: float = 120.0
    """Seconds of low load after which Ray removes a replica."""
    gpus: float | None = None
    """The number of GPUs of a replica, as Ray counts them."""
    address: str | None = None
    """The address of a running cluster. None starts Ray in this process."""


class RayCluster:
    """Implements `ReplicasPort` with Ray Serve. `start` and `stop` block."""

    def __init__(self, plan: FleetPlan, build: BuildReplica) -> None:
        self._plan = plan
        self._build = build
        self._handle: DeploymentHandle | None = None
        self._folder: str | None = None
        self._has_ray = False

    def start(self) -> None:
        """Start the replicas, and Ray unless it runs. Returns when all replicas can answer. Raises
        OperatorError if Ray is missing or unreachable, or if a replica fails to start."""
        self._set_environment()
        try:
            import ray
            from ray import serve
        except ImportError as error:
            raise OperatorError(f"fleet: {error}; install semantic-engine[fleet]") from error
        self._has_ray = True
        try:
            self._connect()
            serve.start(proxy_location="Disabled", logging_config=_log_of_serve("CRITICAL"))
            gpus = self._gpus()
            # A replica with GPUs of its own has their memory; otherwise those on one machine share
            # it.
            sharing = 1 if gpus >= 1 else self._plan.per_machine
            target = self._deployment(gpus).bind(
                self._build, self._plan.folder, sharing, Drain(self._plan.drain, is_any_stopping)
            )
            self._handle = serve.run(target, name=APPLICATION, route_prefix=None)
        except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
            reason = _reason(_said_of_replicas() or str(error))
            raise OperatorError(f"cannot start the replicas: {reason}") from error

    def stop(self) -> None:
        """Stop the replicas. Also stops Ray if `start` started it."""
        self._handle = None
        if not self._has_ray:
            return
        import ray

        if not ray.is_initialized():
            return
        if self._plan.address is None:
            _remove_application(self._plan.drain)
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def answer(self, key: str, request: PassedRequest) -> AsyncGenerator[Piece, None]:
        handle = self._require_handle()  # first: raises while `start` imports Ray
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import BackPressureError, RayServeException

        call = handle.options(method_name="answer", session_id=key, stream=True).remote(request)
        is_over = False
        try:
            async for piece in call:
                yield piece
            is_over = True
        except RayTaskError:
            raise
        except BackPressureError as error:
            raise OverloadedError("all replicas are full", retry_after=_RETRY) from error
        except (RayError, RayServeException) as error:
            raise OverloadedError("the fleet lost the answering replica", retry_after=1) from error
        finally:
            if not is_over:
                call.cancel()

    async def answers(self, request: PassedRequest) -> Mapping[str, tuple[ResponseHead, bytes]]:
        handle = self._require_handle()
        from ray.exceptions import RayError

        try:
            found = await handle.broadcast("whole", request).results_async()
        except RayError as error:
            raise OverloadedError("the fleet lost a replica", retry_after=1) from error
        if not found:
            raise OverloadedError("no replica is running", retry_after=_RETRY)
        return {name: (head, body) for name, head, body in found}

    def _require_handle(self) -> DeploymentHandle:
        if self._handle is None:
            raise OverloadedError("the replicas are starting", retry_after=_RETRY)
        return self._handle

    def _set_environment(self) -> None:
        """Give Ray a token: its ports are open to other machines and unpickle data."""
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        if self._plan.address is None:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
            # Ray would limit a replica without whole cores of its own to one thread.
            os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

    def _connect(self) -> None:
        import ray

        if self._plan.address is not None:
            ray.init(address=self._plan.address, logging_level="ERROR")
            return
        # A short path: sockets have at most 100 characters.
        self._folder = tempfile.mkdtemp(prefix=_FOLDER, dir=Path(os.sep) / "tmp")
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECT_BYTES,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _temp_dir=self._folder,
        )

    def _gpus(self) -> float:
        import ray

        if self._plan.gpus is not None:
            return self._plan.gpus
        return 1.0 if ray.cluster_resources().get("GPU") else 0.0

    def _deployment(self, gpus: float) -> Deployment:
        from ray import serve
        from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

        from semantic_fleet.replicas.replica import Replica

        plan = self._plan
        count: dict[str, object] = {"num_replicas": plan.replicas}
        if plan.most > plan.replicas:
            policy = AutoscalingPolicy(policy_function=_POLICY)
            count = {
                "autoscaling_config": AutoscalingConfig(
                    min_replicas=plan.replicas,
                    max_replicas=plan.most,
                    upscale_delay_s=plan.more_after,
                    downscale_delay_s=plan.fewer_after,
                    look_back_period_s=_LOOK_BACK,
                    policy=policy,
                )
            }
        return serve.deployment(
            name=_REPLICA,
            ray_actor_options={"num_cpus": 0, "num_gpus": gpus},
            max_replicas_per_node=plan.per_machine,
            max_ongoing_requests=plan.requests,
            max_queued_requests=plan.queued,
            graceful_shutdown_timeout_s=plan.drain + _TO_SAVE,
            graceful_shutdown_wait_loop_s=_DRAIN_LOOK,
            health_check_period_s=_HEALTH_LOOK,
            max_constructor_retry_count=_TRIES,
            logging_config=_log_of_serve("WARNING"),
            request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
            **count,
        )(Replica)


def _log_of_serve(level: str) -> LoggingConfig:
    """Let replicas log only warnings to Ray's log, because replicas log requests themselves."""
    from ray.serve.schema import LoggingConfig

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return LoggingConfig(log_level=level, enable_access_log=False)


def stop_application(address: str, drain: float) -> None:
    """Stop the replicas and Ray Serve on a cluster. Returns when all agents are saved. Raises
    OperatorError if the cluster is unreachable, and the same errors as `_remove_application`."""
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise OperatorError(f"fleet: {error}; install semantic-engine[fleet]") from error
    try:
        ray.init(address=address, logging_level="ERROR")
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        raise OperatorError(f"{address}: {_reason(str(error))}") from error
    _remove_application(drain)
    serve.shutdown()
    ray.shutdown()


def _remove_application(drain: float) -> None:
    """Delete the application. Running answers may continue for `drain` seconds. Raises
    OperatorError if replicas still run afterwards."""
    from ray import serve

    if APPLICATION in serve.status().applications:
        serve.delete(APPLICATION, _blocking=False)
    seconds = drain + 2 * _TO_SAVE
    until = time.monotonic() + seconds
    while APPLICATION in serve.status().applications:
        if time.monotonic() > until:
            raise OperatorError(f"the replicas did not stop within {seconds:g} seconds")
        time.sleep(_STATUS_LOOK)


def is_any_stopping() -> bool:
    """Return True if any replica is stopping. Raises OverloadedError if Ray does not answer."""
    import ray
    from ray import serve

    try:
        application = serve.status().applications.get(APPLICATION)
    except (ray.exceptions.RayError, serve.exceptions.RayServeException) as error:
        raise OverloadedError(_reason(str(error)), retry_after=_RETRY) from error
    if application is None:
        return False
    return "STOPPING" in application.deployments[_REPLICA].replica_states


def _said_of_replicas() -> str:
    import ray
    from ray import serve

    if not ray.is_initialized():
        return ""
    application = serve.status().applications.get(APPLICATION)
    return "" if application is None else application.deployments[_REPLICA].message


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _ERROR_LINE.match(line)]
    return (named or lines or ["unknown"])[-1][:_LONGEST_REASON]
