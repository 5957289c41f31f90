"""Jobs on several machines: one is lost, is disconnected and returns, or takes the store with it.

A job trains slowly until the event that a test waits for has happened, and then without pauses.
"""

import functools

import pytest

from tests.ranks.command import NTP, PAUSED, RECIPES, Command, last_line, wait_until
from tests.ranks.machines import can_make_namespaces, machines

with_cuts = pytest.mark.skipif(not can_make_namespaces(), reason="no right to make network namespaces")

PORT = 29400
LIMITS = "host_s=10,store_s=30,hung_s=20"
"""A host on a machine with 60 busy processes beats once in a second or two."""
PATIENT = "host_s=10,store_s=600,hung_s=20"
"""For a host that is reached again: TCP doubles the time between its attempts to send a lost packet, so a request from
before the cut may be answered half a minute after the cut is healed."""
STEPS = 160
"""Ten minutes with pauses (`paused.py`): a machine joins within that time."""


class Job:
    """`ntp run` with two workers on each of some machines."""

    def __init__(
        self, hosts, count, *, store_at=1, steps=STEPS, pause_s=0.3, script=RECIPES / "train.py", limits=LIMITS
    ):
        self.hosts, self.count, self.store_at, self.limits = hosts, count, store_at, limits
        self.steps, self.pause_s, self.script, self.agents = steps, pause_s, script, {}
        for at in range(1, count + 1):
            self.start(at)

    def start(self, at, name="run"):
        flags = [
            *("--nnodes", str(self.count), "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job"),
            *("--rdzv-endpoint", f"{self.hosts.address(self.store_at)}:{PORT}"),
            *("--rdzv-conf", f"is_host={int(at == self.store_at)}"),
            *("--local-addr", self.hosts.address(at), "--ntp-thresholds", self.limits),
        ]
        environment = {"STEPS": str(self.steps), "PAUSE_S": str(self.pause_s), "MACHINE": str(at)}
        environment["RECIPE"] = str(self.script)
        agent = self.agents[at] = self.hosts.run(at, "run", *flags, str(PAUSED), name=name, **environment)
        return agent

    def wait_until_it_trains(self):
        for agent in self.agents.values():
            self.wait_until_in(agent)

    @staticmethod
    def wait_until_in(agent):
        """Two processes write, and the ends of their lines come late."""
        agent.wait_for(r"slot \d+ is pid (.|\n)*slot \d+ is pid")

    def wait_until_somebody_says(self, what):
        """Wait for the output of any of its machines: only the first to detect something reports it."""
        wait_until(lambda: what in self.output, lambda: f"{what} in {self.output}")

    @property
    def output(self):
        return "".join(agent.output for agent in self.agents.values())

    def go_on(self):
        """To the end, without pauses."""
        for agent in self.agents.values():
            agent.go_on()


