"""Start a Slurm of two nodes on this machine, under one folder, without its services.

The nodes are called 127.0.0.1 and 127.0.0.2, so that a program finds the first of them
by its name and nothing but the loopback interface is used.
"""

import contextlib
import getpass
import os
import shutil
import subprocess
import time

import forked

PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
NEEDED = "munged slurmctld slurmd srun sbatch scancel scontrol".split()
MISSING = [name for name in NEEDED if not shutil.which(name, path=PATH)]
NODES = ("127.0.0.1", "127.0.0.2")
CONFIGURATION = """\
ClusterName=towers
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=1
KillWait=5
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


PATIENCE_S = 300  # of what takes seconds, where others use the processor


def wait_until(what, is_so, why=lambda: ""):
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < until, f"{what}: not in {PATIENCE_S} s\n{why()}"
        time.sleep(0.2)


class Slurm:
    """The running cluster: its commands, in an environment of the caller's."""

    def __init__(self, folder):
        self.folder = folder
        self.environ = {**os.environ, "PATH": f"{folder}/bin:{PATH}"}
        others = "TOWERJAX_", "JAX_", "SLURM_", "SBATCH_"
        for name in [x for x in os.environ if x.startswith(others)]:
            del self.environ[name]
        self.environ["SLURM_CONF"] = f"{folder}/slurm.conf"

    def start(self, *command, **variables):
        """Start a command, its output in a file of the folder; returns both."""
        output = self.folder / f"output{len(list(self.folder.glob('output*')))}"
        with output.open("wb") as file:
            return subprocess.Popen(
                command,
                env=self.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            ), output

    def told(self, *command, **variables):
        """What a command prints; it must end with code 0."""
        done = subprocess.run(
            command,
            env=self.environ | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def state(self, job):
        """The words of ``scontrol show job``."""
        words = self.told("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def jobs(self):
        """The numbers of the jobs that have not ended."""
        return self.told("squeue", "--noheader", "--format=%A").split()

    def is_idle(self):
        words = "sinfo", "--noheader", "--format=%T %D"
        given = {"env": self.environ, "timeout": PATIENCE_S}
        done = subprocess.run(words, capture_output=True, text=True, **given)
        return done.stdout.split() == ["idle", "2"]

    def end_all(self):
        for job in self.jobs():
            self.told("scancel", job)
        wait_until("an empty queue", lambda: not self.jobs(), self.log)

    def log(self):
        logs = sorted(self.folder.glob("output*"))
        return "\n".join(f"{x.name}:\n{x.read_text()[-2000:]}" for x in logs)


@contextlib.contextmanager
def started(folder):
    """A `Slurm` whose daemons run until the end of the block."""
    for name in ("state", "bin", *NODES):
        (folder / name).mkdir()
    ports = [forked.free_port() for _ in range(3)]
    options = {"folder": folder, "ports": ports, "nodes": NODES}
    text = CONFIGURATION.format(user=getpass.getuser(), **options)
    (folder / "slurm.conf").write_text(text)
    key = folder / "munge.key"
    socket = folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    names = {"seed": "seed", "pid": "munge.pid", "log": "munge.log"}
    files = [f"--{x}-file={folder / name}" for x, name in names.items()]
    munged = ["munged", "--foreground", "--force", "--num-threads=1", *files]
    slurm = Slurm(folder)
    with contextlib.ExitStack() as daemons:

        def start(*command):
            daemons.enter_context(_ended(slurm.start(*command)[0]))

        start(*munged, f"--key-file={key}", f"--socket={socket}")
        wait_until("munge", socket.exists, slurm.log)
        start("slurmctld", "-D")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        wait_until("two nodes", slurm.is_idle, slurm.log)
        yield slurm


@contextlib.contextmanager
def _ended(process):
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
