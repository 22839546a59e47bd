"""What does mkdocs need that GitHub does not? Navigation, pages, fewer words."""

import ast
import itertools
import json
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Of what lies outside of docs/: its place, and its page of the site.
OUTSIDE = {"CHANGELOG.md": "changelog.md", "examples": "examples.md"} | {
    f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in NOTEBOOKS
}
# Where a page that is no more is found now.
MOVED = {
    "benchmarks/absent": "evidence/absent",
    "benchmarks/faults": "evidence",
    "benchmarks/overhead": "evidence/overhead",
    "desync_and_nan": "all_or_nothing",
    "design_notes": "how_it_works",
    "evidence/bits": "same_bits",
    "evidence/bugs_of_2026": "evidence",
    "evidence/faults": "evidence",
    "evidence/kills": "evidence",
    "evidence/proofs": "evidence",
    "guarantees": "evidence",
    "how_to/accumulation_checked": "how_to/gradient_accumulation",
    "how_to/compressed_sums": "cross_tower_ops",
    "how_to/each_example_once": "how_to/uneven_data",
    "how_to/profiling": "reports",
    "how_to/proved_losses": "proof",
    "mirrored_strategy": "reference/mirrored_strategy",
    "public_code": "evidence",
    "published_bugs": "evidence",
    "replicate_model_fn": "reference/replicate_model_fn",
    "testing": "check",
    "foreign_programs": "evidence",
    "public_programs": "evidence",
}
# What a search is for, most often.
TASKS = ("how_to/", "several_processes", "train_and_evaluate", "same_bits")
# Words that people type, and the pages that are meant; titles have the others.
WORDS = {
    "all_or_nothing.md": ["error messages"],
    "batch_norm.md": ["SyncBatchNorm"],
    "check.md": ["check", "CI", "parity"],
    "checkpoints.md": ["resume", "save model", "safetensors"],
    "concepts.md": ["replica"],
    "evidence/absent.md": ["TPU"],
    "how_to/averages.md": ["EMA"],
    "how_to/debug_on_a_laptop.md": ["error messages"],
    "how_to/larger_than_a_device.md": ["out of memory"],
    "how_to/loaders.md": ["shuffle", "elastic", "augmentation", "mixup"],
    "how_to/mixed_precision.md": ["loss scale"],
    "how_to/restarts.md": ["elastic", "fault tolerance"],
    "how_to/schedules.md": ["warmup"],
    "how_to/serving.md": ["export", "inference", "flatbuffers"],
    "how_to/sweeps.md": ["seed"],
    "how_to/tensor_and_expert_parallel.md": ["MoE", "sequence parallel"],
    "how_to/text.md": ["transformer", "GPT"],
    "how_to/uneven_data.md": ["token mean"],
    "limits.md": ["TPU", "pipeline parallel"],
    "notebooks/05_language_model.md": ["transformer"],
    "note.md": ["parallelization equivalence"],
    "proof.md": ["invariance", "parity", "parallelization equivalence"],
    "quick_start.md": ["multi GPU"],
    "reports.md": ["MFU"],
    "same_bits.md": ["seed"],
    "several_processes.md": ["multi node", "multi host", "TPU"],
    "train_and_evaluate.md": ["MFU", "resume", "callbacks"],
}
_REPOSITORY = "https://github.com/towerjax/towerjax"
_EDIT = "https://github.com/towerjax/towerjax/edit/main/"
_FILES = "https://github.com/towerjax/towerjax/blob/main/docs/"
_PICTURES = "https://raw.githubusercontent.com/towerjax/towerjax/main/docs/"


def inside(target: str) -> str:
    """Return where a link of a page of docs/ leads to on the site."""
    for place, page in OUTSIDE.items():
        found = re.fullmatch(rf"\.\./((?:\.\./)*){re.escape(place)}(#.*)?", target)
        if found:
            return found[1] + page + (found[2] or "")
    return target


