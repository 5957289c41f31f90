"""Ranks that can be started, killed, frozen and started again, for tests and for rehearsals of a recipe.

ranks.py      real processes with a real store, and a supervisor that publishes deaths
faults.py     what can happen to a rank, and when
harm.py       what a process can do to itself
reference.py       whether a job that lost ranks trained what its undisturbed reference run trained
stateless.py  a trainer with nothing to train
machines.py   several machines in one, with wires that can be cut
leaks.py      what a rehearsal must not leave behind
signal_handlers.py  a script with signal handlers that hang, raise, exit, or hold the interpreter lock

Public are the names below. A test of your own loop starts `Ranks`, plans faults for them, and compares their results
with those of a run without faults; `docs/examples/test_my_loop.py` is one.
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
