"""Lets a job of Hugging Face's `Trainer` with DeepSpeed lose ranks and go on; the script is not edited.

    ntp run --nproc-per-node 4 train.py --deepspeed ds_config.json           with the `ntp` block in ds_config.json

The Trainer counts its own steps, epochs and micro-batches, so it must not notice that a step is taken again or that a
rank computes another one's micro-batches. Its `training_step` is called once for each nominal micro-batch; a call
returns when this rank's share is as far as the Trainer believes, and the last one when the step is taken. What the
Trainer does with collectives between two steps runs as voted sections.

    activation.py    installs the hooks in transformers and accelerate
    trainer_loop.py  drives the accumulation window from the Trainer's calls
    steps.py         what is kept of a step, so that it can be taken again
    trl_tokens.py    the tokens that a trainer of TRL counts
    batches.py       the batches of all nominal ranks, and how a lost rank's are drawn
    loader.py        the Trainer's loader, as the accumulation window sees one
    evaluation.py    an evaluation while ranks are lost, over the batches of the nominal ranks
    sections.py      evaluations and counts that can be done again
    joining.py       where the Trainer is, for a joining rank
    world.py         what accelerate and the Trainer believe of the world
    refusals.py      options that such a job cannot have

Next: `trainer_loop.py`.
"""

import importlib
import sys


def install() -> None:
    """Install the hooks, in a process whose script has imported DeepSpeed and transformers.

    With a DeepSpeed or torch that the tests do not know, nothing is installed: the engine is refused.
    """
    if "ntp_plugin.deepspeed.activation" in sys.modules:
        importlib.import_module("ntp_plugin.deepspeed.hf.activation").install()
