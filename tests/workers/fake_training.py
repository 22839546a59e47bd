"""A training without JAX: steps that end together, checkpoints, and one fault.

python -I -S tests/workers/fake_training.py FOLDER STEPS FAULT VICTIM AT_STEP

The victim sends itself SIGKILL or SIGSTOP, sleeps, or kills the launcher, before that
step: once in all, however often it is started.
"""

import hashlib
import os
import pathlib
import runpy
import signal
import sys
import time

folder = pathlib.Path(sys.argv[1])
steps = int(sys.argv[2])
fault = sys.argv[3]
victim = int(sys.argv[4])
at_step = int(sys.argv[5])
me = int(os.environ["TOWERJAX_PROCESS_ID"])
count = int(os.environ["TOWERJAX_NUM_PROCESSES"])
job = os.environ["TOWERJAX_COORDINATOR"]
cluster = pathlib.Path(__file__).parents[2] / "towerjax/mesh/cluster"
heartbeat = runpy.run_path(str(cluster / "heartbeat.py"))
heartbeat["start"]()
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))


def write(name, text):
    new = folder / f"{name}.{me}.new"
    new.write_text(text)
    new.rename(folder / name)


def read(name, default):
    path = folder / name
    return path.read_text() if path.exists() else default


def strike():
    try:
        (folder / "fault").open("x").close()
    except FileExistsError:
        return
    if fault == "launcher":
        os.kill(os.getppid(), signal.SIGKILL)
    elif fault != "sleep":
        os.kill(os.getpid(), signal.Signals[f"SIG{fault.upper()}"])
    time.sleep(300)  # an orphan has time to be found


saved, value = read("saved", "0 start").split()
for number in range(int(saved) + 1, steps + 1):
    if me == victim and number == at_step:
        strike()
    heartbeat["notify_launcher"](heartbeat["STEP"])
    write(f"{job}-{me}", str(number))
    while any(int(read(f"{job}-{other}", "0")) < number for other in range(count)):
        time.sleep(0.002)
        if asked:
            sys.exit(75)
    value = hashlib.sha256(f"{number} {value}".encode()).hexdigest()
    if me == 0:
        with (folder / "steps").open("a") as file:
            file.write(f"{number} {count} {saved}\n")
        if number % 5 == 0 or number == steps:
            write("saved", f"{number} {value}")
