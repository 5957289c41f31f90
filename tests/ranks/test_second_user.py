"""Another user of the host (`nobody`) cannot change the result of a running job."""

import contextlib
import os
import re
import socket
import traceback
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_plugin.membership.protocol import View
from tests.ranks.command import NTP, PAUSED, RECIPES, Command, last_line
from tests.ranks.test_store_fuzz import children

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def as_nobody(what):
    """Have a child process of that user do it; whatever it finds wrong fails the test."""
    pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "see what it has printed"
        return
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        what()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def reads_nothing_of(pids, folders):
    for pid in pids:
        for name in ("environ", "mem"):
            with pytest.raises(PermissionError):
                Path(f"/proc/{pid}/{name}").read_bytes()
        with pytest.raises(PermissionError):
            os.kill(pid, 9)
    assert folders
    for folder in folders:
        with pytest.raises(PermissionError):
            list(folder.iterdir())
        with pytest.raises(PermissionError):
            (folder / "planted").touch()


def listening_ports():
    """In this network namespace, where other programs may listen as well: those of loopback."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A" and local.startswith("0100007F"):
            yield int(local.split(":")[1], 16)


def rings():
    """All wake-up sockets that it can see."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        for name in re.findall(r"@(ntp/\S+)", Path("/proc/net/unix").read_text()):
            for _ in range(100):
                with contextlib.suppress(OSError):
                    stranger.sendto(b"garbage", f"\0{name}")


def forges(run, port):
    """It gets the port and the name of the run, which it has not found out by itself."""
    theirs = PrefixStore(f"ntp/{run}", TCPStore("127.0.0.1", port, None, False))
    theirs.set("view/1", View(epoch=1, member_ids=(), over=True).encode())
    theirs.set("done/0/0", "done")
    theirs.set("token", "another")


def test_a_second_user_cannot_change_a_job(tmp_path):
    before = set(Path("/dev/shm").iterdir())
    words = [*NTP, "run", "--standalone", "--nproc-per-node=2", str(PAUSED)]
    job = Command(words, tmp_path / "log", STEPS="200", PAUSE_S="0.1", RECIPE=str(RECIPES / "train.py"))
    pids = [int(job.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in range(2)]
    variables = dict(
        pair.split("=", 1) for pair in Path(f"/proc/{pids[0]}/environ").read_text().split("\0") if "=" in pair
    )
    port = int(variables["MASTER_PORT"])
    assert port in listening_ports()
    assert {*pids} <= {*children(job.process.pid)}
    folders = [path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("ntp-")]
    as_nobody(lambda: reads_nothing_of([job.process.pid, *pids], folders))
    as_nobody(lambda: forges(variables["TORCHELASTIC_RUN_ID"], port))
    as_nobody(rings)
    job.go_on()
    code, output = job.end()
    assert code == 0, output
    assert "step 200:" in output, output
    assert last_line(output)[2] == "(0, 1)"