def navigation(index: str) -> list[Any]:
    """Return mkdocs' ``nav``: each heading of the index with the links below it."""
    nav: list[Any] = [{"Home": "README.md"}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        first, *groups = re.split(r"^### ", section, flags=re.MULTILINE)
        [(title, entries)] = _links(first).items()
        nav.append({title: [*entries, *map(_links, groups)]})
    return nav


def _links(section: str) -> dict[str, Any]:
    """Return the links of a section or a group by its heading, the first line."""
    title, _, text = section.partition("\n")
    links = re.findall(r"^\* \[(.*?)\]\((.*?)\)", text, re.MULTILINE)
    return {title.strip(): [{name: inside(to)} for name, to in links]}


def home(readme: str) -> str:
    """Return the first page, README.md without what needs a checkout.

    Its line of badges, which others draw, is left out.
    """
    shown, _, rest = readme.partition("\n## Examples and tests\n")
    shown = re.sub(r"^\[!\[.*\n\n", "", shown, flags=re.MULTILINE)
    targets = re.findall(r"^\[[^\]]+\]: .*$", rest, re.MULTILINE)
    words = " ".join(shown.split())
    used = [line for line in targets if line.split(": ")[0] in words]
    text = "\n".join([shown, *used, ""])
    return text.replace(_FILES, "").replace(_PICTURES, "")


def for_the_site(text: str) -> str:
    """Return a page without the marks of its programs, with links within the site."""
    text = re.sub(r"^```python run\b.*$", "```python", text, flags=re.MULTILINE)
    text = with_examples(text)
    return re.sub(r"(?<=\]\()[^)\s]+(?=\))", lambda link: inside(link[0]), text)


def with_examples(text: str) -> str:
    """Return a page with the examples that it names folded below their paragraphs."""
    parts, shown, is_code = [], set(), False
    for part in text.split("\n\n"):
        parts.append(part)
        is_code ^= part.count("```") % 2 == 1
        is_prose = not is_code and "```" not in part and not part.startswith("|")
        found = re.findall(r"`(examples/\w+\.py)`", part) if is_prose else []
        for name in [x for x in dict.fromkeys(found) if x not in shown]:
            block = _block("python", (ROOT / name).read_text())
            parts += [f'??? example "{name}"', textwrap.indent(block, "    ")]
            shown.add(name)
    return "\n\n".join(parts)


def gallery() -> str:
    """Return the examples as a page: the first sentence of each, and it folded."""
    parts = ["# Examples"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        says = ast.get_docstring(ast.parse(path.read_text())) or ""
        parts.append(f"`examples/{path.name}`: {says.partition(chr(10))[0]}")
    return with_examples("\n\n".join(parts))


def of_notebook(text: str) -> str:
    """Return a notebook as a page: its words, its code and the outputs below."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        parts.append(_block("python", source) if is_code else source)
        parts += _given(cell.get("outputs", []))
    return "\n\n".join(parts) + "\n"


def _given(outputs: list[Any]) -> Iterator[str]:
    """Return the outputs of a cell; texts that follow each other are one block."""
    for is_picture, group in itertools.groupby(outputs, _has_picture):
        if is_picture:
            for output in group:
                picture = "".join(output["data"]["image/png"]).replace("\n", "")
                yield f'<img alt="The figure" src="data:image/png;base64,{picture}">'
        else:
            texts = [x.get("text") or x["data"]["text/plain"] for x in group]
            yield _block("text", "\n".join("".join(x).rstrip("\n") for x in texts))


def _has_picture(output: Any) -> bool:
    return "image/png" in output.get("data", {})


def _block(language: str, text: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"


def on_config(config: Any) -> Any:
    """Take the navigation from the index; name the repository and the version.

    The top of a page shows both, by ``theme/partials/source.html``.
    """
    index = pathlib.Path(config.docs_dir, "README.md").read_text()
    config.nav = navigation(index)
    icon = {"icon": "fontawesome/brands/github", "name": "The repository"}
    config.extra["social"] = [icon | {"link": _REPOSITORY}]
    config.repo_url = _REPOSITORY
    config.repo_name = f"towerjax {_version()}"
    return config


def _version() -> str:
    """Read the version of the package, which is not imported."""
    text = (ROOT / "towerjax/types/version.py").read_text()
    [version] = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    return version


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside of docs/."""
    from mkdocs.structure.files import File

    for place, page in OUTSIDE.items():
        text = gallery() if place == "examples" else (ROOT / place).read_text()
        text = of_notebook(text) if place.endswith("ipynb") else text
        files.append(File.generated(config, page, content=text))
    return files


def on_post_build(config: Any) -> None:
    """Lead from the address of a page that is no more to the one that has its text."""
    for old, new in MOVED.items():
        place = pathlib.Path(config.site_dir, old, "index.html")
        place.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (old.count("/") + 1)
        place.write_text(redirection(f"{up}{new}/"))


def redirection(to: str) -> str:
    """Return a page that leads to another one."""
    head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={to}">'
    return f'<!doctype html>{head}<title>Moved</title><a href="{to}">It is here.</a>\n'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change what GitHub and mkdocs read differently."""
    places = {page: place for place, page in OUTSIDE.items()} | {
        "README.md": "README.md"
    }
    uri = page.file.src_uri
    page.edit_url = _EDIT + places.get(uri, f"docs/{uri}")
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
        return home((ROOT / "README.md").read_text())
    if uri.startswith(TASKS):
        page.meta["search"] = {"boost": 3}
    if uri in WORDS:
        page.meta["tags"] = WORDS[uri]
    return for_the_site(markdown)
