"""`python -m torchtpu.trial`: bring up the tpu device and say on stdout why it does not work.

Run in a child process by `pjrt_cpu.plugin`, for plugins that may crash. Exit status 0 or 1.
"""

import sys
from dataclasses import replace

from torchtpu.bringup import bring_up
from torchtpu.environment import read_settings
from torchtpu.errors import TorchTpuError


def main() -> int:
    """Exit status of the trial."""
    try:
        bring_up("tpu", settings=replace(read_settings(), try_plugin_first=False))
    except TorchTpuError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
