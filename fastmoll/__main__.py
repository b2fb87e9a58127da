"""``python -m fastmoll``: the command line."""

import sys

from fastmoll.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
