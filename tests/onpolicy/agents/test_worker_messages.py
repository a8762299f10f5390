import json
import math
import pickle
import random

import numpy as np
import pytest

from onpolicy.agents import worker_messages
from onpolicy.agents.worker_messages import Parser, from_run, from_worker

MESSAGES = [{"kind": "beat"}, {"value": ["ü" * 50, 0.1, None]}, {"token_ids": [*range(300)]}]


@pytest.mark.parametrize(("frame", "load"), [(from_worker, json.loads), (from_run, pickle.loads)])
def test_messages_come_as_they_were_sent_however_their_bytes_arrive(frame, load):
    data, chance = b"".join(map(frame, MESSAGES)), random.Random(0)
    for _ in range(20):
        parser, rest, found = Parser(load), data, []
        while rest:
            count = chance.randrange(1, 40)
            found += parser.feed(rest[:count])
            rest = rest[count:]
        assert found == MESSAGES


def test_numbers_of_numpy_are_numbers_and_no_number_is_left_for_the_run_to_refuse():
    (found,) = Parser(json.loads).feed(from_worker({"reward": np.float32(1.5), "n": np.int64(3)}))
    assert found == {"reward": 1.5, "n": 3}
    (found,) = Parser(json.loads).feed(from_worker({"reward": np.float32("nan")}))
    assert math.isnan(found["reward"])


def test_floats_keep_their_bits():
    numbers = [random.Random(i).gauss(0, 1e-9) for i in range(50)]
    (found,) = Parser(json.loads).feed(from_worker({"numbers": numbers}))
    assert found == {"numbers": numbers}


def test_what_is_too_large_or_no_json_is_not_sent(monkeypatch):
    with pytest.raises(TypeError, match="not JSON serializable"):
        from_worker({"value": object()})
    monkeypatch.setattr(worker_messages, "MAX_SIZE", 100)
    with pytest.raises(ValueError, match="at most 100 may be sent"):
        from_worker({"value": "x" * 101})
    with pytest.raises(ValueError, match="a message of 1936287860 bytes"):
        list(Parser(json.loads).feed(b"this is no message"))
