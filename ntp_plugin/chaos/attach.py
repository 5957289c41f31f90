"""A strike at a job that runs already, from another terminal of its owner.

It is for jobs that obey orders (`ntp run --ntp-chaos`), and for who can read their token: a signal, too, though only
the record says which process has the slot. Nothing is sent to a process that is no worker of `ntp run`, and nothing
that the record is not told of before.
"""

import signal
import threading
from pathlib import Path

from ntp_plugin.chaos.striker import SIGNALS, from_outside, is_worker, send, struck_now
from ntp_plugin.chaos.strikes import BY_ITS_OWN_HAND, Orders, Strike, orders_file
from ntp_plugin.errors import ConfigError
from ntp_plugin.telemetry import read_run
from ntp_plugin.telemetry.job_state import JobState


def strike_now(run: Path, strike: Strike) -> str:
    """Order it, or do it; what was done, in words."""
    job = job_of(run)
    if strike.what not in BY_ITS_OWN_HAND and strike.what not in SIGNALS:
        raise ConfigError(
            f"{strike.what} is for jobs that a recipe has started: the record does not say what runs where",
            way_out="take the ntp run, the host or its link away by hand",
        )
    if strike.slot not in job.slots:
        raise ConfigError(f"{run}: there is no slot {strike.slot}", way_out=f"slots: {', '.join(sorted(job.slots))}")
    orders = Orders.of_a_running_job(orders_file(run))
    if strike.what in BY_ITS_OWN_HAND:
        orders.give(strike)
        return f"ordered: {strike.what} on {strike.slot}, {strike.during or 'at its next moment'}"
    pid = job.pids.get(strike.slot)
    if pid is None:
        raise ConfigError(f"{strike.slot} is lost, and nobody has its place")
    if not is_worker(pid):
        raise ConfigError(f"{strike.slot}: process {pid} is no worker of ntp run on this host (any more)")
    from_outside(run).tell(struck_now(strike, job))
    send(pid, SIGNALS[strike.what])
    if strike.what == "pause":
        waking = threading.Timer(strike.seconds, send, (pid, signal.SIGCONT))
        waking.start()
        waking.join()
    return f"done: {strike.what} to {strike.slot}, pid {pid}"


def job_of(run: Path) -> JobState:
    """As its record has it now."""
    job = JobState()
    for told in read_run(run):
        job.hear(told)
    return job
