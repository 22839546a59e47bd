"""The site of docs/: each page has a place, each link an end, each name a reference."""

import ast
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import operator
import pathlib
import re
import types
import xml.etree.ElementTree

import pytest
from checkout import ROOT

import towerjax as tj
import towerjax.contrib

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
SHOWN = "README CONTRIBUTING SECURITY".split()
ABSOLUTE = [f"{name}.md" for name in SHOWN]  # shown outside of it, too
LINKED = [*(f"docs/{page}" for page in PAGES), "CHANGELOG.md"]
AT = re.compile(
    r"https://(?:github\.com/towerjax/towerjax/blob"
    r"|raw\.githubusercontent\.com/towerjax/towerjax)/main/(.*)"
)
BADGE = "https://github.com/towerjax/towerjax/actions/workflows/"
CODE = re.compile(r"^```.*?^```\n|`[^`\n]*`", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```.*?^```\n", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)]*)\)")


def loaded(name):
    """A file of .ci/ as a module: mkdocs finds it by its path, too."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = loaded("site")


def places(index):
    """``[(section, title, page)]`` of the navigation."""
    home, *sections = site.navigation(index)
    assert home == {"Home": "README.md"}
    for section in sections:
        [(heading, entries)] = section.items()
        for entry in entries:
            [(title, page)] = entry.items()
            group = page if isinstance(page, list) else [entry]
            yield from ((heading, *x) for one in group for x in one.items())


def test_every_page_has_one_place():
    index = (DOCS / "README.md").read_text()
    found = [page for _, _, page in places(index)]
    assert sorted(found) == sorted({*PAGES, *site.OUTSIDE.values()} - {"README.md"})


def test_sections_and_titles_differ_and_are_short():
    found = list(places((DOCS / "README.md").read_text()))
    titles = [title for _, title, _ in found]
    assert len(set(titles)) == len(titles)
    for heading, title, _ in found:
        assert 0 < len(heading) <= 20 and 0 < len(title) <= 40, (heading, title)


def test_the_navigation_is_the_index():
    index = """# Title

* [Not below a heading](x.md)

## One

Words with [a link](y.md).

* [A](a.md): of `A`,
  with [another](z.md).
* [B b](b/c.md)

### Group

* [C](c.md)

## Two

* [Changes](../CHANGELOG.md): all.
* [N](../notebooks/03_same_bits.ipynb)
"""
    assert list(places(index)) == [
        ("One", "A", "a.md"),
        ("One", "B b", "b/c.md"),
        ("One", "C", "c.md"),
        ("Two", "Changes", "changelog.md"),
        ("Two", "N", "notebooks/03_same_bits.md"),
    ]


def test_tabs_are_few_and_none_is_a_long_list():
    sections = site.navigation((DOCS / "README.md").read_text())[1:]
    assert len(sections) <= 10
    lists = [pages for each in sections for pages in each.values()]
    entries = [entry for pages in lists for entry in pages]
    lists += [x for entry in entries for x in entry.values() if isinstance(x, list)]
    assert all(len(pages) <= 16 for pages in lists)


def test_home_is_the_program_a_picture_and_five_promises():
    text = site.home((ROOT / "README.md").read_text())
    [promises] = re.findall(r"(?:^\* \*\*.*\n(?:  .*\n)*)+", text, re.MULTILINE)
    assert len(re.findall(r"^\* ", promises, re.MULTILINE)) == 5
    assert len(re.findall(r"^```python$", text, re.MULTILINE)) == 1
    assert "pip install towerjax" in text and "pytest" not in text
    defined = dict(re.findall(r"^\[(.+?)\]: (.*)$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[(\w+)\]", text)) <= set(defined)
    assert len(defined) <= 34
    assert defined.pop("mlcommons/training#844").startswith("https:")
    assert "badge" not in text
    assert "data_flow.svg" in defined.values()
    assert all((DOCS / to.partition("#")[0]).is_file() for to in defined.values())


def test_a_link_out_of_docs_stays_on_the_site():
    assert site.inside("../CHANGELOG.md#010") == "changelog.md#010"
    nested = site.inside("../../notebooks/03_same_bits.ipynb")
    assert nested == "../notebooks/03_same_bits.md"
    assert site.inside("how_to/text.md") == "how_to/text.md"


def test_an_example_is_folded_below_what_names_it():
    text = "One.\n\nSee `examples/ftrl.py`,\nand it again.\n\n`examples/ftrl.py`: x."
    code = (ROOT / "examples" / "ftrl.py").read_text()
    one, see, head, rest = site.with_examples(text).split("\n\n", 3)
    assert (one, see) == ("One.", "See `examples/ftrl.py`,\nand it again.")
    assert head == '??? example "examples/ftrl.py"'
    block, _, last = rest.rpartition("\n\n")
    assert last == "`examples/ftrl.py`: x."
    fence, *lines, end = [line.removeprefix("    ") for line in block.splitlines()]
    assert (fence, end) == ("````python", "````")
    assert "\n".join(lines) + "\n" == code
    for kept in ("```sh\nx\n\nf `examples/ftrl.py`\n```", "| `examples/ftrl.py` |\n"):
        assert site.with_examples(kept) == kept


def test_a_page_that_is_no_more_leads_to_another(tmp_path):
    site.on_post_build(types.SimpleNamespace(site_dir=tmp_path))
    for old, new in site.MOVED.items():
        assert f"{old}.md" not in PAGES and f"{new}.md" in PAGES
        text = (tmp_path / old / "index.html").read_text()
        to = "../" * len(old.split("/")) + f"{new}/"
        assert f'content="0; url={to}"' in text and f'href="{to}"' in text


def test_a_gallery_has_every_example():
    text = site.gallery()
    for path in sorted((ROOT / "examples").glob("*.py")):
        first = path.read_text().partition("\n")[0].removeprefix('"""')
        assert f"`examples/{path.name}`: {first}\n" in text
    assert text.count("??? example") == len([*(ROOT / "examples").glob("*.py")])


