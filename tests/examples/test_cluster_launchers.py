"""The files that start a run on a cluster, as far as a machine without that cluster can try them."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = ["slurm.sbatch", "kuberay.yml", "skypilot.yml"]


def train_flags(file):
    """The flags of `onpolicy train` in a launcher, with a user's instead of its variables."""
    text = re.sub(r"^# ", "", (EXAMPLES / file).read_text(), flags=re.MULTILINE)
    text = text.replace("\\\n", " ")
    command = [line for line in text.splitlines() if "onpolicy train " in line][-1]
    words = shlex.split(
        command.partition("onpolicy train ")[2].replace("$head:$port", "10.0.0.1:6379")
    )
    given = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "math"]
    return [word for word in words if word not in ("$@", "$FLAGS", "...")] + given


@pytest.mark.parametrize("file", FILES)
def test_a_launcher_starts_a_valid_run_on_all_its_hosts(file):
    config = parse(TrainConfig, train_flags(file), "onpolicy train")
    validate(config)
    assert config.cluster.ray_address in ("auto", "10.0.0.1:6379")
    assert (config.cluster.actor_num_nodes, config.engine.rollout_num_engines) == (1, 8)


def test_both_kinds_of_hosts_of_kubernetes_are_alike_and_need_the_token():
    spec = yaml.safe_load((EXAMPLES / "kuberay.yml").read_text())["spec"]
    (workers,) = spec["workerGroupSpecs"]
    hosts = [group["template"]["spec"] for group in (spec["headGroupSpec"], workers)]
    assert hosts[0] == hosts[1]
    (container,) = hosts[0]["containers"]
    names = {variable["name"] for variable in container["env"]}
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= names
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in hosts[0]["volumes"]}


def test_no_launcher_waits_for_a_fixed_time_before_nodes_join():
    """A worker that starts before the head fails, and a job before the workers lacks their GPUs (ray
    issues 8181 and 25819, aibrix issue 245)."""
    for file in ("slurm.sbatch", "skypilot.yml"):
        text = (EXAMPLES / file).read_text()
        assert {int(seconds) for seconds in re.findall(r"sleep (\d+)", text)} == {1}
        assert "until ray status" in text[: text.index("ray start --address")]
        assert re.search(r"ray status .* -ge \S+N(?:NODES|UM_NODES)", text)


def test_the_scripts_of_launchers_are_scripts(tmp_path):
    task = yaml.safe_load((EXAMPLES / "skypilot.yml").read_text())
    (tmp_path / "run.sh").write_text(task["run"])
    (tmp_path / "setup.sh").write_text(task["setup"])
    files = [*tmp_path.iterdir(), EXAMPLES / "slurm.sbatch", EXAMPLES / "docker/install.sh"]
    for file in files:
        assert subprocess.run(["bash", "-n", str(file)]).returncode == 0


def test_the_images_and_ci_install_by_one_script():
    """Steps that an image alone has are tried by nobody without docker."""
    lines = (EXAMPLES / "docker/Dockerfile").read_text().splitlines()
    runs = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    assert runs == ["examples/docker/install.sh cpu", "examples/docker/install.sh gpu"]
    assert runs[0] in (ROOT / ".ci/run").read_text()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    assert all((ROOT / name).exists() for names in copied for name in names)


def test_workflows_call_what_ci_calls():
    for file in sorted((ROOT / ".github/workflows").glob("*.yml")):
        (job,) = yaml.safe_load(file.read_text())["jobs"].values()
        assert ".ci/run" in [step.get("run") for step in job["steps"]]
