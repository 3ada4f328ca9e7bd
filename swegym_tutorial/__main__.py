"""`python -m swegym_tutorial` is the command `swegym-tutorial`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
