"""Run the command ``towerjax`` as ``python -m towerjax``."""

import sys

from towerjax.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