@functools.cache
def undisturbed(folder, ranks, steps):
    flags = ["run", "--standalone", f"--nproc-per-node={ranks}", str(RECIPES / "train.py")]
    calm = Command([*NTP, *flags], folder / f"calm{ranks}", STEPS=str(steps), PAUSE_S="0")
    code, output = calm.end()
    assert code == 0, output
    return last_line(output)[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


def assert_undisturbed(output, folder, ranks, steps):
    assert last_line(output)[:2] == pytest.approx(undisturbed(folder, ranks, steps), rel=1e-10)


ENDS_LATE = """
import os, runpy, time
runpy.run_path({train!r}, run_name="__main__")
if os.environ["MACHINE"] == "2":
    time.sleep({late_s})
"""


@pytest.mark.parametrize("late_s", [0.8, 15.0])
def test_workers_of_one_machine_end_later_than_those_where_the_store_is(tmp_path, late_s):
    """The job is over on all: the store's machine waits for the others for a while, and they need it no more then."""
    script = tmp_path / "late.py"
    script.write_text(ENDS_LATE.format(train=str(RECIPES / "train.py"), late_s=late_s))
    with machines(2, tmp_path) as hosts:
        job = Job(hosts, 2, steps=5, pause_s=0, script=script)
        for at in (1, 2):
            code, output = job.agents[at].end()
            assert code == 0, (at, output)


def test_a_spare_machine_replaces_a_lost_one(tmp_path, folder):
    with machines(3, tmp_path) as hosts:
        job = Job(hosts, 2)
        job.wait_until_it_trains()
        spare = job.start(3)
        spare.wait_for("all 2 hosts of the job are there; this machine waits as a spare")
        first = job.agents[1]
        first_host = int(first.wait_for(r"slot (\d+) is pid")[1]) // 2
        hosts.kill(2)
        first.wait_for(r"slot \d is lost: no beat of its host")
        spare.wait_for(f"this machine takes the place of host {1 - first_host}")
        job.wait_until_in(spare)
        job.go_on()
        code, output = spare.end()
        assert code == 0, output
        code, output_of_first = first.end()
        assert code == 0, output_of_first
        assert_undisturbed(output + output_of_first, folder, 4, STEPS)
        assert last_line(output + output_of_first)[2] == "(0, 1, 2, 3)"


@with_cuts
def test_a_disconnected_machine_ends_its_workers_and_the_others_continue(tmp_path, folder):
    with machines(2, tmp_path) as hosts:
        job = Job(hosts, 2)
        job.wait_until_it_trains()
        hosts.cut(1, 2)
        code, output = job.agents[2].end()
        assert code == 6, output
        assert "this host is cut off, or the store's host is lost" in output
        assert not hosts.pids(2)
        hosts.heal(1, 2)
        job.go_on()
        code, output = job.agents[1].end()
        assert code == 0, output
        assert_undisturbed(output, folder, 4, STEPS)


@with_cuts
def test_ranks_cut_off_for_a_short_time_are_evicted(tmp_path, folder):
    """The others have continued; the disconnected ranks detect that, and do not train on beside them."""
    with machines(2, tmp_path) as hosts:
        job = Job(hosts, 2, limits=PATIENT)
        job.wait_until_it_trains()
        hosts.cut(1, 2)
        job.agents[1].wait_for("is lost: no beat of its host")
        hosts.heal(1, 2)
        job.agents[2].wait_for("the others went on without it")  # a worker or its supervisor finds it first
        job.agents[2].wait_for("all workers of this host have ended")  # from here on it needs the store no more
        job.go_on()
        code, output = job.agents[1].end()
        assert code == 0, output
        assert_undisturbed(output, folder, 4, STEPS)
        code, output = job.agents[2].end()
        assert code == 0, f"its job was done, by the others: {output}"


def test_losing_the_machine_of_the_store_ends_the_job_with_an_error(tmp_path):
    with machines(2, tmp_path) as hosts:
        job = Job(hosts, 2, steps=10000)
        job.wait_until_it_trains()
        hosts.kill(1)
        code, output = job.agents[2].end()
        assert code == 6, output
        assert "the job's store" in output
        assert "restart" in output
        assert "Traceback" not in output
        assert not hosts.pids(2)


@with_cuts
def test_with_an_outside_store_the_majority_side_of_a_network_split_continues(tmp_path, folder):
    with machines(4, tmp_path) as hosts:
        store = hosts.run(4, "store", "--host", hosts.address(4), "--port", str(PORT), name="store")
        store.wait_for("ntp store: ")
        job = Job(hosts, 3, store_at=4)
        job.wait_until_it_trains()
        hosts.cut(1, 2)
        hosts.cut(1, 3)
        job.wait_until_somebody_says("its host is cut off from others")
        job.go_on()
        code, output = job.agents[2].end()
        assert code == 0, output
        code, output_of_third = job.agents[3].end()
        assert code == 0, output_of_third
        assert_undisturbed(output + output_of_third, folder, 6, STEPS)
        code, output = job.agents[1].end()
        assert code == 0, f"its job was done, by the others: {output}"
        assert "slot" in output
