"""Where the checkout and its tests are."""

import pathlib

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent
