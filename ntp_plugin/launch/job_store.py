"""Starts the job's store before torch's rendezvous begins, and decides the token that the job's hosts share.

torch's own store listens on all addresses of its host, whatever the endpoint says, and has no password. So `ntp run`
starts the store where torch would: on loopback for a job of one host, otherwise on the address that the endpoint names.
torch then connects to it as any other client does.
"""

import argparse
import errno
import ipaddress
import os
import secrets
import socket
import uuid
from collections.abc import Callable, Mapping

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import (
    _matches_machine_hostname,
    parse_rendezvous_endpoint,
)

from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.torchrun_flags import most_hosts, rendezvous_configuration
from ntp_plugin.membership.store import serve

TOKEN = "NTP_TOKEN"
_SHORTEST = 16
"""Least characters of a token. Signatures are readable in the store, so a short token can be found by trying."""
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
"""The spellings that torch accepts."""


def token_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Return the token that the job signs with: the one in NTP_TOKEN, or a new one for a job of one host.

    Args:
        arguments: torchrun's, parsed.
        environment: Where NTP_TOKEN may be.

    Raises:
        ConfigError: The job runs on several hosts and NTP_TOKEN is not set, or it is set and too short.
    """
    given, hosts = environment.get(TOKEN, ""), most_hosts(arguments)
    fix = f"export {TOKEN}=$(openssl rand -hex 16) once, and the same value on every host (srun passes it on)"
    if not given and hosts > 1:
        raise ConfigError(
            f"{TOKEN} is not set, and the job runs on {hosts} hosts: without it any process that reaches the job's"
            " store could forge the reports of its ranks",
            fix=fix,
        )
    if given and len(given) < _SHORTEST:
        raise ConfigError(f"{TOKEN} has {len(given)} characters; at least {_SHORTEST} are needed", fix=fix)
    return given or secrets.token_hex(16)


def start_store(arguments: argparse.Namespace, *, say: Callable[[str], None]) -> TCPStore | None:
    """Start the job's store, if torch would start it in this process, and have torch connect to it.

    Args:
        arguments: torchrun's, parsed. Where a store is started, the endpoint and its settings are replaced.
        say: Called with a log line where the store cannot be bound to one address.

    Returns:
        The store, which lives as long as the object; None where another process runs it, or torch will start it.

    Raises:
        ConfigError: The address that the endpoint names cannot be listened on.
    """
    if _is_of_one_host(arguments):
        store = serve("127.0.0.1", 0)
        _connect_to(arguments, "127.0.0.1", store.port)
        arguments.standalone, arguments.rdzv_backend, arguments.rdzv_id = False, "c10d", str(uuid.uuid4())
        return store
    if (
        arguments.rdzv_backend != "c10d"
        or rendezvous_configuration(arguments).get("store_type", "tcp").strip().lower() != "tcp"
    ):
        return None
    host, port = parse_rendezvous_endpoint(arguments.rdzv_endpoint, DEFAULT_PORT)
    is_host = _is_host(arguments)
    if not (_matches_machine_hostname(host) if is_host is None else is_host):
        return None
    address = address_to_listen_on(host, arguments.local_addr)
    if address is None:
        say(f"{host} is a loopback address here, so the job's store listens on all addresses: --local-addr names one")
        return None
    return _serve_at(arguments, address, port, must_host=is_host is not None, say=say)


def address_to_listen_on(host: str, local: str | None) -> str | None:
    """Find the one address of this machine on which a store listens that others reach as `host`.

    Args:
        host: The host that the endpoint names: an address or a name.
        local: What --local-addr says, if it was given.

    Returns:
        The address; None where the name resolves only to loopback on this machine, as a machine's own name often does,
        and --local-addr does not name the address that others reach.
    """
    if host == "localhost" or _is_address(host):
        return "127.0.0.1" if host == "localhost" else host
    for name in filter(None, (host, local)):
        try:
            found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
        except OSError:
            continue
        addresses = [str(entry[4][0]) for entry in found]
        if reachable := [one for one in addresses if not ipaddress.ip_address(one.partition("%")[0]).is_loopback]:
            return reachable[0]
    return None


def _serve_at(
    arguments: argparse.Namespace, address: str, port: int, *, must_host: bool, say: Callable[[str], None]
) -> TCPStore | None:
    try:
        store = serve(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # behind an address translation, or a service of Kubernetes
            say(f"{address} is no address of this machine, so the job's store listens on all of its addresses")
            return None
        if error.errno == errno.EADDRINUSE and not must_host:  # another process of the job here was first
            _connect_to(arguments, address, port)
            return None
        raise ConfigError(
            f"the job's store cannot listen on {address}:{port} ({os.strerror(error.errno or 0)})"
        ) from error
    _connect_to(arguments, address, store.port)
    return store


def _connect_to(arguments: argparse.Namespace, address: str, port: int) -> None:
    """Change the arguments so that torch connects to the store there as a client."""
    bracketed = f"[{address}]" if ":" in address else address
    configuration = rendezvous_configuration(arguments) | {"is_host": "0"}
    arguments.rdzv_endpoint = f"{bracketed}:{port}"
    arguments.rdzv_conf = ",".join(f"{name}={value}" for name, value in configuration.items())


def _is_of_one_host(arguments: argparse.Namespace) -> bool:
    """Whether torch would choose an endpoint itself, for a job that no other host can join."""
    endpoint_is_given = (
        arguments.rdzv_backend != "static" or arguments.rdzv_endpoint or arguments.master_port is not None
    )
    return bool(arguments.standalone) or (not endpoint_is_given and most_hosts(arguments) == 1)


def _is_host(arguments: argparse.Namespace) -> bool | None:
    """Return is_host of --rdzv-conf: whether this process runs the store; None where it is not given."""
    given = rendezvous_configuration(arguments).get("is_host")
    if given is not None and given.lower() not in (*_TRUE, *_FALSE):
        raise ConfigError(f"--rdzv-conf is_host={given} is neither 0 nor 1")
    return None if given is None else given.lower() in _TRUE


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
