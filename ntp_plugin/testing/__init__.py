"""Test a training loop with real rank processes that can be killed, frozen and restarted.

    ranks.py            run a function as several rank processes, with a real store and a supervisor
    faults.py           plan what happens to a rank, and when
    harm.py             what a process can do to itself: kill, stop, hang, corrupt a copy
    reference.py        compare what a job with faults trained with a run without faults
    stateless.py        a trainer without state, to test recovery alone
    machines.py         several emulated machines on one host, with links that can be cut
    leaks.py            find processes, threads, sockets and files that a test leaves behind
    signal_handlers.py  run a script with signal handlers that hang, raise, exit, or hold the interpreter lock

The names below are public. A test of your own loop starts `Ranks`, plans faults, and compares the results with those of
a run without faults; `docs/examples/test_my_loop.py` is one.

Read next: `ranks.py`.
"""

from typing import TYPE_CHECKING

from ntp_plugin.lazy_exports import lazy_exports

__all__ = [
    "Fault",
    "Rank",
    "Ranks",
    "Trained",
    "assert_every_sample_once",
    "assert_same_training",
    "fail",
    "freeze",
    "hang",
    "hold_lock",
    "kill",
    "leave",
    "segfault",
    "slow",
]

if TYPE_CHECKING:
    from ntp_plugin.testing.faults import Fault, fail, freeze, hang, hold_lock, kill, leave, segfault, slow
    from ntp_plugin.testing.ranks import Rank, Ranks
    from ntp_plugin.testing.reference import Trained, assert_every_sample_once, assert_same_training
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ntp_plugin.testing.faults": (
                "Fault",
                "fail",
                "freeze",
                "hang",
                "hold_lock",
                "kill",
                "leave",
                "segfault",
                "slow",
            ),
            "ntp_plugin.testing.ranks": ("Rank", "Ranks"),
            "ntp_plugin.testing.reference": ("Trained", "assert_every_sample_once", "assert_same_training"),
        },
    )
