"""`python -m sluice`: the command line."""

import sys

from sluice.cli import main

if __name__ == "__main__":
    sys.exit(main())
