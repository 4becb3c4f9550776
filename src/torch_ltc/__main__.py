"""`python -m torch_ltc`: the command line."""

import sys

from torch_ltc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
