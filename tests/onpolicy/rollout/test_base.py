import pytest

from onpolicy.rollout.base import SamplingJob
from onpolicy.types import Request, SamplingParams
from tests.support.samples import make_completion

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4, stop_token_ids=(1,))


def make_job(count):
    return SamplingJob([Request(prompt_ids=[7], sampling_seed=0, params=PARAMS)] * count)


def test_a_job_knows_what_it_misses_and_answers_in_the_order_of_its_requests():
    job = make_job(3)
    for number in (2, 0):
        job.add(number, make_completion([number], [-1.0]))
    assert (job.missing, job.num_done) == ([1], 2)
    with pytest.raises(KeyError):
        print(job.completions)
    job.add(1, make_completion([1], [-1.0]))
    assert job.missing == []
    assert [completion.response_ids for completion in job.completions] == [[0], [1], [2]]


def test_jobs_of_equal_requests_share_nothing():
    first, second = make_job(1), make_job(1)
    first.add(0, make_completion([5], [-1.0]))
    assert second.missing == [0]


def test_a_job_grows_until_it_is_interrupted_and_tells_who_works_on_it():
    job, news = make_job(1), []
    job.on_news = lambda: news.append(job.is_interrupted)
    job.requests += make_job(2).requests
    job.add(0, make_completion([0], [-1.0]))
    job.add(2, make_completion([2], [-1.0]))
    assert (job.missing, job.num_done, job.is_done, news) == ([1], 2, False, [])
    job.interrupt()
    assert news == [True]
    assert [completion.response_ids for completion in job.completions] == [[0], [2]]
