"""The report on a campaign: complete, self-contained, and right in a browser."""

import dataclasses
import json
import shutil
import struct
import subprocess
from xml.etree import ElementTree

import pytest

from ntp_plugin.chaos.faults import OrderedFault, RequestedFaults, Unordered
from ntp_plugin.chaos.page import PageContent, write_page
from ntp_plugin.chaos.verdict import End, Expected, judge, look_over
from ntp_plugin.cli.main import main
from ntp_plugin.telemetry import EventWriter
from tests.unit.chaos_runs import VICTIM, history, run_events

FAULT = OrderedFault(name="1", what="kill", slot=VICTIM, during="backward", step=3)
FINE = Expected(bound=1e-12)


@pytest.fixture
def report(tmp_path):
    record = tmp_path / "broken"
    record.mkdir()
    for one in run_events(killed_in=3, back_in=5):
        EventWriter(record / "events.jsonl", one.slot).write(one.event)
    run = history(killed_in=3, back_in=5)
    found = judge(RequestedFaults(faults=(FAULT,)), run, history(), End(code=0), FINE)
    return PageContent(
        title="<a recipe>",
        record=record,
        run=run,
        reference=history(),
        verdict=found,
        bound=1e-12,
        command="ntp chaos a&b",
    )


def test_the_page_holds_all_of_it_and_needs_nothing_else(report, tmp_path):
    page = write_page(report, tmp_path).read_text()
    assert "&lt;a recipe&gt;" in page
    assert "a&amp;b" in page
    assert page.count("<svg") == 5
    assert "src=" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    for svg in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")


def test_the_first_paragraph_says_what_was_run_and_whether_anything_was_lost(report, tmp_path):
    page = write_page(report, tmp_path).read_text()
    assert "<h1>Fault injection report: &lt;a recipe&gt;</h1>" in page
    assert "A training job on 4 ranks" in page
    assert "Faults injected: 1 of 1. The job went on after 1 of them" in page
    assert "No step was lost, and no sample was lost or used twice." in page
    headings = page.count("<h2>")
    assert page.count('<p class="small">') == headings, "a legend for each table and chart"


def test_its_charts_are_also_one_image(report, tmp_path):
    page = write_page(report, tmp_path)
    header = page.with_name("report.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", header[16:])
    assert 1000 < width < height, "one below the other"


def test_the_page_lists_what_is_wrong(report, tmp_path):
    broken = judge(RequestedFaults(faults=(FAULT,)), history(killed_in=3, loss=5.1), history(), End(code=0), FINE)
    page = write_page(dataclasses.replace(report, verdict=broken), tmp_path).read_text()
    assert "Something is not as it should be" in page
    assert "✗ no" in page
    assert "✗ no" not in write_page(report, tmp_path).read_text()


def test_a_fault_never_injected_is_on_the_page_and_in_the_json(report, tmp_path):
    left = Unordered(fault=OrderedFault(name="2", what="sigkill", slot="any"), why="the job was over")
    asked = RequestedFaults(faults=(FAULT,), unordered=(left,), drawn=("1",), to_be_drawn=12)
    found = judge(asked, report.run, history(), End(code=0), FINE)
    page = write_page(dataclasses.replace(report, verdict=found), tmp_path).read_text()
    assert "Faults injected: 1 of 2" in page
    assert "never injected: the job was over" in page
    assert "1 of 12 were drawn" in page
    verdict_json = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict_json["holds"] is False
    assert verdict_json["samples"] == {"drawn": 24, "twice": 0, "missing": 0, "others": 0, "steps": []}
    assert verdict_json["drawn"] == {"of": 12, "drawn": 1, "injected": 1}
    assert [(fault["name"], fault["injected_at"] > 0) for fault in verdict_json["faults"]] == [
        ("1", True),
        ("2", False),
    ]


def browsed(folder, *words):
    base = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/browser"]
    return subprocess.run([*base, *words], capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed (.ci/browser does it)")
def test_the_page_looks_right_in_a_browser(report, tmp_path):
    """Everything is drawn within the width of the window, from the heading to the last line."""
    page = write_page(report, tmp_path)
    probe = (
        "<script>onload=()=>{"
        "const all=[...document.querySelectorAll('svg,table,li,h2')].map(e=>e.getBoundingClientRect());"
        "document.title=JSON.stringify({wide:Math.max(...all.map(r=>r.right)),low:Math.min(...all.map(r=>r.height)),"
        "svgs:document.querySelectorAll('svg').length,scroll:document.documentElement.scrollWidth})}</script></body>"
    )
    page.write_text(page.read_text().replace("</body>", probe))
    shown = browsed(tmp_path, "--window-size=900,1200", "--dump-dom", page.as_uri())
    title = shown.split("<title>")[1].split("</title>")[0].replace("&quot;", '"')
    seen = dict(pair.split(":") for pair in title.strip("{}").replace('"', "").split(","))
    assert float(seen["wide"]) <= 900
    assert float(seen["scroll"]) <= 900
    assert float(seen["low"]) > 10
    assert int(seen["svgs"]) == 5
    picture = tmp_path / "page.png"
    browsed(tmp_path, "--window-size=900,2400", f"--screenshot={picture}", page.as_uri())
    assert picture.stat().st_size > 50_000


def test_a_report_is_made_from_the_record_alone(report, tmp_path, capsys):
    reference = tmp_path / "reference"
    reference.mkdir()
    for one in run_events():
        EventWriter(reference / "events.jsonl", one.slot).write(one.event)
    assert main(["report", str(report.record), "--reference", str(reference)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert look_over(report.run, history(), bound=1e-12).outcomes[0].name == "1"
