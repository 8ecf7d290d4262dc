"""A Slurm cluster of one node on this machine, for as long as a context is entered."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
AuthInfo=cred_expire=10
CredType=cred/none
SlurmUser={user}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


@contextlib.contextmanager
def cluster(place: Path) -> Iterator[None]:
    """Jobs start two at a time; one that is queued again waits ten seconds. Skips the test where
    there are no programs of Slurm's (Debian's slurm-wlm), or they do not start."""
    programs = ("slurmctld", "slurmd", "sbatch", "srun")
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)} here (Debian: apt install slurm-wlm)")
    if os.getuid():
        pytest.skip("slurmd needs root")
    host = platform.node().partition(".")[0]
    for name in ("state", "spool"):
        (place / name).mkdir()
    config = place / "slurm.conf"
    config.write_text(CONFIG.format(host=host, place=place, user="root", ports=_ports(2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        daemons = [
            subprocess.Popen([name, "-D", "-c"], stdout=log, stderr=log)
            for name in programs[:2]
            for log in [(place / f"{name}.log").open("w")]
        ]
        try:
            _until_idle(place)
            yield
        finally:
            subprocess.run(["scancel", "--signal=KILL", "--full", "--user=root"], check=False)
            for daemon in daemons[::-1]:
                daemon.terminate()
                daemon.wait()


def _until_idle(place: Path) -> None:
    for _ in range(150):
        words = ["sinfo", "--noheader", "--format=%t"]
        if subprocess.run(words, capture_output=True, text=True, check=False).stdout == "idle\n":
            return
        time.sleep(0.2)
    pytest.skip(f"Slurm does not start here: {(place / 'slurmd.log').read_text()[-500:]}")


def _ports(count: int) -> list[int]:
    """Free ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
