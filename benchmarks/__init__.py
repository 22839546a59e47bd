"""Scripts that measure the project's own figures: ``python -m benchmarks.overhead``."""

import argparse
from collections.abc import Sequence
from typing import Any


def options_of(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **small: Any
) -> argparse.Namespace:
    """What is said on the command line; ``--small`` has other defaults, for CI."""
    parser.add_argument("--small", action="store_true", help="a small run, for CI")
    if parser.parse_known_args(argv)[0].small:
        parser.set_defaults(**small)
    return parser.parse_args(argv)
