"""The numerics contract: one record of everything that decides the bits of a log-probability.

The run's configuration becomes one contract at launch. Both engines start from it and report its
fingerprint back, and engines whose fingerprints differ never exchange a token. Code after the launch
does not branch on the mode: it takes its operators from the contract.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from onpolicy.errors import ContractError
from onpolicy.system.records import Shape

CONTRACT_VARIABLE = "ONPOLICY_CONTRACT"
"""Environment variable that carries the contract, as JSON, into an engine's processes."""

THREADS_VARIABLE = "ONPOLICY_CPU_THREADS"
"""Environment variable with the number of threads of an engine's operators; changes no bits."""

DIGESTS_VARIABLE = "ONPOLICY_ROW_DIGESTS"
"""Environment variable that has an engine digest whole rows of log-probabilities, unless it is empty; it
changes no bits."""

EXTENSIONS_VARIABLE = "ONPOLICY_EXTENSIONS"
"""Environment variable with what a command adds to an engine beside its contract: a JSON object from a
class, "module:name", to the text that it is made from. It changes no bits."""

PORTABLE_KERNELS = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""Environment variables that make MKL, PyTorch and oneDNN take kernels that every x86-64 processor with
AVX2 runs, whoever made it. Each library reads its own once."""

NO_SPLIT_K = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Environment variables that leave cuBLAS and cuBLASLt too little memory to cut a sum over K into parts.
PyTorch reads each once, at its first product on a GPU."""

VARIABLES = {"portable": PORTABLE_KERNELS, "cublaslt": NO_SPLIT_K}
"""Environment variables under which every process of these operators must start."""

ATTENTION_CHUNK = 512
"""Number of keys that attention sums as one chunk. Chunks begin at multiples of it, counted from a
sequence's first token, and are combined in ascending order. A multiple of every key block of the
kernels (64)."""

FLASH_CHUNK = 2048
"""The same for FlashAttention-3, whose key blocks begin anew with every chunk."""

DELTA_CHUNK = 64
"""Number of tokens of a chunk of the gated delta rule (`onpolicy/ops/recurrence.py`), whatever number of
them is computed at a time."""

