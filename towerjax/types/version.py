"""The version of the package, and where its pages are."""

__version__ = "0.1.0"

_DOCS = "https://github.com/towerjax/towerjax/blob/main/docs"


def page(name: str, section: str = "") -> str:
    """The address of a page, ``how_to/sweeps``, and of a section by its heading."""
    anchor = "#" + section.lower().replace(" ", "-") if section else ""
    return f"{_DOCS}/{name}.md{anchor}"
