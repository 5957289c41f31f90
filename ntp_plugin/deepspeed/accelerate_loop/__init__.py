"""Lets a user's own loop with Hugging Face Accelerate and DeepSpeed lose ranks and go on; the script is not edited.

    ntp run --nproc-per-node 4 train.py            with the `ntp` block in the script's DeepSpeed configuration

The script makes an `Accelerator` with a `DeepSpeedPlugin`, passes model, optimizer, loader and scheduler through
`prepare`, and trains in a loop of `accelerator.accumulate`, `accelerator.backward`, `optimizer.step()` and
`scheduler.step()`. While ranks are lost the loop runs more iterations for a step. What accelerate says of an iteration,
`sync_gradients`, follows this rank's share of the step.

    activation.py   installs the hooks in accelerate
    user_loop.py    drives the accumulation window from the loop's draws and accelerate's calls
    feed.py         the training loader, which goes back and yields a lost rank's micro-batches
    collectives.py  `gather`, `reduce` and others, and what they return to a rank alone
    saving.py       `save_state`, again after a loss in it
    joining.py      how far the job is, for a joining rank's script
    world.py        what accelerate believes of the world
    refusals.py     settings and loaders that such a job cannot have

Next: `user_loop.py`.
"""

import importlib
import sys


def install() -> None:
    """Install the hooks, in a process whose script has imported DeepSpeed and accelerate.

    With a DeepSpeed or torch that the tests do not know, nothing is installed: the engine is refused.
    """
    if "ntp_plugin.deepspeed.activation" in sys.modules:
        importlib.import_module("ntp_plugin.deepspeed.accelerate_loop.activation").install()
