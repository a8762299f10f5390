"""`onpolicy eval` of what `onpolicy sft` wrote: on one engine, on two, and on stock ones."""

import json

import pytest

from onpolicy.cli.main import main
from onpolicy.cli.parse import parse
from onpolicy.config.sft_flags import SftConfig
from onpolicy.run.supervised import supervised_run
from onpolicy.run.supervised.supervised_run import read_inputs
from onpolicy.training import distributed
from tests.onpolicy.run.supervised.test_supervised_run import ROWS, trainer_here
from tests.support.train_runs import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.runs]


@pytest.fixture(scope="module")
def tuned(checkpoint, tmp_path_factory):
    """A directory with the checkpoints of two steps in `save`, and their weights alone in `hf`."""
    directory = tmp_path_factory.mktemp("sft")
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    argv = [
        "--hf-checkpoint", str(checkpoint), "--prompt-data", str(rows), "--dtype", "float32",
        "--eval-prompt-data", str(rows), "--global-batch-size", "15", "--lr", "1e-2",
        "--save", str(directory / "save"), "--save-interval", "1", "--seed", "3",
        "--save-hf", str(directory / "hf"), "--run-dir", str(directory / "run"),
    ]  # fmt: skip
    distributed.init_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervised_run, "trainer_on_cluster", trainer_here)
        config = parse(SftConfig, argv, "onpolicy sft")
        assert supervised_run.fine_tune(config, read_inputs(config)).steps == 2
    return directory


@pytest.fixture(scope="module")
def evaluated(tuned, data, tmp_path_factory):
    """(report, samples without their step, run directory) of what is evaluated so."""

    def evaluate(what, *argv):
        directory = tmp_path_factory.mktemp("eval")
        flags = [
            "--eval-prompt-data", str(data), "--custom-rm-path", "own_reward.score",
            "--n-samples-per-eval-prompt", "2", "--eval-max-response-len", "12",
            "--run-dir", str(directory), "--json", str(directory / "report.json"),
        ]  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(ROOT / "tests/e2e"))
            assert main(["eval", str(tuned / what), *flags, *argv]) == 0
        report = json.loads((directory / "report.json").read_text())
        (file,) = (directory / "samples").glob("eval_*")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == 16 and "eval/pass@2" in report["metrics"]
        assert {sample.pop("step") for sample in samples} == {report["rollouts_done"]}
        return report, samples, directory

    return evaluate


@pytest.fixture(scope="module")
def alone(evaluated):
    """The weights of the last step, as any program would read them, on one engine."""
    return evaluated("hf", "--dtype", "float32", "--seed", "3")


def test_the_latest_checkpoint_of_a_run_of_sft_on_two_engines_has_the_samples_of_its_weights_on_one(
    evaluated, alone
):
    """Seed and dtype are the run's, and its rows of --eval-prompt-data are no set."""
    report, samples, directory = evaluated("save", "--rollout-num-engines", "2")
    assert (report["rollouts_done"], alone[0]["rollouts_done"]) == (2, 0)
    for name in ("metrics", "weights", "contract"):
        assert report[name] == alone[0][name]
    assert samples == alone[1]
    logs = [(directory / "logs" / f"engine_{i}.log").read_text() for i in range(2)]
    assert all("Prefill batch" in log for log in logs)


def test_an_earlier_checkpoint_has_other_weights_and_samples(evaluated, alone):
    """So the test above would notice another step's."""
    report, samples, _ = evaluated("save/step_000001")
    assert report["rollouts_done"] == 1
    assert report["weights"] != alone[0]["weights"] and samples != alone[1]


def test_stock_engines_evaluate_the_same_weights_to_other_samples(evaluated, alone):
    report, samples, _ = evaluated("save", "--no-true-on-policy-mode")
    assert report["weights"] == alone[0]["weights"] and report["contract"] != alone[0]["contract"]
    assert samples != alone[1]
