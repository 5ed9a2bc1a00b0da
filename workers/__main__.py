"""`python -m workers`: a worker process configured by `TPUGATE_*` alone."""

import sys

from workers.config import load_config
from workers.errors import ConfigError
from workers.process import run_process

if __name__ == "__main__":
    try:
        run_process(load_config({}))
    except ConfigError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)