def test_a_page_has_a_link_to_edit_it():
    file = types.SimpleNamespace(src_uri="how_to/text.md")
    page = types.SimpleNamespace(file=file, is_homepage=False, meta={})
    site.on_page_markdown("x", page)
    assert page.edit_url.endswith("/edit/main/docs/how_to/text.md")


def test_words_that_are_sought_are_those_of_pages():
    pages = {*PAGES, *site.OUTSIDE.values()}
    assert {*site.WORDS} <= pages
    page = types.SimpleNamespace(is_homepage=False, meta={})
    page.file = types.SimpleNamespace(src_uri="how_to/averages.md")
    site.on_page_markdown("x", page)
    assert page.meta["tags"] == ["EMA"]
    words = " ".join(x.lower() for each in site.WORDS.values() for x in each)
    sought = (
        "check ema export mfu multi node resume seed moe elastic flatbuffers warmup"
    )
    sought += " warmup mixup augmentation fault tolerance"
    assert {*sought.split()} <= {*words.split()}
    assert "parallelization equivalence" in words and "sequence parallel" in words


def test_the_site_links_its_repository():
    config = types.SimpleNamespace(docs_dir=DOCS, extra={})
    [link] = site.on_config(config).extra["social"]
    assert link["link"] == "https://github.com/towerjax/towerjax"
    assert config.repo_url == link["link"]
    assert config.repo_name == f"towerjax {tj.__version__}"
    at_the_top = (ROOT / ".ci/theme/partials/source.html").read_text()
    assert 'data-md-component="' not in at_the_top  # by which GitHub would be asked


def test_a_notebook_is_a_page():
    def cell(kind, text, *outputs):
        return {"cell_type": kind, "source": [text], "outputs": list(outputs)}

    png = {"image/png": "iVB\nORw\n", "text/plain": "<Figure>"}
    bar = {"text/html": "<pre>", "text/plain": ["step ", "1/1\n"]}
    cells = [
        cell("markdown", "# Title\n\nWords."),
        cell("code", "f()", {"text": ["1\n", "2\n"]}, {"text": "3"}, {"data": png}),
        cell("code", "g()", {"data": bar}),
    ]
    assert site.of_notebook(json.dumps({"cells": cells})) == (
        "# Title\n\nWords.\n\n````python\nf()\n````\n\n````text\n1\n2\n3\n````\n\n"
        '<img alt="The figure" src="data:image/png;base64,iVBORw">\n\n'
        "````python\ng()\n````\n\n````text\nstep 1/1\n````\n"
    )


