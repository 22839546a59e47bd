"""The site in a browser: pages fit, links lead somewhere, search finds."""

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading

import pytest
from test_site import ROOT

import towerjax as tj

WIDTHS = (1280, 390)  # pixels, of a laptop and of a telephone
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@functools.cache
def of_site(**_):
    """The pages, how they are shown, and what the reference shows of the package."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "mkdocs.yml"]
    pages += [
        x for x in (ROOT / ".ci").rglob("*") if x.suffix in (".py", ".css", ".html")
    ]
    shown = re.compile(
        r'"""(?:.*?)"""|^ *(?:def|class) [^\n]*', re.DOTALL | re.MULTILINE
    )
    package = sorted((ROOT / "towerjax").rglob("*.py"))
    docstrings = [text for x in package for text in shown.findall(x.read_text())]
    return [*(x.read_text() for x in sorted(pages)), *docstrings]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.reads(texts=of_site),
    pytest.mark.skipif(
        BROWSER is None, reason="no browser on this machine: apt-get install chromium"
    ),
]
MEASURE = """async () => {
  await new Promise(requestAnimationFrame);  // the menu moves aside
  document.getAnimations().forEach(x => x.finish());
  document.querySelectorAll("details").forEach(x => { x.open = true; });
  const code = document.querySelectorAll("article .highlight:not(.language-text) code");
  return {
    over: document.documentElement.scrollWidth - window.innerWidth,
    tables: [...document.querySelectorAll(".md-typeset__scrollwrap")]
      .filter(x => x.scrollWidth > x.clientWidth).length,
    stuck: [...document.querySelectorAll("article table")]
      .map(x => x.closest(".md-typeset__scrollwrap"))
      .filter(x => !x || !["auto", "scroll"].includes(getComputedStyle(x).overflowX))
      .length,
    top: (document.querySelector(".md-header .md-source") || {}).innerText || "",
    cut: [...code].filter(x => x.scrollWidth > x.clientWidth).map(x => x.innerText),
  };
}"""
CONTENT = """() => ({
  ids: [...document.querySelectorAll("[id]")].map(x => x.id),
  links: [...document.querySelectorAll("a[href]")].map(x => x.href),
  broken: [...document.images].filter(x => !x.naturalWidth).map(x => x.src),
})"""
# What a user types, and the page that is meant.
SOUGHT = {
    "FSDP": "how_to/larger_than_a_device/",
    "ZeRO": "how_to/larger_than_a_device/",
    "tensor parallel": "how_to/tensor_and_expert_parallel/",
    "sequence parallel": "how_to/tensor_and_expert_parallel/",
    "context parallel": "how_to/tensor_and_expert_parallel/",
    "expert parallel": "how_to/tensor_and_expert_parallel/",
    "MoE": "how_to/tensor_and_expert_parallel/",
    "wandb": "how_to/wandb_and_mlflow/",
    "MLflow": "how_to/wandb_and_mlflow/",
    "profiler": "reports/",
    "gradient accumulation": "how_to/gradient_accumulation/",
    "mixed precision": "how_to/mixed_precision/",
    "Hydra": "how_to/hydra_and_configdict/",
    "Slurm": "how_to/restarts/",
    "Flax Linen": "how_to/flax_linen/",
    "dropout": "how_to/flax_linen/",
    "learning rate schedule": "how_to/schedules/",
    "gradient norm": "how_to/schedules/",
    "tokens a second": "how_to/schedules/",
    "warmup": "how_to/schedules/",
    "weight decay": "how_to/schedules/",
    "EMA": "how_to/averages/",
    "reproducibility": "same_bits/",
    "validation": "train_and_evaluate/",
    "tqdm": "train_and_evaluate/",
    "several hosts": "several_processes/",
    "multi node": "several_processes/",
    "resume": "checkpoints/",
    "export": "how_to/serving/",
    "check": "check/",
    "seed": "same_bits/",
    "transformer": "how_to/text/",
    "tpu": "limits/",
    "mfu": "train_and_evaluate/",
    "ema": "how_to/averages/",
    "multi gpu": "quick_start/",
    "shuffle": "how_to/loaders/",
    "pipeline parallel": "limits/",
    "error messages": "how_to/debug_on_a_laptop/",
    "callbacks": "train_and_evaluate/",
    "save model": "checkpoints/",
    "safetensors": "checkpoints/",
    "out of memory": "how_to/larger_than_a_device/",
    "parity": "check/",
    "invariance": "proof/",
    "replica": "concepts/",
    "token mean": "how_to/uneven_data/",
    "loss scale": "how_to/mixed_precision/",
    "early stopping": "train_and_evaluate/",
    "own loop": "how_to/own_loop/",
    "aim": "how_to/wandb_and_mlflow/",
    "csv": "how_to/wandb_and_mlflow/",
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for all, and what came is kept

    def log_message(self, *_):
        pass

    def end_headers(self):
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where the built site is served."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def seen(browser, address):
    """Of each page that links lead to from the first: what was found on it.

    Nothing is sought here, so no page makes an index: that takes half of its time.
    """
    requested = []
    found = {}
    todo = [address]
    page = browser.new_page()
    page.add_init_script("Worker = class extends EventTarget { postMessage() {} }")
    page.on("request", lambda request: requested.append(request.url))
    while todo:
        url = todo.pop()
        requested.clear()
        response = page.goto(url)
        each = found[url] = page.evaluate(CONTENT) | {"is_there": response.ok}
        each["foreign"] = [x for x in requested if not is_of_site(x, address)]
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            each[width] = page.evaluate(MEASURE)
        here = {link.partition("#")[0] for link in each["links"]}
        new = {x for x in here if x.startswith(address) and x.endswith("/")}
        todo += sorted(new - {*found, *todo})
    page.close()
    return found


def is_of_site(url, address):
    return url.startswith((address, "data:", "blob:"))


def test_no_page_is_wider_than_the_window(seen):
    assert len(seen) > 70
    wide = {
        (url, width): each[width]["over"]
        for url, each in seen.items()
        for width in WIDTHS
        if each[width]["over"] > 0
    }
    assert not wide


def test_code_fits_beside_the_sidebars(seen):
    cut = {url: each[1280]["cut"] for url, each in seen.items() if each[1280]["cut"]}
    assert not cut


def test_the_table_of_overhead_is_not_cut(seen, address):
    assert seen[f"{address}evidence/overhead/"][1280]["tables"] == 0


def test_wide_tables_scroll_on_a_telephone(seen):
    assert sum(each[390]["tables"] for each in seen.values()) > 10
    assert not {url: each for url, each in seen.items() if each[390]["stuck"]}


def test_the_top_of_each_page_has_the_version(seen):
    tops = {each[1280]["top"].strip() for each in seen.values()}
    assert tops == {f"towerjax {tj.__version__}"}


def test_types_of_signatures_are_links(seen, address):
    links = seen[f"{address}reference/steps/"]["links"]
    found = {link.rpartition("#")[2].rpartition(".")[2] for link in links}
    assert {"LossFn", "Strategy", "TrainStep", "Trainable", "Guard"} <= found


def test_links_and_pictures_lead_somewhere(seen, address):
    lost = {url: each["broken"] for url, each in seen.items() if each["broken"]}
    for url, each in seen.items():
        for link in each["links"]:
            to, _, anchor = link.partition("#")
            if link.startswith(address) and (
                not seen.get(to, {}).get("is_there")
                or (anchor and anchor not in seen[to]["ids"])
            ):
                lost.setdefault(url, []).append(link)
    assert not lost


def test_nothing_is_fetched_of_others(seen):
    assert not {url: x["foreign"] for url, x in seen.items() if x["foreign"]}


@pytest.fixture(scope="module")
def search(browser, address):
    """Finds the first pages for some words, by one index, made once."""
    page = browser.new_page()
    page.set_default_timeout(120_000)  # ms; a busy machine makes the index slowly
    page.goto(address)
    page.click(".md-search__input")

    def find(words):
        page.fill(".md-search__input", words)
        page.press(".md-search__input", "End")  # it is read when a key comes up
        page.wait_for_function(
            """words => (words === "") ===
              (document.querySelector(".md-search-result__item > a") === null)
            || document.querySelector(".md-search-result__meta").innerText
              .startsWith("No matching")""",
            arg=words,
        )
        return page.locator(".md-search-result__item > a").all()[:3]

    yield find
    page.close()


@pytest.mark.parametrize("words", SOUGHT)
def test_search_finds(search, words):
    """The page is among the first three."""
    links = search(words)
    found = [link.get_attribute("href").partition("?")[0] for link in links]
    search("")
    assert any(x.endswith("/" + SOUGHT[words]) for x in found), found
