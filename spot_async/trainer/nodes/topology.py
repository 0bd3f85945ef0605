"""Says which node of how many this is, from the configuration and from what a scheduler tells its jobs. Pure.

The configuration comes first. What it leaves out, the first of these gives that is there: the variables that torchrun
reads (`PET_*`, which Kubeflow sets), those that torchrun sets, SkyPilot, Slurm, an indexed job of Kubernetes. The last
one tells only the node's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from spot_async.config import ClusterConfig
from spot_async.errors import ConfigError
from spot_async.trainer.nodes.authentication import Secret, new_secret

Environ = Mapping[str, str]

DEFAULT_PORT = 29600  # torchrun's own are 29400 and 29500
DEFAULT_RUN_ID = "spot-async"
# Ports of Slurm jobs, below those that Linux gives to clients.
FIRST_SLURM_PORT, SLURM_JOBS = 20_000, 12_000
ALONE = "cluster.nodes=1 keeps a run on this node alone"


@dataclass(frozen=True)
class Topology:
    """One node of a run on several."""

    nodes: int
    node_rank: int
    address: str  # node 0's, as the others reach it
    port: int
    run_id: str
    source: str  # who says so
    join_timeout_s: float  # nodes wait so long for each other
    # A new one is known to nobody: whoever starts nodes apart from each other gives them a common one.
    secret: Secret = field(default_factory=new_secret, repr=False, compare=False)

    @property
    def words(self) -> str:
        return f"node {self.node_rank} of {self.nodes} ({self.source}), which meet at {self.address}:{self.port}"


@dataclass(frozen=True)
class _Told:
    """What a scheduler tells. None: it does not say."""

    source: str
    nodes: int | None = None
    node_rank: int | None = None
    address: str | None = None
    port: int | None = None
    run_id: str | None = None


def topology(environ: Environ, cluster: ClusterConfig) -> Topology | None:
    """Return which node this is; None for a run on one machine. Raises ConfigError, in one line, for half an answer."""
    if cluster.kind == "ray":
        return _placed(environ, cluster) if cluster.placed_nodes else None
    if cluster.nodes == 1:
        return None
    told = next((told for read in _READERS if (told := read(environ)) is not None), _Told("the configuration"))
    nodes = cluster.nodes or told.nodes or 1
    if nodes == 1:
        return None
    node_rank = told.node_rank if cluster.node_rank is None else cluster.node_rank
    address = cluster.address or told.address
    if node_rank is None:
        raise ConfigError(f"cluster.node_rank: say which of the {nodes} nodes this is, 0 to {nodes - 1}; {ALONE}")
    if node_rank >= nodes:
        raise ConfigError(f"cluster.nodes={nodes}, but this is node {node_rank} ({told.source}): they count from 0")
    if address is None:
        raise ConfigError(f"cluster.address: say how the {nodes} nodes reach node 0; {ALONE}")
    port = cluster.port or told.port or DEFAULT_PORT
    run_id = told.run_id or DEFAULT_RUN_ID
    return Topology(nodes, node_rank, address, port, run_id, told.source, cluster.join_timeout_s)


def _placed(environ: Environ, cluster: ClusterConfig) -> Topology:
    """Return node 0, where the command is given. Its address is not known here, only that of Ray's head."""
    head = cluster.address or environ.get("RAY_ADDRESS") or ""
    host, _, port_of_head = head.rpartition(":")
    if not port_of_head.isdecimal():
        raise ConfigError(
            f"cluster.address: say HOST:PORT of Ray's head, to which the {cluster.nodes} nodes have a way"
        )
    port = cluster.port or DEFAULT_PORT
    return Topology(cluster.nodes or 1, 0, host, port, DEFAULT_RUN_ID, "Ray", cluster.join_timeout_s)


def left_alone(environ: Environ, cluster: ClusterConfig) -> str | None:
    """Return why this command may begin a run of its own on one machine where one on several was meant; None if not."""
    if cluster.kind == "ray" or cluster.nodes is not None:
        return None
    nodes = _number(environ, "SLURM_JOB_NUM_NODES") or _number(environ, "SLURM_NNODES") or 1
    if nodes > 1 and "SLURM_STEP_NUM_NODES" not in environ:
        return f"Slurm gave this job {nodes} nodes, but without srun the run is on one: start it by srun; {ALONE}"
    if "JOB_COMPLETION_INDEX" in environ:
        return f"each pod of this indexed job begins a run of its own: give cluster.nodes and cluster.address; {ALONE}"
    processes = _number(environ, "OMPI_COMM_WORLD_SIZE") or _number(environ, "PMI_SIZE") or 1
    if processes > 1 and "SLURM_STEP_NUM_NODES" not in environ:
        return (
            f"mpirun started {processes} processes, each of which begins a run of its own: start one on each node, "
            "with cluster.nodes, cluster.node_rank and cluster.address"
        )
    return None


