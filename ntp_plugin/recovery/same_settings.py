"""All ranks compare what their training depends on: founders with each other, a joining rank with the founders.

Founders exchange digests only. Where these differ, the two ranks that can show the difference send their sections, and
every rank raises `Refused` with the names. Before that, a founder of the first replica publishes its sections in the
job's store, so a rank that has passed the comparison knows that they are there. A joining rank reads them, and refuses
to join by itself. Members need not trust that it did: it asks to be admitted under the digest of its settings
(`membership/admission.py`), and they look for their own digest only.
"""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ntp_plugin
from ntp_plugin.errors import Refused
from ntp_plugin.recovery import fingerprint as fp
from ntp_plugin.recovery.data_identity import digest_of_file
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.fingerprint import Fingerprint

_WORD = "fingerprint/{}"
DATA = "data"
"""The section of a data set, which founders may not have yet when they compare."""
_OF_A_PLACE = ("--local_rank", "--local-rank", "--rank", "--node_rank", "--node-rank")
"""Arguments of a script that name the place of a process."""


def settings(arguments: fp.Section, policy: fp.Section, *, framework: Mapping[str, str]) -> Fingerprint:
    """What is known before a model is built; `framework` is the framework's version by its name."""
    versions = {
        **framework,
        "ntp-plugin": ntp_plugin.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return Fingerprint(
        sections={
            "arguments": arguments,
            "policy": policy,
            "versions": versions,
            "environment": fp.environment(os.environ),
        }
    )


def arguments_of_script() -> fp.Section:
    """The arguments that the script was started with, and a digest of its file."""
    words = [word for word in sys.argv[1:] if not word.startswith(_OF_A_PLACE)]
    file = getattr(sys.modules["__main__"], "__file__", None)
    known = {f"argument {number}": word for number, word in enumerate(words, start=1)}
    return known | ({"script": digest_of_file(Path(file))} if file and Path(file).is_file() else {})


def described(tensors: Mapping[str, torch.Tensor]) -> fp.Section:
    """The dtype and shape of every tensor of a model."""
    return fp.shapes({name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()})


def require_same(rank: ElasticRank, mine: Fingerprint, *, leaves: bool) -> None:
    """Raise `Refused`, with the names of what differs, unless all ranks train by the same settings.

    Args:
        rank: This process. All founders call this together; a joining rank calls it alone.
        mine: What its training depends on.
        leaves: Whether this founder is in the first replica, which publishes its sections for joining ranks.
    """
    if rank.place.joining:
        _require_same_as_job(rank, mine)
        return
    if leaves:
        for section, words in mine.sections.items():
            rank.share_with_joiners(_WORD.format(section), fp.encode(words))
    digests: list[Mapping[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(digests, dict(mine.digests))
    found = fp.deviations(digests)
    if found:
        raise Refused(
            f"the ranks of this job differ in what their training depends on: {_named(found, mine)}",
            fix="start all ranks by the same command, environment, data and versions",
        )


def _named(found: list[fp.Deviation], mine: Fingerprint) -> str:
    asked = {(rank, deviation.section) for deviation in found for rank in deviation.asked}
    my_rank = dist.get_rank()
    own = {section: mine.sections[section] for rank, section in asked if rank == my_rank}
    sections: list[Mapping[str, fp.Section]] = [{}] * dist.get_world_size()
    dist.all_gather_object(sections, own)
    lines = []
    for deviation in found:
        usual, other = deviation.asked
        ranks = ", ".join(map(str, deviation.ranks))
        names = fp.differences(
            deviation.section, sections[other][deviation.section], sections[usual][deviation.section]
        )
        lines.append(f"rank {ranks} (here) and rank {usual} (there): {fp.in_short(names)}")
    return "; ".join(lines)


def _require_same_as_job(rank: ElasticRank, mine: Fingerprint) -> None:
    found: list[str] = []
    for section, words in mine.sections.items():
        left: Any = rank.shared_value_or_none(_WORD.format(section))
        if left is None and section == DATA:  # the job's script saved a checkpoint before it had a loader
            continue
        if left is None:
            found.append(f"{section} is known here alone")
            continue
        found += fp.differences(section, words, fp.decode(left))
    if found:
        raise Refused(
            f"slot {rank.place.slot} ({rank.place.incarnation}) is not admitted, because its training would differ from"
            f" that of the job (there): {fp.in_short(found)}",
            fix="start it by the command, environment, data and versions of the job, which goes on without it",
        )
