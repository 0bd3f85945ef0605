"""The templates of deploy/: schedulers would take them, and each command in them starts the run that it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from spot_async.config import ClusterConfig, Config
from spot_async.config.loading import load_config
from spot_async.telemetry.prometheus import family_of
from spot_async.trainer.nodes.authentication import SECRET_VARIABLE, cluster_secret
from spot_async.trainer.nodes.topology import check_ranks, topology

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
# What each scheduler tells node 1 of 2; tests/trainer/test_topology.py says where each table is documented.
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_TASK_ID": "sky-2025-07-01-12-00-00-000000_spot-async_1",
}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NODEID": "1",
}


def test_grafanas_dashboard_has_its_form_and_asks_for_metrics_that_there_are() -> None:
    dashboards = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    written = json.loads((DEPLOY / "grafana.json").read_text())
    read_back = json.loads(encoder.JSONEncoder().encode(dashboards.Dashboard.from_json(written)))
    assert completed(written, read_back) == read_back  # it knows every key, and adds its defaults alone
    documented = re.findall(r"^\| `([^`{]+)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    known = {name if name.startswith("spot_async_") else family_of(name)[0] for name in documented}
    expressions = [target["expr"] for panel in written["panels"] for target in panel["targets"]]
    asked = {name for each in expressions for name in re.findall(r"spot_async_\w+", each)}
    assert asked - known == {"spot_async_evaluation_avg_"}  # of any number of samples
    assert len(written["panels"]) == 8


def completed(some: Any, whole: Any) -> Any:
    """Return `some`, with what only `whole` has."""
    if isinstance(some, dict):
        return whole | {key: completed(value, whole.get(key)) for key, value in some.items()}
    if isinstance(some, list):
        return [completed(one, other) for one, other in zip(some, whole, strict=True)]
    return some


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def load(words: list[str]) -> Config:
    """As `spot-async` would with these words, but for the user's own configuration."""
    assert words[:3] == ["train", "--resume", "auto"]
    assert words[3].endswith("my.yaml")
    config = load_config(ROOT / "configs" / "quickstart.yaml", words[4:])
    assert config.run.directory is not None  # else `auto` would find no run
    return config


def meets(config: Config, environ: dict[str, str]) -> tuple[int, int, str]:
    found = topology(environ, config.cluster)
    assert found is not None
    check_ranks(found, config.training.ranks)
    return found.nodes, found.node_rank, found.address


def slurm_job(tmp_path: Path, nodes: int, code: int = 0, **environ: str) -> tuple[list[list[str]], int]:
    """Run the batch script with stand-ins for Slurm's commands. Return what it called, and its exit code."""
    calls = tmp_path / "calls"
    calls.touch()
    hosts = "\n".join(f"node{i + 1}" for i in range(nodes))
    for name, then in ("srun", f"exit {code}"), ("scontrol", f'[ "$2" != hostnames ] || echo "{hosts}"'):
        program = tmp_path / name
        program.write_text(f'#!/bin/bash\necho "{name} ${{*@Q}}" >> {calls}\n{then}\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", DEPLOY / "slurm.sbatch", "my.yaml", "training.iterations=30"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"} | environ,
        capture_output=True,
    )
    return [shlex.split(line) for line in calls.read_text().splitlines()], done.returncode


@pytest.mark.parametrize(("nodes", "student", "teacher"), [(4, 2, 3), (3, 2, 2)])
def test_slurm_trains_on_the_first_nodes_and_serves_on_the_last(tmp_path, nodes, student, teacher):
    (_, srun), code = slurm_job(tmp_path, nodes, SLURM_GPUS_ON_NODE="8", SLURM_CPUS_ON_NODE="64")
    assert code == 0
    at = srun.index("spot-async")
    assert {"--nodes=2", "--ntasks=2", "--cpu-bind=none", "--cpus-per-task=64"} <= set(srun[:at])
    config = load(srun[at + 1 :])
    assert meets(config, SLURM) == (2, 1, "node1")
    assert (config.training.ranks, config.training.iterations) == (16, 30)
    assert config.run.directory == "runs/slurm-7"  # the same after a requeue
    for role, node in ((config.student, student), (config.teacher, teacher)):
        launch = role.backend.launch
        assert launch.host == f"node{node + 1}"
        assert launch.prefix == [
            "srun",
            "--overlap",
            f"--relative={node}",
            "--nodes=1",
            "--ntasks=1",
            "--cpu-bind=none",
        ]