@functools.cache
def slugs(path):
    heads = re.findall(r"^#+ (.*)$", CODE.sub(kept, path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}


def kept(match):
    """Code in a line stays, for headings; blocks go."""
    return "" if match[0].startswith("```") else match[0]


def test_links_lead_somewhere():
    outside = {ROOT / known for known in site.OUTSIDE}
    for path in LINKED:
        source = ROOT / path
        for target in LINK.findall(CODE.sub("", source.read_text())):
            name, _, anchor = target.partition("#")
            to = (source.parent / name).resolve() if name else source
            assert to.exists() and to.is_relative_to(ROOT), (path, target)
            assert not anchor or anchor in slugs(to), (path, target)
            is_shown = not path.startswith("docs/") or to.is_relative_to(DOCS)
            no_page = f"{path}: {target} is no page of the site; name it as code"
            assert is_shown or to in outside, no_page


def test_programs_and_links_are_made_for_the_site():
    for path in PAGES:
        text = site.for_the_site((DOCS / path).read_text())
        assert not re.search(r"^```\w+ \w", text, re.MULTILINE), path
        links = LINK.findall(CODE.sub("", text))
        assert not [link for link in links if "CHANGE" in link], path


def referred():
    """``[(page, name)]``: what the pages under reference/ ask mkdocstrings for."""
    for path in sorted((DOCS / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", path.read_text(), re.MULTILINE):
            yield path.stem, name.removeprefix("towerjax.")


def public(module):
    """The names that a package imports ``as`` themselves, or that a module lists."""
    text = pathlib.Path(module.__file__).read_text()
    pairs = re.findall(r"^(?:from .* import|   ) (\w+) as (\w+),?$", text, re.MULTILINE)
    assert all(name == again for name, again in pairs)
    return {name for name, _ in pairs} | {*getattr(module, "__all__", ())}


def test_every_public_name_is_in_the_reference_once():
    expected = {"step.step.Step", "metrics.weighted.Means"}
    layers = "layers.batch_norm"
    expected |= {f"{layers}.{kind}.TowerBatchNorm" for kind in ("linen", "nnx")}
    spaces = {name: getattr(tj, name) for name in tj.__all__}
    spaces = {n: value for n, value in spaces.items() if inspect.ismodule(value)}
    spaces["contrib"] = towerjax.contrib
    at_top = {*tj.__all__} - {*spaces, "__version__"}
    expected |= at_top
    for space, module in spaces.items():
        for each in public(module):
            value = getattr(module, each)
            if not inspect.ismodule(value) and getattr(tj, each, None) is not value:
                expected.add(f"{space}.{each}")
    names = [name for page, name in referred() if page != "types"]
    assert len(set(names)) == len(names)
    assert set(names) == expected, "write ::: towerjax.X into a page of reference/"


def test_what_is_referred_to_exists():
    for place, name in referred():
        if place == "types":
            continue
        module = f"towerjax.{name}".rpartition(".")[0]
        if "batch_norm" in name:
            importlib.import_module(module)
        assert inspect.getdoc(operator.attrgetter(name)(tj)), name
        is_of_one = place in ("cluster", "metrics", "testing")
        assert not is_of_one or name.startswith(f"{place}."), (place, name)


@pytest.mark.parametrize("path", ABSOLUTE)
def test_links_of_what_is_shown_elsewhere_are_absolute(path):
    text = (ROOT / path).read_text()
    defined = dict(re.findall(r"^\[(\w+)\]: (.*)$", text, re.MULTILINE))
    code = CODE.sub("", text)
    assert not LINK.findall(code)
    used = re.findall(r"\]\[(\w+)\]", re.sub(r"`[^`]*`", "", text))
    assert set(used) == set(defined)
    for target in defined.values():
        if workflow := re.fullmatch(f"{BADGE}(.*)/badge.svg", target):
            assert (ROOT / ".github/workflows" / workflow[1]).is_file()
            continue
        name, _, anchor = AT.fullmatch(target)[1].partition("#")
        is_picture = name.endswith(".svg")
        assert is_picture == ("raw." in target) and (ROOT / name).is_file(), target
        assert not anchor or anchor in slugs(ROOT / name), target


def named_pages(path):
    """The pages that code names: by address, by ``page(name, section)``."""
    text = path.read_text()
    for target in re.findall(r"https://github\.com/[^\s>'\"]*\.md[^\s>'\"]*", text):
        yield AT.fullmatch(target)[1].partition("#")[::2]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "page":
            name, *section = [ast.literal_eval(x) for x in node.args]
            yield f"docs/{name}.md", "".join(section).lower().replace(" ", "-")


@pytest.mark.slow
def test_code_names_pages_by_their_address():
    found = []
    for path in (ROOT / "towerjax").rglob("*.py"):
        for name, anchor in named_pages(path):
            assert (ROOT / name).is_file(), (path, name)
            assert not anchor or anchor in slugs(ROOT / name), (path, name, anchor)
            found.append(name)
        assert not re.search(r"(?<!main/)docs/[\w/]+\.md", path.read_text()), path
    assert len(found) >= 12


def said_of(path):
    """What a file says of its classes, and of the types that it gives a name."""
    body = ast.parse(path.read_text()).body
    for node, after in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(node, ast.ClassDef):
            yield node.name, ast.get_docstring(node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = getattr(getattr(after, "value", None), "value", None)
            yield ast.unparse(target), value if isinstance(value, str) else None


def test_types_in_signatures_have_a_page_and_say_what_they_are():
    names = [name for page, name in referred() if page == "types"]
    assert len(names) >= 30 and len({*names}) == len(names)
    for name in names:
        module, _, last = f"towerjax.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), last), name
        place = module.replace(".", "/") + "/values" * module.endswith(".types")
        path = ROOT / f"{place}.py"
        assert dict(said_of(path))[last], name


def texts(path):
    root = xml.etree.ElementTree.parse(path).getroot()
    space = "{http://www.w3.org/2000/svg}"
    return root, space, list(root.iter(f"{space}text"))


@pytest.mark.parametrize("picture", sorted(DOCS.rglob("*.svg")), ids=lambda p: p.name)
def test_a_picture_says_what_it_shows_and_fetches_nothing(picture):
    root, space, _ = texts(picture)
    assert root.find(f"{space}title").text and root.find(f"{space}desc").text
    text = picture.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text and "@import" not in text
    assert len(text) < 32_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaling", "memory", "sweep", "seen"])
def test_a_picture_is_of_its_page(name):
    pictures = pytest.importorskip("benchmarks.pictures")
    assert {"scaling", "memory", "sweep", "seen"} == {*pictures.PICTURES}
    place, data, _, title = pictures.PICTURES[name]
    text = (DOCS / place).read_text()
    again = f"python -m benchmarks.pictures {name}"
    assert title in text and pictures.digest(data()) in text, again
    assert again in "".join((DOCS / page).read_text() for page in PAGES)


@pytest.mark.slow
def test_pictures_show_the_figures_of_tables():
    pictures = pytest.importorskip("benchmarks.pictures")
    panels = pictures.scaling(pictures.timed()).axes
    rows = [row for row in pictures.timed() if row["model"] == "cnn"]
    lines = {line.get_label(): line for line in panels[1].lines}
    assert lines["torch"].get_ydata().tolist() == [float(row["torch"]) for row in rows]
    left, right = pictures.memory(pictures.held()).axes
    shown = [[text.get_text() for text in panel.texts] for panel in (left, right)]
    assert shown == [["5", "3.3", "0.6"], ["115.3", "68.7", "26.3"]]
    svg = pictures.as_svg(left.figure, "A", "of b")
    assert "<title>A</title>" in svg and svg.count("http") == 1


def test_a_page_fetches_nothing_of_others():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings and "strict: true" in settings
    assert not re.search(r"https?:|analytics|inventories", settings)


def test_the_plot_shows_the_table():
    page = (DOCS / "evidence" / "overhead.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (\d+) \|.*?\*\*(.*?)\*\*", page, re.MULTILINE)
    assert len(rows) == 9
    root, space, found = texts(DOCS / "evidence" / "overhead.svg")
    shown = [text.text for text in found]
    widths = [int(bar.get("width")) for bar in root.iter(f"{space}rect")]
    for (model, devices, ratio), width in zip(rows, widths, strict=True):
        label = f"{model}, {devices} device" + "s" * (devices != "1")
        assert shown[shown.index(label) + 1] == ratio
        assert width == round(420 * float(ratio))  # the line at 1 stands at 420
    low = min(float(r[2]) for r in rows)
    high = max(float(r[2]) for r in rows)
    assert f"{low:.2f} to {high:.2f}" in (ROOT / "README.md").read_text()


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    lines = [x for x in text.splitlines() if not re.match(r"\[.+?\]: http", x)]
    assert len(lines) <= 160
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(program.splitlines()) <= 20


def test_no_sentence_of_the_readme_has_more_than_30_words():
    text = (ROOT / "README.md").read_text()
    text = BLOCK.sub("", re.sub(r"^(\[.+?\]: http|\|).*$", "", text, flags=re.M))
    for paragraph in re.split(r"\n\n|^\* |^#.*$", text, flags=re.MULTILINE):
        for sentence in re.split(r"(?<=[.?!:;])[*)]*\s", paragraph):
            assert len(sentence.split()) <= 30, sentence
