"""A Megatron script that puts the plugin in by itself, and then runs a recipe of Megatron's usual shape.

    ntp run --nproc-per-node=8 docs/examples/megatron_enable.py pretrain_gpt.py --ntp-enable ...

`enable()` comes before the recipe, because the recipe imports `pretrain`. Under `ntp run` a recipe needs no such line;
it is for processes that a launcher of your own starts.
"""

import runpy
import sys

from ntp_plugin.megatron import enable

enable()

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