def check_ranks(topology: Topology, ranks: int) -> None:
    """Raise ConfigError unless each node gets the same number of `training.ranks`."""
    if ranks % topology.nodes:
        raise ConfigError(
            f"training.ranks={ranks} cannot be shared by {topology.nodes} nodes ({topology.source}): give a multiple "
            f"of {topology.nodes}; {ALONE}"
        )


def _torchrun_options(environ: Environ) -> _Told | None:
    """Read what torchrun would take for its options."""
    if "PET_NNODES" not in environ:
        return None
    if not environ["PET_NNODES"].isdecimal():
        raise ConfigError(
            f"PET_NNODES={environ['PET_NNODES']}: the number of nodes cannot change during a run: give one number"
        )
    return _Told(
        "PET_NNODES",
        nodes=_number(environ, "PET_NNODES"),
        node_rank=_number(environ, "PET_NODE_RANK"),
        address=environ.get("PET_MASTER_ADDR"),
        port=_number(environ, "PET_MASTER_PORT"),
        run_id=environ.get("PET_RDZV_ID"),
    )


def _torchrun_ranks(environ: Environ) -> _Told | None:
    """Read what torchrun tells the processes that it starts. It has `MASTER_PORT` for itself."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    processes = _number(environ, "LOCAL_WORLD_SIZE") or 1
    if processes > 1:
        raise ConfigError(
            f"torchrun started {processes} processes on this node: give it --nproc-per-node 1, since training.ranks "
            "are started by the run itself"
        )
    return _Told(
        "torchrun",
        nodes=_number(environ, "WORLD_SIZE"),
        node_rank=_number(environ, "GROUP_RANK"),
        address=environ.get("MASTER_ADDR"),
        run_id=environ["TORCHELASTIC_RUN_ID"],
    )


def _skypilot(environ: Environ) -> _Told | None:
    if "SKYPILOT_NODE_RANK" not in environ:
        return None
    addresses = environ.get("SKYPILOT_NODE_IPS", "").split()
    return _Told(
        "SkyPilot",
        nodes=_number(environ, "SKYPILOT_NUM_NODES") or len(addresses) or None,
        node_rank=_number(environ, "SKYPILOT_NODE_RANK"),
        address=addresses[0] if addresses else None,
        run_id=environ.get("SKYPILOT_TASK_ID"),
    )


def _slurm(environ: Environ) -> _Told | None:
    """Read what srun tells a step. A batch script is no step: what it starts without srun is on one node."""
    nodes, tasks = _number(environ, "SLURM_STEP_NUM_NODES"), _number(environ, "SLURM_STEP_NUM_TASKS")
    if nodes is not None and tasks is not None and tasks != nodes:
        where = f"{nodes} nodes: start one on each" if nodes > 1 else "one node, which each begin the run: start one"
        raise ConfigError(
            f"srun started {tasks} tasks on {where}, by --ntasks-per-node=1 (SLURM_STEP_NUM_TASKS={tasks}): "
            "training.ranks are started by the run itself"
        )
    if nodes is None or nodes == 1:
        return None
    job = _number(environ, "SLURM_JOB_ID")
    return _Told(
        "Slurm",
        nodes=nodes,
        node_rank=_number(environ, "SLURM_NODEID"),
        address=first_host(environ.get("SLURM_STEP_NODELIST", "")) or None,
        port=None if job is None else FIRST_SLURM_PORT + job % SLURM_JOBS,
        run_id=None if job is None else f"slurm-{job}.{environ.get('SLURM_STEP_ID', '0')}",
    )


def _indexed_job(environ: Environ) -> _Told | None:
    """Read the one thing that Kubernetes tells the pods of an indexed job, also below a JobSet."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    return _Told("JOB_COMPLETION_INDEX", node_rank=_number(environ, "JOB_COMPLETION_INDEX"))


_READERS = (_torchrun_options, _torchrun_ranks, _skypilot, _slurm, _indexed_job)


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's short form: `node03` of `node[03-05,8],login1`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def _number(environ: Environ, name: str) -> int | None:
    """Return a variable's number, or None if it is not set."""
    text = environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name}={text} in the environment is no number")
    return int(text)
