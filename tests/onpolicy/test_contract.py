import dataclasses
import json

import pytest

from onpolicy.contract import AttentionShape, NumericsContract, OperatorShapes
from onpolicy.errors import ContractError

ATTENTION = AttentionShape(heads=2, kv_heads=1, head_dim=4, value_dim=4)
SHAPES = OperatorShapes(linear=((8, 4, False),), attention=(ATTENTION,), norm=(4,), vocab_size=9)
CONTRACT = NumericsContract(backend="cpu", device="cpu", dtype="bfloat16", shapes=SHAPES)


def test_json_keeps_every_field():
    assert NumericsContract.from_json(CONTRACT.to_json()) == CONTRACT


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "stock"},
        {"dtype": "float32"},
        {"log_prob": "log(softmax)"},
        {"attention_chunk": 1024},
        {"flash_chunk": 1024},
        {
            "shapes": dataclasses.replace(
                SHAPES, attention=(dataclasses.replace(ATTENTION, window=8),)
            )
        },
        {"shapes": dataclasses.replace(SHAPES, linear=((8, 4, True),))},
    ],
)
def test_fingerprint_depends_on_every_field(change):
    assert dataclasses.replace(CONTRACT, **change).fingerprint != CONTRACT.fingerprint


def test_only_a_stock_contract_promises_nothing():
    assert CONTRACT.is_aligned
    assert not dataclasses.replace(CONTRACT, backend="stock").is_aligned


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"backend": "cpu"}'])
def test_a_record_of_another_version_is_refused(text):
    with pytest.raises(ContractError, match="same version"):
        NumericsContract.from_json(text)


@pytest.mark.parametrize("field", ["attention_chunk", "flash_chunk", "log_prob"])
def test_a_record_that_lacks_a_field_is_refused_and_not_completed(field):
    """As an older version writes it: its bits are not those of today's default."""
    record = json.loads(CONTRACT.to_json())
    del record[field]
    with pytest.raises(ContractError, match=f"holds no {field}.*same version"):
        NumericsContract.from_json(json.dumps(record))
