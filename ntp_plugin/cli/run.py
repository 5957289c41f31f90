"""`ntp run`: torchrun's command line for jobs that survive their ranks.

Everything that is not a flag of ours goes to torchrun as it is.
"""

from collections.abc import Sequence

from ntp_plugin.cli.parser import OneLineParser


def run(words: Sequence[str]) -> int:
    """Start the job; returns its exit code."""
    parser = OneLineParser(
        prog="ntp run",
        description="Run a job as torchrun does, but let the others go on when a worker dies.",
        epilog="All other flags are torchrun's: see torchrun --help.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ntp-respawn", type=int, default=0, metavar="N", help="how many lost workers to start anew, in all"
    )
    said, rest = parser.parse_known_args(list(words))
    from ntp_plugin.launch import agent  # noqa: PLC0415  (brings torch, which no other command needs)

    return agent.run(rest, agent.RunPolicy(respawn=said.ntp_respawn))
