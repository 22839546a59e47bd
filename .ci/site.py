"""What does mkdocs need that GitHub does not? Navigation, a page, fewer words."""

import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
OUTSIDE = {"../CHANGELOG.md": "changelog.md"}  # from docs/, and as pages of the site


def navigation(index: str) -> list[Any]:
    """What mkdocs calls ``nav``: each heading of the index with the links below it."""
    nav: list[Any] = [{"Home": "README.md"}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        links = re.findall(r"^\* \[(.*?)\]\((.*?)\)", text, re.MULTILINE)
        pages = [{name: OUTSIDE.get(target, target)} for name, target in links]
        nav.append({title.strip(): pages})
    return nav


def for_the_site(text: str) -> str:
    """A page without what its programs are marked with, and with links that stay in."""
    text = re.sub(r"^```python run\b.*$", "```python", text, flags=re.MULTILINE)
    for target, page in OUTSIDE.items():
        text = text.replace(f"({target})", f"({page})")
    return text


def on_config(config: Any) -> Any:
    """Take the navigation from the index."""
    index = pathlib.Path(config.docs_dir, "README.md").read_text()
    config.nav = navigation(index)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for target, page in OUTSIDE.items():
        source = ROOT / pathlib.Path(target).name
        files.append(File.generated(config, page, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Change what GitHub and mkdocs read differently."""
    return for_the_site(markdown)