LOG_PROB = "log_softmax(float32(logits) / temperature)"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One kind of attention that some layers of a model use; see `Operators.attention`."""

    heads: int
    kv_heads: int

    head_dim: int
    """Size of a query and of a key."""

    value_dim: int
    """Size of a value."""

    window: int | None = None
    """Largest number of keys that a query attends to, its own included; None: all up to its own."""

    softcap: float | None = None
    """Bound of the absolute value of the scores; None: no cap."""

    sinks: bool = False
    """Whether every head has an attention sink: one more score in the softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """The sizes of a gated delta network; see `Operators.gated_delta`."""

    key_heads: int
    value_heads: int

    key_dim: int
    """Size of a query and of a key."""

    value_dim: int

    kernel_size: int
    """Number of inputs of a channel that the convolution adds."""

    chunk: int = DELTA_CHUNK
    """Number of tokens of a chunk."""

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShapes:
    """The sizes at which a model calls the operators, for the self-check at start-up."""

    linear: tuple[tuple[int, int, bool], ...]
    """Distinct (out features N, in features K, has bias). Example: ((768, 256, False),)"""

    attention: tuple[AttentionShape, ...]
    """Distinct kinds of attention, in the order of the layers that use them."""

    norm: tuple[int, ...]
    """Distinct sizes of RMS norms. Example: (32, 256)"""

    vocab_size: int

    layer_norm: tuple[int, ...] = ()
    """Distinct sizes of layer norms."""

    row_linear: tuple[tuple[int, int, bool], ...] = ()
    """Distinct (N, K, has bias) of row-parallel linears, which sum over K in `row_parallel_blocks`
    blocks; empty when that is 1."""

    experts: tuple[tuple[int, int, int, int], ...] = ()
    """Distinct (experts E, intermediate I, hidden H, top k per token). Example: ((8, 96, 64, 2),)"""

    delta: tuple[DeltaShape, ...] = ()
    """Distinct gated delta networks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Low-rank adapters beside frozen linears (`onpolicy/models/lora/adapters.py`)."""

    rank: int

    scale: float
    """Factor of an adapter's output, in float32."""

    targets: tuple[str, ...]
    """Last parts of the names of the linears that have an adapter, sorted. Example: ("q_proj",
    "v_proj")"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsContract:
    """Everything that the rollout engine and the trainer must agree on, and the operators that
    keep it."""

    backend: str
    """Name of the aligned operators (`ops/backends`): `cpu`, `onednn` (CPU, products by bfloat16
    instructions), `portable` (CPU, kernels that all x86-64 processors with AVX2 have), `triton` (any
    GPU from Ampere on), `hopper` (FlashAttention-3 and DeepGEMM) or `cublaslt` (FlashAttention-3 and
    cuBLASLt). `stock`: each engine uses its own kernels, and nothing is promised."""

    device: str
    """Device type that both engines compute on: `cpu` or `cuda`."""

    dtype: str
    """Compute dtype of weights and activations: `bfloat16`, `float16` or `float32`."""

    shapes: OperatorShapes

    row_parallel_blocks: int = 1
    """Number of blocks into which every row-parallel linear cuts K, a power of two; the largest
    tensor-parallel degree that either engine can have (see `onpolicy/ops/row_parallel.py`)."""

    context: int | None = None
    """Context length of the engine, where the rotary embedding's angles depend on it
    (`onpolicy/models/rotary_factors.py`); None: angles depend on positions alone."""

    weight_format: str = ""
    """Format to which both engines round the weights of linears before they compute, a name in
    `onpolicy/weights/rounding.py`; empty: they compute with the trained weights in `dtype`."""

    activation_format: str = ""
    """Format to which the inputs of linears are rounded, a name in `onpolicy/models/rounded_inputs.py`;
    empty: inputs stay in `dtype`."""

    log_prob: str = LOG_PROB

    attention_chunk: int = ATTENTION_CHUNK
    """Number of keys that attention sums as one chunk."""

    flash_chunk: int = FLASH_CHUNK
    """The same of FlashAttention-3, in layers without a window."""

    model_definition: str = "transformers"
    """Library whose modelling code both engines run."""

    adapter: AdapterShape | None = None
    """The adapters that both engines have, or that the trainer alone has under a stock contract; None:
    no adapters."""

    images: str = ""
    """model_type of the checkpoint whose images both engines see; empty: text alone."""

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables under which processes must start to keep this contract."""
        return VARIABLES.get(self.backend, {})

    @property
    def unrounded(self) -> NumericsContract:
        """Return this contract without rounding, for a teacher or a critic."""
        return dataclasses.replace(self, weight_format="", activation_format="")

    @property
    def merges_adapter(self) -> bool:
        """Return whether a push merges the trainer's adapters into the weights, because the engine has
        no adapters."""
        return self.adapter is not None and not self.is_aligned

    @property
    def of_engine(self) -> NumericsContract:
        """Return the contract that an engine starts under: without adapters where a push merges them."""
        return dataclasses.replace(self, adapter=None) if self.merges_adapter else self

    @property
    def is_aligned(self) -> bool:
        """Return whether equality of bits is promised, and therefore checked: both engines run the same
        modelling code on the same operators."""
        return self.backend != "stock"

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal exactly when two contracts are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> NumericsContract:
        """Read a contract from the JSON that `to_json` wrote. Raises ContractError for a record of
        another version."""
        try:
            return _SHAPE.read(text)
        except ValueError as error:
            raise ContractError(
                f"{CONTRACT_VARIABLE}={text[:200]!r}: not a numerics contract of this version of "
                f"onpolicy ({error}). Start both engines with the same version."
            ) from error


_SHAPE = Shape(NumericsContract)