def test_slurm_requeues_what_can_go_on_and_nothing_else(tmp_path):
    for code in (75, 0, 1):
        (tmp_path / str(code)).mkdir()
        calls, ended = slurm_job(tmp_path / str(code), 4, code)
        assert ended == code
        assert (calls[-1] == ["scontrol", "requeue", "7"]) == (code == 75)
    script = (DEPLOY / "slurm.sbatch").read_text()
    assert re.findall(r"^#SBATCH --(signal|requeue)", script, re.M) == ["signal", "requeue"]
    (tmp_path / "small").mkdir()
    calls, ended = slurm_job(tmp_path / "small", 2)
    assert (len(calls), ended) == (1, 2)  # no node is left for servers


def ray_job(tmp_path: Path, **environ: str) -> list[str]:
    """Run the script with a stand-in for Ray's command. Return what it was given."""
    program = tmp_path / "ray"
    program.write_text('#!/bin/bash\necho "${@@Q}"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", DEPLOY / "ray-job.sh", "/shared/my.yaml", "training.iterations=30"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(done.stdout)


def test_a_ray_job_reserves_node_0_s_devices_and_has_ray_place_the_other_nodes(tmp_path):
    words = ray_job(tmp_path)
    at = words.index("--")
    assert words[:at] == ["job", "submit", "--entrypoint-num-gpus", "8"]
    # Ray has no PATH of ours, and its shell makes way for the run.
    assert words[at + 1 : at + 3] == ["exec", "/shared/spot/bin/spot-async"]
    config = load(words[at + 3 :])
    assert meets(config, {"RAY_ADDRESS": "10.0.0.9:6379"}) == (2, 0, "10.0.0.9")
    assert (config.training.ranks, config.cluster.resources, config.training.iterations) == (16, {"GPU": 8.0}, 30)
    assert config.run.directory == "/shared/runs/my"  # the same when the run continues
    alone = ray_job(tmp_path, TRAINER_NODES="1", TRAINER_GPUS="4")
    assert "training.ranks=4" in alone
    assert not [word for word in alone if word.startswith(("cluster.nodes", "cluster.resources"))]


def test_skypilot_tells_all_of_the_topology():
    command = shlex.split(read("skypilot.yaml")["run"])
    assert command[:2] == ["exec", "~/spot/bin/spot-async"]  # without the shell, signals are spot-async's
    assert meets(load(command[2:]), SKYPILOT) == (2, 1, "10.0.0.1")


def test_skypilot_takes_its_file():
    sky = pytest.importorskip("sky")
    sky.Task.from_yaml(str(DEPLOY / "skypilot.yaml"))


def test_a_jobset_names_pod_0_and_has_no_shell_before_the_run():
    jobset = read("kubernetes-jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    program, *words = container["command"]
    assert program == "spot-async"
    config = load(words)
    name = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert meets(config, {"JOB_COMPLETION_INDEX": "1"}) == (job["template"]["spec"]["completions"], 1, name)
    (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert not {75, 1, 137} & set(rule["onExitCodes"]["values"])  # a restart can continue after these


def test_each_template_of_several_nodes_gives_all_of_them_the_run_s_secret():
    (job,) = read("kubernetes-jobset.yaml")["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == SECRET_VARIABLE
    assert "secretKeyRef" in variable["valueFrom"]
    assert read("skypilot.yaml")["secrets"] == {SECRET_VARIABLE: None}
    export = re.findall(rf"^export {SECRET_VARIABLE}=.*$", (DEPLOY / "slurm.sbatch").read_text(), re.M)
    made = {
        subprocess.run(
            ["bash", "-c", f"{export[0]}; printenv {SECRET_VARIABLE}"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for env in ({}, {}, {SECRET_VARIABLE: "0123456789abcdef"})
    }
    assert len(made) == 3
    for each in made:
        cluster_secret({SECRET_VARIABLE: each}, ClusterConfig())


def test_a_jobset_has_no_key_that_kubernetes_does_not_know():
    models = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")

    def known(manifest):  # unknown keys are dropped without a word
        return models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()

    manifest = read("kubernetes-jobset.yaml")
    assert known(manifest) == manifest
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    assert known(manifest) != manifest


def test_compose_attaches_the_run_to_both_servers():
    services = read("compose.yaml")["services"]
    config = load(services["run"]["command"])
    for role, model in (("student", config.student), ("teacher", config.teacher)):
        assert model.backend.url == f"http://{role}:8000"
        assert f"--model={model.model}" in services[role]["command"]
    # the student's weights go by disk
    assert {services[name]["volumes"][0].removesuffix(":ro") for name in services} == {"..:/shared"}
    assert config.run.directory.startswith("/shared/")
    assert (ROOT / services["run"]["build"]["dockerfile"]).is_file()


def test_compose_takes_its_file():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("needs docker compose")
    subprocess.run([docker, "compose", "-f", DEPLOY / "compose.yaml", "config", "--quiet"], check=True)


def test_the_container_is_made_of_files_that_are_there():
    copied = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Containerfile").read_text(), re.M)
    assert copied
    assert all((ROOT / name).exists() for names in copied for name in names.split())
