"""``python -m towerjax`` is ``towerjax``."""

import sys

from towerjax.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
