from collections.abc import Mapping

from ray import exceptions as exceptions

def init(
    address: str | None = ...,
    *,
    include_dashboard: bool = ...,
    object_store_memory: int = ...,
    logging_level: str = ...,
    _node_ip_address: str = ...,
    _temp_dir: str = ...,
) -> object: ...
def is_initialized() -> bool: ...
def shutdown() -> None: ...
def cluster_resources() -> Mapping[str, float]: ...
