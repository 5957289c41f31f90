"""`ntp store`: runs the store of a job on a machine of its own, so that the loss of a node does not end the job."""

import argparse
import signal
from typing import Any

from ntp_plugin.cli.parser import OneLineParser, number
from ntp_plugin.errors import ConfigError


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `store` to the commands of `ntp`."""
    parser = commands.add_parser(
        "store",
        help="run the store of a job on a machine that is not one of its nodes",
        description="Run a job's store until Ctrl-C. Give every node --rdzv-endpoint=HOST:PORT --rdzv-conf is_host=0.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=number(int, least=0, most=65535), default=29400, help="0 takes a free one (default: %(default)s)"
    )
    parser.set_defaults(run=run, parser=parser)


def run(parsed: Any) -> int:
    """Serve until SIGINT or SIGTERM."""
    if not parsed.host:
        raise ConfigError("--host is empty", fix="name an address of this machine")
    from ntp_plugin.membership.store import serve  # noqa: PLC0415  (brings torch, which no other command needs)

    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        server = serve(parsed.host, parsed.port)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"cannot listen on {parsed.host}:{parsed.port} ({reason})") from error
    print(f"ntp store: {parsed.host}:{server.port}", flush=True)
    signal.sigwait(ends)
    return 0
