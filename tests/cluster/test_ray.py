"""The docs' lines for Ray Train, run on this machine where Ray is installed."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

import programs
import pytest
from programs import ASKED, STEPS, TRAIN, bits, page

pytestmark = [
    pytest.mark.slow,
    ASKED,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="no Ray: pip install ray[train]"
    ),
]


def program(folder):
    """The page's program on CPU devices, our training in place of the user's."""
    text = page("several_processes.md")
    text = re.search(r"^```python\n(from ray.*?)^```$", text, re.M | re.S)[1]
    ours = f"import runpy, sys; sys.argv[1:] = {folder!r}, '{STEPS}'"
    on_cpus = "jax_config=JaxConfig(use_gpu=True), "  # JAX_PLATFORMS says which
    for old, new in (
        ("    tj.cluster.initialize()", f"    {ours}; runpy.run_path({TRAIN!r})"),
        ("import JaxTrainer", "import JaxConfig, JaxTrainer"),
        ("use_gpu=True)", "resources_per_worker={'CPU': 1})"),
        ("JaxTrainer(train, ", f"JaxTrainer(train, {on_cpus}"),
    ):
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    return text


def test_two_workers_have_the_bits_of_one_process(tmp_path, bits):
    (tmp_path / "bin").mkdir()
    environ = os.environ | programs.of_two_devices(tmp_path / "bin")
    environ |= {"HOME": str(tmp_path), "RAY_DEDUP_LOGS": "0"}
    environ["PYTHONPATH"] = os.pathsep.join([str(programs.ROOT), *sys.path])
    environ |= {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with (tmp_path / "output").open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-c", program(str(tmp_path / "saved"))],
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = running.wait(180)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGTERM)
    text = (tmp_path / "output").read_text()
    assert code == 0, text[-4000:]
    found = {*re.findall(r"(\d of 2) bits (\w+)$", text, re.M)}
    assert found == {("0 of 2", bits), ("1 of 2", bits)}, text[-4000:]
