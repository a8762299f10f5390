"""The numerics contract: everything that decides the bits of a log-probability, in one record.

The run's configuration becomes one contract at the launch boundary. Both engines are started from
it, each reports its fingerprint back, and two engines whose fingerprints differ never exchange a
token. Nothing downstream asks which mode is on: it asks the contract for its operators.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from onpolicy.errors import ContractError

CONTRACT_VARIABLE = "ONPOLICY_CONTRACT"
"""Environment variable that carries the contract, as JSON, into an engine's processes."""

THREADS_VARIABLE = "ONPOLICY_CPU_THREADS"
"""Environment variable with the number of threads of an engine's operators; changes no bits."""

EXTENSIONS_VARIABLE = "ONPOLICY_EXTENSIONS"
"""Environment variable with what a command puts into an engine beside its contract, as a JSON object: of
each class "module:name" the text that it is made from. It changes no bits."""

PORTABLE_KERNELS = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""Variables that ask for kernels of MKL, PyTorch and oneDNN that every x86-64 processor with AVX2 has,
whoever made it. Each library reads its own once."""

ATTENTION_CHUNK = 512
"""Keys that attention sums apart, cut at multiples of it from a sequence's first token, and put together
in ascending order. A multiple of every block of keys of the kernels (64)."""

LOG_PROB = "log_softmax(float32(logits) / temperature)"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """A kind of attention that some layers of a model have; see `Operators.attention`."""

    heads: int
    kv_heads: int

    head_dim: int
    """Numbers of a query and of a key."""

    value_dim: int
    """Numbers of a value."""

    window: int | None = None
    """Keys that a query sees at most, its own included; None: all up to its own."""

    softcap: float | None = None
    """Bound of the scores' absolute value; None: they are not capped."""

    sinks: bool = False
    """Whether every head has one more score in the softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShapes:
    """The sizes at which a model calls the operators, for the self-check at start-up."""

    linear: tuple[tuple[int, int, bool], ...]
    """Distinct (out features N, in features K, has bias). Example: ((768, 256, False),)"""

    attention: tuple[AttentionShape, ...]
    """Distinct kinds of attention, in the order of the layers that have them."""

    norm: tuple[int, ...]
    """Distinct sizes of RMS norms. Example: (32, 256)"""

    vocab_size: int

    layer_norm: tuple[int, ...] = ()
    """Like `norm`, of layer norms."""

    row_linear: tuple[tuple[int, int, bool], ...] = ()
    """Like `linear`, those that sum over K by `row_parallel_blocks`; empty when that is 1."""

    experts: tuple[tuple[int, int, int, int], ...] = ()
    """Distinct (experts E, intermediate I, hidden H, chosen per token k). Example: ((8, 96, 64, 2),)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Low-rank adapters beside frozen linears (`onpolicy/models/lora/adapters.py`)."""

    rank: int

    scale: float
    """What an adapter adds is multiplied by it, in float32."""

    targets: tuple[str, ...]
    """The last parts of the names of the linears that have one, sorted. Example: ("q_proj", "v_proj")"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsContract:
    """What the rollout engine and the trainer must agree on, and the operators that keep it."""

    backend: str
    """`cpu`, `onednn` (the CPU's, with products by bfloat16 instructions), `portable` (the CPU's, on
    kernels of all x86-64 processors with AVX2), `triton` (any GPU from Ampere on), `hopper`
    (FlashAttention-3 and DeepGEMM): the aligned operators of that name (`ops/backends`); `stock`: each
    engine's own kernels, nothing promised."""

    device: str
    """Kind of device that both engines compute on: `cpu` or `cuda`."""

    dtype: str
    """Compute dtype of weights and activations: `bfloat16` or `float32`."""

    shapes: OperatorShapes

    row_parallel_blocks: int = 1
    """Blocks into which every row-parallel linear cuts K, a power of two; the largest
    tensor-parallel degree either engine can have (see `onpolicy/ops/row_parallel.py`)."""

    context: int | None = None
    """Tokens that the engine serves at most, where they decide the angles of the rotary embedding
    (`onpolicy/models/rotary_factors.py`); None: angles depend on positions alone."""

    weight_format: str = ""
    """The format that linears' weights are rounded to before either engine computes with them, a name in
    `onpolicy/weights/rounding.py`; empty: they are those that are trained, in `dtype`."""

    activation_format: str = ""
    """The format that inputs of linears are rounded to, a name in `onpolicy/models/rounded_inputs.py`;
    empty: they are in `dtype`."""

    log_prob: str = LOG_PROB

    attention_chunk: int = ATTENTION_CHUNK
    """Keys that the operators' attention sums apart. (FlashAttention-3 sums all of them in one run.)"""

    model_definition: str = "transformers"
    """Whose modelling code both engines run."""

    adapter: AdapterShape | None = None
    """The adapters that both engines have, or, where not all is aligned, the trainer alone; None: the
    model alone."""

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables under which the processes that keep it start."""
        return PORTABLE_KERNELS if self.backend == "portable" else {}

    @property
    def unrounded(self) -> NumericsContract:
        """The same for a model that rounds nothing: a teacher, a critic."""
        return dataclasses.replace(self, weight_format="", activation_format="")

    @property
    def merges_adapter(self) -> bool:
        """Whether an engine holds what the trainer's adapters make of the weights: it has none."""
        return self.adapter is not None and not self.is_aligned

    @property
    def of_engine(self) -> NumericsContract:
        """What an engine is started under, which knows nothing of adapters that are merged."""
        return dataclasses.replace(self, adapter=None) if self.merges_adapter else self

    @property
    def is_aligned(self) -> bool:
        """Whether equality of bits is promised, and so checked: both engines run one modelling code on
        the same operators."""
        return self.backend != "stock"

    @property
    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly when two contracts are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> NumericsContract:
        """The inverse of `to_json`. Raises ContractError if the record is of another version."""
        try:
            record = json.loads(text)
            fields = {field.name for field in dataclasses.fields(NumericsContract)}
            if missing := fields - record.keys():  # an older version's: a default would be a guess
                raise ValueError(f"without {', '.join(sorted(missing))}")
            shapes = record.pop("shapes")
            shapes["linear"] = tuple(map(tuple, shapes["linear"]))
            shapes["attention"] = tuple(AttentionShape(**kind) for kind in shapes["attention"])
            shapes["norm"] = tuple(shapes["norm"])
            shapes["layer_norm"] = tuple(shapes["layer_norm"])
            shapes["row_linear"] = tuple(map(tuple, shapes["row_linear"]))
            shapes["experts"] = tuple(map(tuple, shapes["experts"]))
            if record["adapter"]:
                targets = tuple(record["adapter"].pop("targets"))
                record["adapter"] = AdapterShape(**record["adapter"], targets=targets)
            return NumericsContract(shapes=OperatorShapes(**shapes), **record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ContractError(
                f"{CONTRACT_VARIABLE}={text[:200]!r}: not a numerics contract of this version of "
                f"onpolicy ({error}). Start both engines with the same version."
            ) from error
