import argparse
import json

import pytest

from ntp_plugin.config import schema
from ntp_plugin.config.files import read_file
from ntp_plugin.config.sections import Job, Policy
from ntp_plugin.errors import ConfigError

WANTED = {
    "enabled": True,
    "min_tp_width": 3,
    "route": "direct",
    "batch": {"mode": "trim", "epsilon": 0.02},
    "copies": {"count": 2},
}
TOML = """
[ntp]
enabled = true
min_tp_width = 3
route = "direct"
[ntp.batch]
mode = "trim"
epsilon = 0.02
[ntp.copies]
count = 2
"""
FLAGS = (
    "--ntp-enable --ntp-min-tp-width 3 --ntp-route=direct --ntp-batch-mode trim --ntp-batch-epsilon 0.02 "
    "--ntp-copies-count 2"
)


def from_flags(words, section=Policy, prefix="ntp-"):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    schema.add_flags(parser, section, prefix=prefix)
    flags = schema.flag_values(section, parser.parse_args(words.split()), prefix=prefix)
    return schema.build(section, flags, name=schema.dotted())


def test_toml_json_and_flags_mean_the_same(tmp_path):
    toml, ds_config = tmp_path / "job.toml", tmp_path / "ds_config.json"
    toml.write_text(TOML)
    ds_config.write_text(json.dumps({"train_batch_size": 8, "ntp": WANTED}))
    policies = [
        schema.read(Policy, read_file(toml)["ntp"], where="ntp."),
        schema.read(Policy, read_file(ds_config)["ntp"], where="ntp."),
        from_flags(FLAGS),
    ]
    assert policies[0] == policies[1] == policies[2]
    assert policies[0].batch.epsilon == 0.02
    assert policies[0].copies.far == "node", "missing keys have their default"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"min_tp_widht": 2}, 'ntp.min_tp_widht is not a known key. Fix: did you mean "min_tp_width"?'),
        ({"batch": {"mode": "strikt"}}, "ntp.batch.mode = 'strikt' is not allowed. Fix: did you mean \"strict\"?"),
        ({"batch": {"modus": "trim"}}, "ntp.batch.modus is not a known key"),
        ({"batch": "trim"}, "ntp.batch must be a table of keys, not 'trim'. Fix: known keys: mode, epsilon."),
        ({"min_tp_width": "3"}, "ntp.min_tp_width = '3' must be a whole number"),
        ({"min_tp_width": True}, "ntp.min_tp_width = True must be a whole number"),
        ({"min_tp_width": 2.0}, "ntp.min_tp_width = 2.0 must be a whole number"),
        ({"min_tp_width": None}, "ntp.min_tp_width = None must be a whole number"),
        ({"min_tp_width": 0}, "ntp.min_tp_width = 0 must be at least 1"),
        ({"copies": {"count": 99}}, "ntp.copies.count = 99 must be at most 8"),
        ({"batch": {"epsilon": float("nan")}}, "ntp.batch.epsilon = nan must be a finite number"),
        ({"enabled": "yes"}, "ntp.enabled = 'yes' must be true or false"),
        ({7: 1}, "ntp.7 is not a known key"),
        ([], "ntp must be a table of keys, not []"),
    ],
)
def test_a_bad_block_is_refused_by_its_key(block, message):
    with pytest.raises(ConfigError) as caught:
        schema.read(Policy, block, where="ntp.")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ntp-min-tp-width three", "--ntp-min-tp-width = 'three' must be a whole number"),
        ("--ntp-batch-epsilon inf", "--ntp-batch-epsilon = inf must be a finite number"),
        ("--ntp-route directly", 'did you mean "direct"?'),
    ],
)
def test_a_bad_flag_is_refused_by_its_name(words, message):
    with pytest.raises(ConfigError) as caught:
        from_flags(words)
    assert message in str(caught.value)


def test_missing_parts_are_named():
    with pytest.raises(ConfigError, match=r"parallel\.tp is missing\. Fix: give it: tensor-parallel degree"):
        schema.read(Job, {}, where="")


def test_flags_win_over_the_file_key_by_key():
    flags, written = {"min_tp_width": 2, "batch": {"mode": "carry"}}, {"min_tp_width": 4, "batch": {"epsilon": 0.1}}
    policy = schema.build(Policy, flags, written, name=schema.dotted())
    assert (policy.min_tp_width, policy.batch.mode, policy.batch.epsilon) == (2, "carry", 0.1)


def test_help_shows_every_key_of_the_schema():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    schema.add_flags(parser, Policy, prefix="ntp-")
    text = parser.format_help()
    for flag in ("--ntp-enable", "--ntp-min-tp-width", "--ntp-batch-epsilon", "--ntp-copies-far"):
        assert flag in text
