"""The requirements of NCCL groups; none of these tests needs a GPU."""

import pytest
import torch.distributed as dist

from ntp_plugin.errors import Refused
from ntp_plugin.groups.nccl_requirements import SETTINGS, prepare_environment, require_nccl, require_versions
from ntp_plugin.groups.process_groups import kinds_of

GOOD = {"built": (2, 30, 7), "loaded": (2, 30, 7)}


def test_unset_variables_get_a_value():
    environment = {}
    prepare_environment(environment)
    assert environment == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_FR_DUMP_ON_TIMEOUT": "0"}


def test_values_set_by_the_agent_are_replaced():
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    prepare_environment(environment)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize(
    ("name", "value"), [(setting.name, value) for setting in SETTINGS for value in setting.refused]
)
def test_conflicting_user_values_are_refused(name, value):
    with pytest.raises(Refused, match=f"{name}={value}.*Fix: unset {name}") as refusal:
        prepare_environment({name: value})
    assert refusal.value.exit_code == 2


def test_harmless_values_are_kept():
    kept = {"TORCH_DIST_USE_NCCL2": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_FR_DUMP_ON_TIMEOUT": "1"}
    environment = dict(kept)
    prepare_environment(environment)
    assert environment == kept | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0+cu132", "2.15.0a0+git1234", "2.16.1", "3.0.0"])
def test_a_new_torch_will_do(version):
    require_versions(version, GOOD)


@pytest.mark.parametrize("version", ["2.14.1", "2.9.0+cu128", "1.13"])
def test_an_old_torch_is_refused(version):
    with pytest.raises(Refused, match=r"needs torch 2\.15 or newer, and this is torch " + version.replace("+", r"\+")):
        require_versions(version, GOOD)


@pytest.mark.parametrize("which", GOOD)
def test_an_old_nccl_is_refused(which):
    with pytest.raises(Refused, match=rf"NCCL 2\.28 or newer \(ncclCommRevoke\), and {which} is NCCL 2\.27\.9"):
        require_versions("2.15.0", GOOD | {which: (2, 27, 9)})


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_this_torch_will_do(monkeypatch):
    for setting in SETTINGS:
        monkeypatch.setenv(setting.name, setting.value or "INFO")
    require_nccl()


def test_a_group_that_cannot_be_edited_is_refused_when_it_is_made():
    assert kinds_of("gloo") == {"gloo"}
    with pytest.raises(Refused, match="backend fake cannot be edited"):
        kinds_of("cpu:fake")


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_a_group_may_have_both():
    assert kinds_of("nccl") == kinds_of("cuda:nccl2") == {"nccl"}
    assert kinds_of("cpu:gloo,cuda:nccl") == {"gloo", "nccl"}
