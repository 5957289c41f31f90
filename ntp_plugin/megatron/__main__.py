"""Starts a script with the `--ntp-...` flags registered: `torchrun ... -m ntp_plugin.megatron pretrain_gpt.py ARGS`."""

import runpy
import sys
from pathlib import Path

from ntp_plugin.errors import ConfigError, NtpError
from ntp_plugin.megatron import activation, cpu_emulation
from ntp_plugin.recovery.script_failure import reported


def main() -> None:
    """Run the script as Python would; an error of the plugin ends it with one line and its exit code."""
    try:
        if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
            raise ConfigError("no script to run was named", fix="python -m ntp_plugin.megatron SCRIPT ARGUMENTS")
        cpu_emulation.install(cpu_emulation.wanted(), sys.argv[1:])
        activation.install()
        del sys.argv[0]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        try:
            with reported():
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as exit_:
            if exit_.code:
                raise
        activation.end()
    except NtpError as error:
        print(f"ntp: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
