"""`python -m fxspeed`."""

import sys

from fxspeed.cli import main

if __name__ == "__main__":
    sys.exit(main())
