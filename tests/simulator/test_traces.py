"""Traces and machines from files: the contents, and the wrong line."""

import json
from random import Random

import pytest

from ntp_plugin.errors import ConfigError
from ntp_plugin.simulator.failures import DAY_S, Outage, replay_outages
from ntp_plugin.simulator.machine import FOLDER, known, parse, read_machine
from ntp_plugin.simulator.traces import read_trace

ROWS = [("a", 1.0, 2.5), ("b", 0.5, 9.0), ("a", 4.0, 4.25)]
EXPECTED = [("b", 0.5, 9.0), ("a", 1.0, 2.5), ("a", 4.0, 4.25)]


def days(outages):
    return [(one.domain, one.start_s / DAY_S, one.end_s / DAY_S) for one in outages]


def test_csv_json_and_events_say_the_same(tmp_path):
    table = tmp_path / "trace.csv"
    table.write_text("domain,start,end\n" + "".join(f"{name},{start},{end}\n" for name, start, end in ROWS))
    objects = tmp_path / "trace.json"
    objects.write_text(json.dumps([dict(zip(("domain", "start", "end"), row, strict=True)) for row in ROWS]))
    events = tmp_path / "events.json"
    rows = [(name, start, "fault_start") for name, start, _ in ROWS] + [
        (name, end, "fault_end") for name, _, end in ROWS
    ]
    events.write_text(
        json.dumps([{"node_id": n, "event_time": at, "event_type": kind} for n, at, kind in rows], indent=1)
    )
    assert days(read_trace(table)) == days(read_trace(objects)) == days(read_trace(events)) == EXPECTED


def test_a_fault_that_never_ends_lasts_to_the_last_event(tmp_path):
    path = tmp_path / "events.json"
    rows = [("a", 1, "fault_start"), ("b", 2, "fault_start"), ("b", 7, "fault_end")]
    path.write_text(json.dumps([{"node_id": n, "event_time": at, "event_type": kind} for n, at, kind in rows]))
    assert days(read_trace(path)) == [("a", 1, 7), ("b", 2, 7)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "domain,start,end\na,1,2\nb,3,2\n", "line 3: end = 2 is not after start = 3"),
        ("t.csv", "domain,start,end\na,1,2\nb,soon,2\n", "line 3: start = 'soon' is not a number of days"),
        ("t.csv", "domain,start,end\n,1,2\n", "line 2: domain is missing"),
        ("t.csv", "domain,start,end\na,1\n", "line 2: end = None is not a number of days"),
        ("t.csv", "domain,begin,end\na,1,2\n", "line 1: the heading has no column start"),
        ("t.csv", "domain,start,end\na,-1,2\n", "line 2: start = '-1' is not a number of days from 0 on"),
        ("t.csv", "domain,start,end\n", "has no outages"),
        ("t.json", '[\n {"domain": "a", "start": 1, "end": 2},\n {"domain": "b", "start": 1}\n]', "line 3: end = None"),
        ("t.json", '[\n {"domain": "a", "start": 1, "end": 2},\n {"domain": "b", start: 1}\n]', "line 3: not JSON"),
        ("t.json", '[\n {"domain": "a", "start": 1, "end": 2}\n {"domain": "b"}]', "line 3: a comma or the end"),
        ("t.json", '[\n {"domain": "a", "start": 1, "end": 2}', "a comma or the end of the list is missing"),
        ("t.json", '{"domain": "a"}', "line 1: not a list"),
        ("t.json", "[\n[1, 2]]", r"line 2: \[1, 2\] is not an object"),
        (
            "t.json",
            '[{"node_id": "a", "event_time": 1, "event_type": "fault_start"},\n'
            ' {"node_id": "b", "event_time": 2, "event_type": "fault_end"}]',
            "line 2: b ends a fault that has not started",
        ),
        ("t.json", '[{"node_id": "a", "event_time": 1, "event_type": "oops"}]', "line 1: event_type = 'oops'"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_scaled_domains_see_the_faults_of_the_trace():
    outages = [Outage(domain=f"n{number}", start_s=number * 10.0, end_s=number * 10.0 + 5) for number in range(4)]
    options = {"watched": 6, "domain_gpus": 8, "gpus_per_fault": 2, "horizon_s": 1000.0}
    same = replay_outages(Random(1), outages, domains=6, **options)
    assert [(one.start_s, one.end_s) for one in same] == [(one.start_s, one.end_s) for one in outages]
    assert len({one.domain for one in same}) == 4
    assert all(len(one.gpus) == 2 and one.gpus.stop <= 8 and one.expected_s == 5 for one in same)
    twice = replay_outages(Random(1), outages, domains=12, **options)
    assert len(twice) == 8
    assert sorted({one.start_s for one in twice}) != sorted({one.start_s for one in same})
    assert replay_outages(Random(1), outages, domains=12, **options) == twice
    assert len(replay_outages(Random(1), outages, domains=6, **(options | {"horizon_s": 15.0}))) == 2


# ---------------------------------------------------------------- machines


def test_every_machine_has_a_source_for_every_constant():
    assert known() == ("a100-nvl8", "b200-nvl32", "b200-nvl72", "h100-nvl8")
    for name in known():
        assert read_machine(name).domain_gpus in (8, 32, 72)


def test_a_constant_without_a_source_is_refused(tmp_path):
    text = (FOLDER / "h100-nvl8.toml").read_text()
    start = text.index("source", text.index("[nic_us]"))
    end = text.index("\n", start)
    path = tmp_path / "mine.toml"
    path.write_text(text[:start] + text[end:])
    with pytest.raises(ConfigError, match="nic_us has no source"):
        read_machine(str(path))
    path.write_text(text)
    assert read_machine(str(path)) == read_machine("h100-nvl8")


def test_an_unknown_or_incomplete_machine_is_one_line():
    with pytest.raises(ConfigError, match=r"machine = 'v100' is not known. Fix: choose from a100-nvl8, b200"):
        read_machine("v100")
    with pytest.raises(ConfigError, match="domain_gpus has no source"):
        parse({}, where="x.toml")
    whole = {"value": 1, "source": "s"}
    with pytest.raises(ConfigError, match="watts is not a constant"):
        parse(dict.fromkeys([*_names(), "watts"], whole), where="x.toml")
    with pytest.raises(ConfigError, match="tflops = 'fast' must be a number"):
        parse(dict.fromkeys(_names(), whole) | {"tflops": {"value": "fast", "source": "s"}}, where="x.toml")


def _names():
    import dataclasses  # noqa: PLC0415

    from ntp_plugin.simulator.machine import GpuModel  # noqa: PLC0415

    return [field.name for field in dataclasses.fields(GpuModel)]
