"""Rules over where rollout servers are. Imports no torch: they are checked before anything heavy starts."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rlpost.errors import UserError

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def check(key: str, engine: Mapping[str, Any], num_ranks: int) -> None:
    """Servers are listed, or started by the run.

    Args:
        key: where the engine's settings stand.
        num_ranks: the run's processes.

    Raises: UserError.
    """
    urls = engine.get("urls") or []
    if not urls:
        return
    if engine.get("num_servers") is not None:
        raise UserError(f"{key}.urls and {key}.num_servers: servers are listed or started, not both; set one of them")
    addresses = [_address(url, key) for url in urls]
    if len(set(addresses)) < len(addresses):
        raise UserError(f"{key}.urls={list(urls)}: a server is listed twice")
    if len(urls) < num_ranks:
        raise UserError(
            f"{key}.urls lists {len(urls)} servers for the cluster's {num_ranks} processes, which share them out; list one for "
            "each at least"
        )
    elsewhere = [host for host, _ in addresses if host not in THIS_MACHINE]
    if elsewhere and engine.get("weights_dir") is None:
        raise UserError(
            f"{key}.urls: {elsewhere[0]} may be another machine; set {key}.weights_dir to a directory that it and this one see"
        )


def _address(url: str, key: str) -> tuple[str, int]:
    """Host and port."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise UserError(f"{key}.urls: {url!r} is not a server's address; expected http://host:port")
    return parts.hostname, port
