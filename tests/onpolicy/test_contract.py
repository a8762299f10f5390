import dataclasses
import json

import pytest

from onpolicy.contract import KINDS, OUTSIDE, AttentionShape, NumericsContract, OperatorShapes
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
        {"kinds": ("model", "linear")},
        {"layers": ("0", "outside")},
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


def test_of_whole_contracts_only_the_stock_one_promises_nothing():
    assert CONTRACT.is_aligned
    assert not dataclasses.replace(CONTRACT, backend="stock").is_aligned


def test_a_partial_contract_aligns_its_kinds_and_promises_nothing():
    stock = dataclasses.replace(CONTRACT, backend="stock")
    every = dataclasses.replace(CONTRACT, kinds=KINDS)
    part = dataclasses.replace(CONTRACT, kinds=("model", "attention"))
    assert NumericsContract.from_json(part.to_json()) == part
    assert all(CONTRACT.aligns(kind) and every.aligns(kind) for kind in KINDS)
    assert not any(stock.aligns(kind) for kind in KINDS)
    assert [kind for kind in KINDS if part.aligns(kind)] == ["model", "attention"]
    assert not part.is_aligned and not every.is_aligned
    assert [c.shares_model for c in (CONTRACT, every, part, stock)] == [True, True, True, False]


def test_a_contract_of_some_layers_aligns_its_kinds_there_and_promises_nothing():
    part = dataclasses.replace(CONTRACT, kinds=("model", "norm"), layers=("0", OUTSIDE))
    assert NumericsContract.from_json(part.to_json()) == part
    assert [layer for layer in ("0", "1", OUTSIDE) if part.aligns("norm", layer)] == ["0", OUTSIDE]
    assert part.aligns("norm") and not part.aligns("linear", "0")
    assert CONTRACT.aligns("norm", "1")
    assert not dataclasses.replace(CONTRACT, layers=("0", "1", OUTSIDE)).is_aligned


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"backend": "cpu"}'])
def test_a_record_of_another_version_is_refused(text):
    with pytest.raises(ContractError, match="same version"):
        NumericsContract.from_json(text)


@pytest.mark.parametrize("field", ["attention_chunk", "log_prob"])
def test_a_record_that_lacks_a_field_is_refused_and_not_completed(field):
    """As an older version writes it: its bits are not those of today's default."""
    record = json.loads(CONTRACT.to_json())
    del record[field]
    with pytest.raises(ContractError, match=f"without {field}.*same version"):
        NumericsContract.from_json(json.dumps(record))
