"""``python -m towerjax`` is ``towerjax``."""

import sys

from towerjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
