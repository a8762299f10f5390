"""A few rows of the covering array as a user starts them, on a real SGLang server."""

from itertools import islice

import pytest

from onpolicy.config.flags import flag_values
from tests.support.tiny_combinations import arguments_of, combinations_of, make_base
from tests.support.train_runs import finish, metrics_of, start_train, write_prompts
from tests.support.unstarted_run import changed

pytestmark = [pytest.mark.runs, pytest.mark.engine]

ROWS = 2
GIVEN = {"num_rollout": 2, "rollout_batch_size": 2, "global_batch_size": 8}
"""In place of what `start_train` asks for."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("combinations"))


def aligned_rows(base):
    """Those that train on what they are given: untrained, the model answers every prompt alike, and
    dynamic sampling would look for another in vain."""
    rows = (row for row in combinations_of(base).rows() if not row.get("dynamic_sampling"))
    plans = ((row, changed(base, **row).plan) for row in rows)
    return [*islice((row for row, plan in plans if plan.is_always_on_policy), ROWS)]


def test_rows_of_the_array_train_on_real_engines(base, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl")
    values = flag_values(base)
    for number, row in enumerate(aligned_rows(base)):
        directory = tmp_path / str(number)
        whole = {**GIVEN, "dtype": values["dtype"], "max_tokens_per_gpu": 64, **row}
        argv = arguments_of(whole)
        finish(start_train(values["hf_checkpoint"], data, directory, *argv))
        records = metrics_of(directory)
        assert len(records) == 2
        assert all(record["parity/num_mismatched_tokens"] == 0 for record in records)
