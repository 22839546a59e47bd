"""The version of the package, and where its pages are."""

__version__ = "0.1.0"

_DOCS = "https://github.com/towerjax/towerjax/blob/main/docs"


def page(name: str, section: str = "") -> str:
    """Make the address of a page, such as ``how_to/sweeps``, or of its section."""
    anchor = "#" + section.lower().replace(" ", "-") if section else ""
    return f"{_DOCS}/{name}.md{anchor}"
