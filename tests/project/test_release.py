"""What a release is made of: its tag, its metadata, what a reader cites."""

import re
import shutil
import subprocess
import tomllib

import jax
import pytest
from checkout import ROOT

import towerjax as tj

# Benchmarks that CI does not run, and the one that draws docs' pictures, as tests do.
LEFT_OUT = {"duel", "faults", "survivors", "public_run", "pictures"}
VERSION = f'__version__ = "{tj.__version__}"\n'
CHANGES = f"# Changelog\n\n## Unreleased\n\n## {tj.__version__}\n\n- It began.\n"
CITED = f"version: {tj.__version__}\n"


@pytest.fixture
def checkout(tmp_path):
    """A function that commits files to a checkout, and one that releases it."""

    def git(*args):
        given = ["-c", "user.name=a", "-c", "user.email=a@b", *args]
        command = ["git", "-C", str(tmp_path), *given]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    def release(version=VERSION, changes=CHANGES, cited=CITED):
        (tmp_path / "towerjax/types/version.py").write_text(version)
        (tmp_path / "CHANGELOG.md").write_text(changes)
        (tmp_path / "CITATION.cff").write_text(cited)
        git("add", ".")
        git("commit", "-q", "--allow-empty", "-m", "x")
        return again()

    def again():
        script = tmp_path / ".ci/release"
        return subprocess.run([script], capture_output=True, text=True)

    git("init", "-q")
    git("config", "user.name", "a")
    git("config", "user.email", "a@b")
    for folder in (".ci", "towerjax/types"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/release", tmp_path / ".ci/release")
    release.git = git
    release.again = again
    release.folder = tmp_path
    return release


def test_a_release_is_a_tag_with_its_section(checkout):
    done = checkout(changes=CHANGES + "\n## 0.0.1\n\n- Before.\n")
    assert done.returncode == 0, done.stderr
    told = checkout.git("tag", "-n9", f"v{tj.__version__}")
    assert "- It began." in told and "Before" not in told


REFUSED = {
    "no section": ({"changes": "# Changelog\n\n## 0.0.1\n\n- It began.\n"}, "'## "),
    "an empty one": ({"changes": f"## {tj.__version__}\n\n## 0.0.1\n\n- x\n"}, "'## "),
    "of a longer one": ({"changes": f"## {tj.__version__}1\n\n- x\n"}, "'## "),
    "another cited": ({"cited": "version: 9\n"}, "CITATION.cff"),
    "no version": ({"version": "\n"}, "version.py"),
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("what", REFUSED)
def test_a_release_is_refused(checkout, what):
    given, text = REFUSED[what]
    done = checkout(**given)
    assert done.returncode == 1 and text in done.stderr, done
    assert not checkout.git("tag")


def test_a_release_is_of_a_commit_and_made_once(checkout):
    assert checkout().returncode == 0
    assert "there is a tag" in checkout.again().stderr
    (checkout.folder / "new").write_text("x")
    assert "Commit them first" in checkout.again().stderr


def test_the_version_is_said_alike():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"].keys() >= {"Homepage", "Documentation", "Issues"}
    assert project["authors"] and project["keywords"]
    cited = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {re.escape(tj.__version__)}$", cited, re.MULTILINE)
    assert f"version = {{{tj.__version__}}}" in (ROOT / "README.md").read_text()
    assert f"\n## {tj.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_jax_has_the_bounds_that_are_tested():
    """CI runs both ends; names of JAX's private modules are looked up in these."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    private = (ROOT / "towerjax" / "mesh" / "private_jax.py").read_text()
    (ends,) = set(re.findall(r"# JAX 0\.(\d+) to 0\.(\d+)", private))
    first, last = map(int, ends)
    assert f"jax>=0.{first},<0.{last + 1}" in project["dependencies"]
    assert first <= int(jax.__version__.split(".")[1]) <= last


def test_ci_runs_the_test_commands_of_the_readme():
    script, readme = ((ROOT / x).read_text() for x in (".ci/run", "README.md"))
    found = re.findall(r"grep -m1 -E '(.*)' README\.md", script)
    commands = [re.findall(pattern, readme, re.MULTILINE) for pattern in found]
    assert [len(x) for x in commands] == [1, 1]
    marks = [re.search(r" -m (\S+|\".*\")$", x)[1] for (x,) in commands]
    assert marks == ['"not slow"', "slow"]  # together all


def test_pages_name_one_time_for_the_tests():
    """Measured; a commit that changes it changes it on each page."""
    pages = "README.md", "CONTRIBUTING.md", "tests/README.md"
    texts = {x: " ".join((ROOT / x).read_text().split()) for x in pages}
    for unit, names in (("seconds", pages), ("minutes", pages[1:])):
        found = [
            re.findall(rf"(\d+) {unit} on two idle cores", texts[x]) for x in names
        ]
        assert found == [[found[0][0]]] * len(names)


def test_every_extra_that_is_named_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [p for p in ROOT.glob("*.md")] + [*(ROOT / "docs").rglob("*.md")]
    texts += [*(ROOT / "towerjax").rglob("*.py"), ROOT / "pyproject.toml"]
    found = set()
    for path in texts:
        for names in re.findall(r"(?:towerjax|'\.)\[([\w,-]+)\]", path.read_text()):
            found.update(names.split(","))
    assert {"gpu", "plot", "test"} <= found <= set(project["optional-dependencies"])


def test_a_page_names_the_extra_that_it_needs():
    for page, use, extra in (
        ("docs/how_to/serving.md", "exported.serialize()", "export"),
        ("README.md", "=[tj.TensorBoard", "tensorboard"),
    ):
        text = (ROOT / page).read_text()
        assert use in text and f"'.[{extra}]'" in text


def test_ci_runs_each_benchmark_in_its_small_form():
    text = (ROOT / ".ci/run").read_text()
    named = re.search(r'benchmarks="(.*?)"', text, re.DOTALL)[1].split()
    files = {x.stem: x.read_text() for x in (ROOT / "benchmarks").glob("*.py")}
    scripts = {name for name, x in files.items() if '__name__ == "__main__"' in x}
    assert {*named} == scripts - LEFT_OUT and len(named) == len({*named})
    for name in scripts - {"pictures"}:  # all are on the one harness
        assert " = options_of(" in files[name] and " = begin(" in files[name], name
    timing = {name for name, x in files.items() if "sweeps.turns" in x}
    assert timing == {"harness"}


GITHUB = ROOT / ".github"


def test_the_workflow_runs_what_contributors_run():
    yaml = pytest.importorskip("yaml")
    [job] = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == ["bash .ci/run"]
    assert "`bash .ci/run`" in (ROOT / "CONTRIBUTING.md").read_text()
    [setup] = [x for x in job["steps"] if "setup-python" in x.get("uses", "")]
    versions = setup["with"]["python-version"].split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    there = "\n".join(project["classifiers"])
    assert len(versions) == 2 and all(f"Python :: {x}\n" in there for x in versions)


def test_issue_forms_are_forms():
    yaml = pytest.importorskip("yaml")
    forms = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4
    for path in forms:
        form = yaml.safe_load(path.read_text())
        if path.stem == "config":
            assert all({*x} == {"name", "url", "about"} for x in form["contact_links"])
            continue
        assert form["name"] and form["description"]
        for field in form["body"]:
            assert field["type"] in ("textarea", "input")
            assert field["attributes"]["label"] and field["attributes"]["description"]
            assert field["validations"] == {"required": True}


def test_versions_and_deprecations_have_a_sentence():
    sentence = "Before 1.0 a minor version may change names."
    for name in ("README.md", "CHANGELOG.md"):
        assert sentence in " ".join((ROOT / name).read_text().split())
