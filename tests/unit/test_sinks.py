"""Sinks of events: the real wandb, offline, read back from its file; a page for Prometheus; sinks that fail."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest
import torch

import ntp_plugin
from ntp_plugin.cli.main import main
from ntp_plugin.config.sections import CopyPolicy, TrainingPolicy
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.recording import RecordingOptions
from ntp_plugin.launch.records import newest_record
from ntp_plugin.recovery.rank_context import RankContext
from ntp_plugin.telemetry import Committed, Compared, Copied, Corrupted, EventWriter, Follower, RankLost, Recovered
from ntp_plugin.telemetry.relay import Relay
from ntp_plugin.telemetry.wandb_sink import passed_to_workers
from tests.unit.wandb_file import records

SLOTS = ["r0.s0.t0", "r0.s0.t1", "r1.s0.t0", "r1.s0.t1"]
VARIABLES_OF_NTP_RUN = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "run",
    "NTP_TOKEN": "a token",
    "NTP_HEARTBEATS": "/nowhere/heartbeats",
    "NTP_HEARTBEAT_S": "0.02",
    "NTP_HUNG_S": "30",
}
PLACE = RankContext.read(VARIABLES_OF_NTP_RUN)
POLICY = TrainingPolicy(enabled=True, min_tp_width=1, copies=CopyPolicy(mode="near"))
BEGAN = PLACE.beginning(POLICY, PLACE.topology(POLICY, tp=2), micro_batches=2, framework={"megatron-core": "0.19.2"})


def recovered(epoch, *, lost, back, widths, micro_batches):
    phases = {"agree": 0.01, "regroup": 0.02, "move": 0.03}
    return Recovered(
        epoch=epoch, seconds=0.06, lost=lost, back=back, widths=widths, micro_batches=micro_batches, phases=phases
    )


def write_a_run(folder):
    """Five steps of two replicas, recorded by all members; one slot is lost in the third step, a new process replaces
    it in the fourth, and two slots record the second step once more."""
    folder.mkdir(exist_ok=True)
    writers = {slot: EventWriter(folder / "events.jsonl", slot) for slot in SLOTS}
    for number, slot in enumerate(SLOTS):
        writers[slot].write(dataclasses.replace(BEGAN, number=number, pid=100 + number))

    def write_all(event, *, but=()):
        for slot in SLOTS:
            if slot not in but:
                writers[slot].write(event)

    for step in range(1, 6):
        away = ["r0.s0.t1"] if step == 3 else []
        if step == 3:
            lost = RankLost(number=1, pid=101, kind="ended", reason="its process ended with code -9")
            EventWriter(folder / "events.jsonl", "host0").write(lost)
            write_all(recovered(1, lost=away, back=[], widths=[[1], [2]], micro_batches=[1, 3]), but=away)
        if step == 4:
            writers["r0.s0.t1"].write(dataclasses.replace(BEGAN, number=1, pid=201, joiner=True))
            write_all(recovered(2, lost=[], back=["r0.s0.t1"], widths=[[2], [2]], micro_batches=[2, 2]))
        losses = {"lm loss": 5.0 - step}
        write_all(Committed(step=step, epoch=max(0, step - 2), seconds=0.1, losses=losses, samples=[]), but=away)
        write_all(Copied(step=step, size=1000, taken_s=0.0, seconds=0.0, far=1), but=away)
    for slot in SLOTS[:2]:
        writers[slot].write(Committed(step=2, epoch=1, seconds=0.1, losses={"lm loss": 3.0}, samples=[]))
    write_all(Compared(step=5, values=12, odd=1))
    write_all(Corrupted(step=5, what="weight w", slots=["r0.s0.t0", "r1.s0.t0"], certain=False, healed=False))


def relayed(folder, *words, environment):
    """The output of the relay process, which ends at once: it hands over what is there."""
    done = subprocess.run(
        [sys.executable, "-m", "ntp_plugin.telemetry.relay", str(folder), *words],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def wandb_records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_a_run(folder)
    environment = {"WANDB_MODE": "offline", **passed_to_workers({}, str)}
    output = relayed(folder, "--wandb", "some-project", environment=environment)
    assert "wandb: " in output
    assert "failed" not in output
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    (table,) = path.parent.glob("files/media/table/ntp/*.table.json")
    return records(path), environment["WANDB_RUN_ID"], json.loads(table.read_text())


def history(found):
    """Name -> its values, in order."""
    series = {}
    for record in found:
        if record.WhichOneof("record_type") != "history":
            continue
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            series.setdefault(name, []).append(json.loads(item.value_json))
    return series


def test_wandb_has_one_run_with_its_layout_as_its_configuration(wandb_records):
    found, name, _ = wandb_records
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {name}
    assert {run.project for run in runs} == {"some-project"}
    updates = [item for record in found if record.HasField("config") for item in record.config.update]
    layout = next(json.loads(item.value_json) for item in updates if (item.key or item.nested_key[0]) == "ntp")
    settings, versions = layout.pop("settings"), layout.pop("versions")
    assert layout == {"replicas": 2, "stages": 1, "tp": 2, "micro_batches": [2, 2]}
    asked = ("enabled", "min_tp_width", "copies.mode", "copies.count", "on_sdc")
    assert [settings.get(name) for name in asked] == ["True", "1", "near", "1", "stop"]
    assert not {"lost", "events", "copies.max_host_gb"} & set(settings), "unset options without a default"
    assert versions == {"ntp-plugin": ntp_plugin.__version__, "torch": torch.__version__, "megatron-core": "0.19.2"}


def test_wandb_has_each_number_once_over_an_axis_that_grows(wandb_records):
    series = history(wandb_records[0])
    assert series["ntp/loss/lm_loss"] == [4.0, 3.0, 2.0, 1.0, 0.0], "one for each step, from any rank, and again"
    assert series["ntp/step"] == sorted(series["ntp/step"])
    assert series["ntp/width/r0"] == [2, 2, 1, 2, 2]
    assert series["ntp/micro_batches/r1"] == [2, 2, 3, 2, 2]
    assert series["ntp/epoch"] == [0, 0, 1, 2, 2]
    assert len(series["ntp/goodput"]) == len(series["ntp/step_s"]) == 5
    assert series["ntp/recovery_s"] == [0.06] * 2
    assert series["ntp/recovery_s/regroup"] == [0.02] * 2
    assert series["ntp/copies/lag_steps"] == [0] * 5
    assert series["ntp/copies/bytes"] == [1000] + [4000] * 4
    assert (series["ntp/digests/compared"], series["ntp/digests/odd"]) == ([12], [1]), "once, though all report it"


def test_wandb_has_an_alert_for_each_incident_and_a_table_of_them(wandb_records):
    found, _, table = wandb_records
    alerts = [record.alert for record in found if record.WhichOneof("record_type") == "alert"]
    assert [alert.title for alert in alerts] == [
        "ntp: slot 1 is lost",
        "ntp: the job goes on (lost: r0.s0.t1)",
        "ntp: the job goes on (back: r0.s0.t1)",
        "ntp: replicas differ: r0.s0.t0, r1.s0.t0",
    ]
    assert [alert.level for alert in alerts] == ["WARN", "WARN", "WARN", "ERROR"]
    series = history(found)
    assert (series["ntp/events/_type"], series["ntp/events/nrows"]) == (["table-file"], [4])
    assert table["columns"] == ["at", "step", "epoch", "event", "what"]
    times = [row.pop(0) for row in table["data"]]
    assert times == sorted(times)
    assert time.time() - 600 < times[0] <= times[-1] <= time.time()
    after = "after 0.06 s; widths {}; micro-batches {}"
    assert table["data"] == [
        [2, 0, "RankLost", "slot 1 is lost: pid 101: its process ended with code -9"],
        [2, 1, "Recovered", f"the job goes on (lost: r0.s0.t1): {after.format('1, 2', '1, 3')}"],
        [3, 2, "Recovered", f"the job goes on (back: r0.s0.t1): {after.format('2, 2', '2, 2')}"],
        [5, 2, "Corrupted", "replicas differ: r0.s0.t0, r1.s0.t0: weight w after step 5"],
    ]


def test_the_relay_of_a_replacement_of_the_first_host_continues_after_the_last_record(tmp_path):
    write_a_run(tmp_path / "whole")
    lines = (tmp_path / "whole" / "events.jsonl").read_bytes().splitlines(keepends=True)
    until = next(number for number, line in enumerate(lines) if b'"step": 4' in line)
    environment = {"WANDB_MODE": "offline", **passed_to_workers({}, str)}
    histories, alerts, tables = [], [], []
    for part in (lines[:until], lines[until:]):
        with (tmp_path / "events.jsonl").open("ab") as record:
            record.writelines(part)
        relayed(tmp_path, "--wandb", "some-project", environment=environment)
        path = max(tmp_path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
        found = records(path)
        histories.append(history(found))
        alerts.append([record.alert.title for record in found if record.WhichOneof("record_type") == "alert"])
        (table,) = path.parent.glob("files/media/table/ntp/*.table.json")
        tables.append([row[3] for row in json.loads(table.read_text())["data"]])
    assert [series["ntp/loss/lm_loss"] for series in histories] == [[4.0, 3.0, 2.0], [1.0, 0.0]]
    assert min(histories[1]["ntp/step"]) >= max(histories[0]["ntp/step"])
    assert [len(titles) for titles in alerts] == [3, 1]
    assert tables == [["RankLost", "Recovered", "Recovered"], ["RankLost", "Recovered", "Recovered", "Corrupted"]]


def test_workers_get_the_run_and_keep_the_users_own_choice():
    ours = passed_to_workers({}, str)
    assert ours["WANDB_RESUME"] == "allow"
    assert ours["WANDB_RUN_ID"] != passed_to_workers({}, str)["WANDB_RUN_ID"]
    assert passed_to_workers({}, lambda _: "that of the first host")["WANDB_RUN_ID"] == "that of the first host"
    assert passed_to_workers({"WANDB_RUN_ID": "mine"}, str)["WANDB_RUN_ID"] == "mine"


def begun(folder, *, founds):
    return RecordingOptions(folder=folder).begin({}, host=1, founds=founds, agreed=str, log=print)


def test_a_replacement_host_continues_the_record_and_a_new_run_does_not(tmp_path):
    lost = RankLost(number=1, pid=1, kind="ended", reason="code -9")
    for founds in (True, False):
        underway = begun(tmp_path, founds=founds)
        underway.write(lost)
        underway.end()
    assert [one.event for one in Follower(tmp_path).news()] == [lost, lost]
    with pytest.raises(ConfigError, match="the record of another run"):
        begun(tmp_path, founds=True)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


LOST = RankLost(number=1, pid=1, kind="ended", reason="code -9")


def run_without_a_folder(*, is_recorded=True):
    underway = begun(None, founds=True)
    if is_recorded:
        underway.write(LOST)
    underway.end()
    return Path(underway.passed_to_workers["NTP_EVENTS"]).parent


def test_a_run_without_a_given_folder_has_a_record(temporary, capsys):
    folder = run_without_a_folder()
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o077 == 0
    assert f"the record of this run is {folder}" in capsys.readouterr().out
    assert newest_record() == folder
    assert [one.event for one in Follower(folder).news()] == [LOST]


def test_a_deleted_record_is_no_error_at_the_end(temporary):
    underway = begun(None, founds=True)
    shutil.rmtree(Path(underway.passed_to_workers["NTP_EVENTS"]).parent)
    underway.write(LOST)
    underway.end()
    assert not list(temporary.iterdir())


def test_the_last_ten_records_are_kept_and_living_runs_are_not_removed(temporary):
    living = begun(None, founds=True)
    living.write(LOST)
    ended = [run_without_a_folder() for _ in range(12)]
    assert set(temporary.iterdir()) == {*ended[-10:], Path(living.passed_to_workers["NTP_EVENTS"]).parent}
    living.end()


def test_a_run_without_events_leaves_no_record_and_a_full_disk_is_reported(temporary, monkeypatch, capsys):
    run_without_a_folder(is_recorded=False)
    assert not list(temporary.iterdir())
    with pytest.raises(ConfigError, match="there is no record of a run in"):
        newest_record()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    assert not begun(None, founds=True).passed_to_workers
    assert "no record of this run is kept" in capsys.readouterr().out


def test_prometheus_finds_the_numbers_on_loopback_only(tmp_path):
    write_a_run(tmp_path)
    words = [sys.executable, "-m", "ntp_plugin.telemetry.relay", str(tmp_path), "--prometheus", "0"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as relay:
        address = relay.stdout.readline().split()[-1]  # printed when all present events have been handed over
        assert address.startswith("http://127.0.0.1:")
        page = urllib.request.urlopen(address, timeout=30).read().decode()
        relay.stdin.close()  # which ends it
    assert relay.returncode == 0
    metrics = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert metrics["ntp_step"] == "5.0"
    assert metrics['ntp_slots{state="back"}'] == "1.0"
    assert metrics['ntp_width{replica="r0"}'] == "2.0"
    assert metrics['ntp_troubles_total{kind="RankLost"}'] == "1.0"
    assert metrics['ntp_troubles_total{kind="Corrupted"}'] == "1.0", "once, though all report it"


@dataclasses.dataclass
class Broken:
    """A sink whose server is away from the third event on."""

    heard: int = 0

    def receive(self, *_, **__):
        self.heard += 1
        if self.heard == 3:
            raise ConnectionError("the server is away")

    def close(self):
        raise AssertionError("one that has failed is not called again")


@dataclasses.dataclass
class Working:
    """A sink that takes every event."""

    heard: int = 0
    again: int = 0
    closed: bool = False

    def receive(self, *_, again, **__):
        self.heard += 1
        self.again += again

    def close(self):
        self.closed = True


def test_a_failing_sink_is_dropped_and_the_others_continue(tmp_path):
    write_a_run(tmp_path)
    broken, working, log = Broken(), Working(), []
    relay = Relay(Follower(tmp_path), [broken, working], position_file=tmp_path / "come-to", log=log.append)
    relay.hand_over()
    relay.close()
    assert (broken.heard, working.closed) == (3, True)
    assert working.heard == len(Follower(tmp_path).news())
    assert log == ["Broken failed and is dropped: ConnectionError: the server is away"]


@pytest.mark.parametrize(
    ("left", "again"), [(None, 18), ("", 0), ("[]", 0), ('{"events.jsonl": "x"}', 0), ('{"other.jsonl": 9}', 0)]
)
def test_a_killed_relay_leaves_its_position(tmp_path, left, again):
    write_a_run(tmp_path)
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines[:18]) + lines[18][:9])
    position_file, sinks = tmp_path / "handed-over.json", [Working(), Working()]
    Relay(Follower(tmp_path), sinks[:1], position_file=position_file, log=print).hand_over()
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    if left is not None:
        position_file.write_text(left)
    Relay(Follower(tmp_path), sinks[1:], position_file=position_file, log=print).hand_over()
    assert [(sink.heard, sink.again) for sink in sinks] == [(18, 0), (len(lines), again)]


def test_events_that_a_failed_sink_missed_do_not_count_as_delivered(tmp_path):
    write_a_run(tmp_path)
    position_file = tmp_path / "handed-over.json"
    Relay(Follower(tmp_path), [Broken()], position_file=position_file, log=print).hand_over()
    assert not position_file.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ntp-wandb", "p"], "--ntp-run-dir"),
        (["--ntp-prometheus", "9000"], "--ntp-run-dir"),
        (["--ntp-chaos"], "--ntp-run-dir"),
        (["--ntp-run-dir", "there", "--ntp-prometheus", "99999"], "'99999' is not a whole number from 0 to 65,535"),
    ],
)
def test_a_missing_sink_is_refused_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words, "--standalone", "--nproc-per-node=1", "nothing.py"]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
