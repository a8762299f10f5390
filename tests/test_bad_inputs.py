"""Bad inputs of every kind: each gets its value, the rule and the remedy before anything is started.

A row is (id, how the input is made, arguments, what must be said). `{d}` in arguments stands for a
directory that holds a good checkpoint (model/) and good prompts (data.jsonl); `make` spoils them. A row's
arguments follow, and win over, those of a good run.
"""

# ruff: noqa: E501 (a table)

import json
import os
import re
import shlex
import shutil
import struct
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from onpolicy.cli.main import main
from onpolicy.rollout.server import EngineServer
from onpolicy.training import distributed
from tests.support.forked_processes import forked_processes
from tests.support.processes import is_guard
from tests.support.tiny import make_checkpoint, make_tokenizer

pytestmark = pytest.mark.long

GOOD = {
    "train": "--hf-checkpoint {d}/model --prompt-data {d}/data.jsonl --rm-type exact --run-dir {d}/run "
    "--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 8",
    "verify": "--hf-checkpoint {d}/model --run-dir {d}/run",
    "bench": "--hf-checkpoint {d}/model --run-dir {d}/run",
    "serve": "--hf-checkpoint {d}/model --run-dir {d}/run",
    "report": "",
}

NOTHING = None


def write(name, content):
    data = content.encode() if isinstance(content, str) else content
    return lambda d: (d / name).write_bytes(data)


def yaml(content):
    return write("c.yaml", content)


def rows(*lines):
    """Prompts: objects, or lines as they are."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return write("data.jsonl", "\n".join(text) + "\n")


def parquet(*rows):
    return lambda d: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), d / "d.parquet")


def edit(name, **changes):
    """Change fields of a JSON file of the checkpoint; None takes one out."""

    def make(d):
        file = d / "model" / name
        fields = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))

    return make


def index(weight_map):
    return write("model/model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def remove(*names):
    return lambda d: [(d / name).unlink() for name in names]


def directory(name):
    def make(d):
        (d / name).unlink(missing_ok=True)
        (d / name).mkdir()

    return make


def link(name, target):
    def make(d):
        (d / name).unlink(missing_ok=True)
        (d / name).symlink_to(target.format(d=d))

    return make


def unreadable(name):
    """Reading it is an error for everybody, root too."""
    return link(name, "/proc/self/mem")


def truncated(d):
    file = d / "model" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def header(text, size=None):
    """A safetensors file that begins with this header."""
    return write("model/model.safetensors", struct.pack("<Q", size or len(text)) + text.encode())


def without_a_tensor(d):
    tensors = load_file(d / "model" / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, d / "model" / "model.safetensors", metadata={"format": "pt"})


def another_vocabulary(d):
    """A tokenizer whose tokens the model does not have."""
    vocabulary = make_tokenizer().get_vocab()
    text = (d / "model" / "tokenizer.json").read_text()
    token = vocabulary["b"]
    (d / "model" / "tokenizer.json").write_text(text.replace(f'"b": {token},', '"b": 4000,'))


def reference(**changes):
    return lambda d: make_checkpoint(d / "reference", **changes)


def chat_template(text):
    return write("model/chat_template.jinja", text)


def runs(**files):
    """A run directory, as `onpolicy report` reads it."""

    def make(d):
        (d / "old").mkdir()
        for name, content in files.items():
            write(f"old/{name.replace('_', '.')}", content)(d)

    return make


YAML = "--custom-config-path {d}/c.yaml"
OWN = "--rm-type '' --custom-rm-path"
CHAT = "--apply-chat-template"

# fmt: off
TRAIN = [
    # Numbers beyond their range
    ("seed-31-digits", NOTHING, f"--seed {'9' * 31}", "--seed=9+: must be at most 4294967295"),
    ("seed-negative", NOTHING, "--seed -1", "--seed=-1: must be at least 0"),
    ("seed-5000-digits", NOTHING, f"--seed {'9' * 5000}", "Error parsing --seed"),
    ("seed-float", NOTHING, "--seed 1.5", "Error parsing --seed: invalid literal for int"),
    ("port-70000", NOTHING, "--rollout-base-port 70000", "--rollout-base-port=70000: must be at most 65535"),
    ("port-negative", NOTHING, "--rollout-base-port -1", "--rollout-base-port=-1: must be at least 0"),
    ("port-of-the-second-server", NOTHING, "--rollout-base-port 65535 --rollout-num-engines 2", "65536, beyond 65535"),
    ("lr-nan", NOTHING, "--lr nan", "--lr=nan: must be at least 0"),
    ("lr-text", NOTHING, "--lr fast", "Error parsing --lr: could not convert"),
    ("temperature-1e-30", NOTHING, "--rollout-temperature 1e-30", "--rollout-temperature=1e-30: .*SGLang samples greedily"),
    ("eval-temperature-1e-9", NOTHING, "--eval-temperature 1e-9 --eval-interval 1 --eval-prompt-data {d}/data.jsonl", "--eval-temperature=1e-09: SGLang samples greedily"),
    ("top-p-0", NOTHING, "--rollout-top-p 0", "--rollout-top-p=0.0: must be greater than 0"),
    ("top-p-2", NOTHING, "--rollout-top-p 2", "--rollout-top-p=2.0: must be at most 1"),
    ("top-k-0", NOTHING, "--rollout-top-k 0", r"--rollout-top-k=0: must be -1 \(no limit\) or at least 1"),
    ("min-p-nan", NOTHING, "--rollout-min-p nan", "--rollout-min-p=nan: must be at least 0"),
    ("batch-1e9", NOTHING, f"--rollout-batch-size {10**9}", "= 2000000000 samples, and a rollout.* may have 10000000"),
    ("global-batch", NOTHING, "--global-batch-size 3", "--global-batch-size=3: .*Divisors of 4: 1, 2, 4"),
    ("response-len", NOTHING, "--rollout-max-response-len 255", "--rollout-max-response-len=255: .*context of 256"),
    ("eval-response-len", NOTHING, "--eval-max-response-len 999 --eval-interval 1 --eval-prompt-data {d}/data.jsonl", "--eval-max-response-len=999: .*context of 256"),
    ("threads", NOTHING, "--cpu-threads 1000000", "--cpu-threads=1000000: must be at most 4096"),
    ("timeout-inf", NOTHING, "--rollout-start-timeout inf", "--rollout-start-timeout=inf: must be at most 1000000000"),
    ("error-rate", NOTHING, "--rm-max-error-rate 1.5", "--rm-max-error-rate=1.5: must be at most 1"),
    ("clip-grad-nan", NOTHING, "--clip-grad nan", "--clip-grad=nan: must be at least 0"),
    ("dc-lambda", NOTHING, "--dc-mode fixed --dc-lambda=-1", "--dc-lambda=-1.0: must be at least 0"),
    ("tis-order", NOTHING, "--use-tis --tis-lower-bound 3", "--tis-lower-bound=3.0: must not exceed --tis-upper-bound 2.0"),
    ("rs-order", NOTHING, "--use-rs --rs-lower-bound 3 --rs-upper-bound 2", "--rs-lower-bound=3.0: must not exceed --rs-upper-bound 2.0"),
    ("veto-nan", NOTHING, "--rs-veto-threshold nan", "--rs-veto-threshold=nan: must be at least 0"),
    ("stop-token-negative", NOTHING, "--rollout-stop-token-ids -1", "--rollout-stop-token-ids=-1: must be at least 0"),
    ("stop-token-beyond", NOTHING, "--rollout-stop-token-ids 5 137", "--rollout-stop-token-ids=137: the model's tokens are 0 to 136"),
    ("megatron-tp-0", NOTHING, "--train-backend megatron --megatron-tp 0", "--megatron-tp=0: must be at least 1"),
    # What nothing would read
    ("unread-megatron", NOTHING, "--megatron-tp 2", "--megatron-tp=2: only --train-backend megatron reads it"),
    ("unread-dc-eta-in-fixed", NOTHING, "--dc-mode fixed --dc-eta 2", "--dc-eta=2.0: only --dc-mode lagrangian"),
    ("unread-governor", NOTHING, "--governor-k3 0.1", "--governor-k3=0.1: only --mismatch-governor reads it"),
    ("unread-decay", NOTHING, "--length-decay-period 5", "--length-decay-period=5: only --lr-schedule length-decay"),
    ("unread-kl", NOTHING, "--kl-loss-coef 0.1", "--kl-loss-coef=0.1: only --use-kl-loss reads it"),
    ("unread-eval", NOTHING, "--eval-temperature 0.5", "--eval-temperature=0.5: only --eval-interval reads it"),
    ("unread-clip", NOTHING, "--policy-loss reinforce --eps-clip-high 0.3", "--eps-clip-high=0.3: only --policy-loss ppo"),
    ("unread-host", NOTHING, "--rollout-server-url http://127.0.0.1:1 --rollout-base-port 3", "--rollout-base-port=3: only a run without --rollout-server-url"),
    # Addresses
    ("host-unknown", NOTHING, "--rollout-host no.such.host.invalid --rollout-api-key k", "--rollout-host=no.such.host.invalid: no server can listen there"),
    ("host-malformed", NOTHING, "--rollout-host a..b --rollout-api-key k", "--rollout-host=a..b: no server can listen there"),
    ("host-empty", NOTHING, "--rollout-host '' --rollout-api-key k", "--rollout-host=: no server can listen there"),
    ("host-elsewhere", NOTHING, "--rollout-host 192.0.2.1 --rollout-api-key k", "--rollout-host=192.0.2.1: no server can listen there"),
    ("key-with-newline", NOTHING, "--rollout-api-key 'a\nb'", "--rollout-api-key=[.]{3}: .*printable ASCII"),
    ("url-without-scheme", NOTHING, "--rollout-server-url localhost:30000", "--rollout-server-url=localhost:30000: does not begin with http://"),
    ("url-ftp", NOTHING, "--rollout-server-url ftp://localhost", "--rollout-server-url=ftp://localhost: does not begin with http://"),
    ("url-without-host", NOTHING, "--rollout-server-url http://", "--rollout-server-url=http://: names no host"),
    ("url-port-99999", NOTHING, "--rollout-server-url http://localhost:99999", "http://localhost:99999: is no URL .*[Pp]ort out of range"),
    ("url-port-text", NOTHING, "--rollout-server-url http://localhost:http", "http://localhost:http: is no URL"),
    ("url-bracket", NOTHING, "--rollout-server-url 'http://[::1'", r"http://\[::1: is no URL"),
    ("url-query", NOTHING, "--rollout-server-url http://localhost:1/?a=b", "holds more than a scheme, a host"),
    ("url-twice", NOTHING, "--rollout-server-url http://127.0.0.1:1 http://127.0.0.1:1/", "http://127.0.0.1:1/: given twice"),
    ("url-nobody", NOTHING, "--rollout-server-url http://127.0.0.1:1", "--rollout-server-url=http://127.0.0.1:1: nothing answers there .*Connection refused"),
    ("url-unknown-host", NOTHING, "--rollout-server-url http://no.such.host.invalid:1", "no.such.host.invalid:1: nothing answers there"),
    ("url-another-server", NOTHING, "--rollout-server-url {http}", "--rollout-server-url=http.*: what answers there is no SGLang server"),
    # Shared GPUs, and ways of weights
    ("colocate-on-a-cpu", NOTHING, "--colocate", "--colocate: this machine has no GPU .*on a CPU they share .*Leave it out"),
    ("colocate-elsewhere", NOTHING, "--colocate --rollout-server-url http://127.0.0.1:1", "--colocate=True: only a run without --rollout-server-url"),
    ("colocate-nccl", NOTHING, "--colocate --weight-sync distributed", "--weight-sync=distributed: with --colocate .*Choose --weight-sync tensor or ipc"),
    ("sparse-colocated", NOTHING, "--true-on-policy-mode --colocate --sparse-weight-sync", "--sparse-weight-sync=True: servers give the memory of their weights back"),
    ("sparse-stock", NOTHING, "--sparse-weight-sync", "--sparse-weight-sync=True: only aligned engines prove .*Add --true-on-policy-mode"),
    ("memory-fraction-2", NOTHING, "--sglang-mem-fraction-static 2", "--sglang-mem-fraction-static=2.0: must be above 0 and below 1"),
    ("memory-fraction-text", NOTHING, "--sglang-mem-fraction-static half", "--sglang-mem-fraction-static: .*invalid float.*such as 0.4"),
    ("ipc-on-a-cpu", NOTHING, "--weight-sync ipc", "--weight-sync=ipc: engines open the memory of the trainer's GPUs, and this machine has none"),
    # Command line
    ("flag-unknown", NOTHING, "--rollout-batchsize 3", "--rollout-batchsize: unknown flag. Did you mean --rollout-batch-size"),
    ("flag-unknown-switch", NOTHING, "--no-shufle", "--no-shufle: unknown flag. Did you mean --no-shuffle"),
    ("flag-of-another-command", NOTHING, "--num-prompts 3", "--num-prompts: unknown flag"),
    ("switch-with-value", NOTHING, "--shuffle no", "'no' after --shuffle: is no flag"),
    ("switch-with-equals", NOTHING, "--shuffle=no", "'no': is no flag"),
    ("stray-word", NOTHING, "now", "'now' after --rollout-max-response-len|'now': is no flag|'now'"),
    ("value-missing", NOTHING, "--lr", "Missing value for argument '--lr'"),
    ("choice-unknown", NOTHING, "--dtype float8", "invalid choice 'float8' for argument '--dtype'"),
    ("run-dir-empty", NOTHING, "--run-dir ''", "--run-dir='': is empty"),
    ("no-prompts", NOTHING, "--prompt-data ''", "--prompt-data is missing"),
    # YAML
    ("yaml-missing", NOTHING, YAML, "--custom-config-path=.*c.yaml: cannot be read .No such file"),
    ("yaml-underscores", NOTHING, "--custom_config_path {d}/c.yaml", "--custom-config-path=.*c.yaml: cannot be read"),
    ("yaml-twice", yaml("lr: 0.1"), f"{YAML} {YAML}", "given twice, and one file is read"),
    ("yaml-directory", directory("c.yaml"), YAML, "c.yaml: is a directory, not a file"),
    ("yaml-device", NOTHING, "--custom-config-path /dev/zero", "/dev/zero: is a device or a pipe, not a file"),
    ("yaml-loop", link("c.yaml", "{d}/c.yaml"), YAML, "c.yaml: cannot be read .Too many levels of symbolic links"),
    ("yaml-unreadable", unreadable("c.yaml"), YAML, "c.yaml: cannot be read .Input/output error"),
    ("yaml-integer-key", yaml("5: 1"), YAML, "c.yaml: unknown key 5"),
    ("yaml-null-key", yaml("~: 1"), YAML, "c.yaml: unknown key None"),
    ("yaml-list-key", yaml("[a, b]: 1"), YAML, "c.yaml: not valid YAML"),
    ("yaml-binary", yaml(bytes(range(256))), YAML, "c.yaml: byte 0x80 in line 2 is not UTF-8"),
    ("yaml-nul", yaml("lr: \0"), YAML, "c.yaml: not valid YAML: unacceptable character"),
    ("yaml-latin-1", yaml("lr: 1\nrun_dir: \xe9".encode("latin-1")), YAML, "c.yaml: byte 0xe9 in line 2 is not UTF-8. Save it as UTF-8"),
    ("yaml-parquet", lambda d: (parquet({"a": 1})(d), (d / "d.parquet").rename(d / "c.yaml")), YAML, "c.yaml: (byte|not valid YAML)"),
    ("yaml-list", yaml("- lr"), YAML, "c.yaml: must be a mapping"),
    ("yaml-text", yaml("lr"), YAML, "c.yaml: must be a mapping"),
    ("yaml-syntax", yaml("lr: [1"), YAML, "c.yaml: not valid YAML: .*in line"),
    ("yaml-tab", yaml("a:\n\tlr: 1"), YAML, "c.yaml: not valid YAML: .*in line 2"),
    ("yaml-object", yaml("lr: !!python/object/apply:os.system [ls]"), YAML, "c.yaml: not valid YAML: could not determine a constructor"),
    ("yaml-date", yaml("lr: 2026-02-31"), YAML, "c.yaml: not valid YAML: day is out of range"),
    ("yaml-deep", yaml("lr: " + "[" * 9999), YAML, "c.yaml: not valid YAML"),
    ("yaml-bomb", yaml("a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(24))), YAML, "c.yaml: unknown key 'a'"),
    ("yaml-key-twice", yaml("lr: 0.1\nseed: 1\nlr: 0.2\n"), YAML, "c.yaml: not valid YAML: the key 'lr' stands twice in line 3"),
    ("yaml-key-unknown", yaml("rollout_batchsize: 6"), YAML, "unknown key 'rollout_batchsize'. Did you mean rollout_batch_size"),
    ("yaml-key-dashes", yaml("rollout-batch-size: 6"), YAML, "unknown key 'rollout-batch-size'. Did you mean rollout_batch_size"),
    ("yaml-in-yaml", yaml("custom_config_path: b.yaml"), YAML, "custom_config_path does nothing inside the file"),
    ("yaml-switch-text", yaml('shuffle: "no"'), YAML, "c.yaml: shuffle='no': must be true or false, without quotes"),
    ("yaml-switch-number", yaml("shuffle: 1"), YAML, "shuffle=1: must be true or false"),
    ("yaml-word-switch", yaml("share_prefixes: on"), YAML, "share_prefixes=True: must be one of 'auto', 'on', 'off'; put it in quotes"),
    ("yaml-number-switch", yaml("lr: true"), YAML, "lr=True: must be a number"),
    ("yaml-number-text", yaml("lr: fast"), YAML, "lr='fast': must be a number"),
    ("yaml-float-for-int", yaml("seed: 1.5"), YAML, "seed=1.5: must be a whole number"),
    ("yaml-null", yaml("save:"), YAML, "save=None: must be text"),
    ("yaml-octal-key", yaml("rollout_api_key: 0123"), YAML, "rollout_api_key=83: must be text; put it in quotes"),
    ("yaml-object-value", yaml("lr: {a: 1}"), YAML, "lr={'a': 1}: must be a number"),
    ("yaml-list-for-one", yaml("lr: [1, 2]"), YAML, r"lr=\[1, 2\]: must be a number"),
    ("yaml-choice", yaml("dtype: float8"), YAML, "dtype='float8': must be one of 'bfloat16', 'float16', 'float32'"),
    ("yaml-infinity", yaml("lr: .inf"), YAML, "--lr=inf: must be a finite number"),
    ("yaml-huge", yaml(f"lr: {10**400}"), YAML, "--lr"),
    ("yaml-nul-escape", yaml('input_key: "a\\0b"'), YAML, "--input-key=.*NUL character"),
    ("yaml-sglang-null", yaml("sglang_tp_size:"), YAML, "sglang_tp_size=None: must be text, a number, true"),
    # SGLang's flags
    ("sglang-config", NOTHING, "--sglang-config x.yaml", "--sglang-config: .*Use --custom-config-path"),
    ("sglang-tp-text", NOTHING, "--sglang-tp-size two", "--sglang-tp-size: invalid int value: 'two'"),
    ("sglang-tp-missing", NOTHING, "--sglang-tp-size", "--sglang-tp-size: expected one argument"),
    ("sglang-underscores", NOTHING, "--true-on-policy-mode --sglang_attention_backend triton", "--sglang-attention-backend: not with --true-on-policy-mode"),
    ("sglang-unknown", NOTHING, "--sglang-chunked-prefil-size 48", "--sglang-chunked-prefil-size: SGLang has no flag.*Did you mean --sglang-chunked-prefill-size"),
    ("sglang-value", NOTHING, "--sglang-chunked-prefill-size many", "--sglang-chunked-prefill-size: invalid int value: 'many'"),
    # Checkpoints
    ("model-missing", NOTHING, "--hf-checkpoint {d}/none", "--hf-checkpoint=.*none: no config.json there"),
    ("model-is-a-name", NOTHING, "--hf-checkpoint Qwen/Qwen3-4B", "--hf-checkpoint=Qwen/Qwen3-4B: there is no such path on this host, .*HF_HUB_OFFLINE is set.*hf download Qwen/Qwen3-4B"),
    ("model-is-a-file", NOTHING, "--hf-checkpoint {d}/data.jsonl", "data.jsonl: no config.json there"),
    ("model-loop", link("loop", "{d}/loop"), "--hf-checkpoint {d}/loop", "loop: no config.json there"),
    ("config-directory", directory("model/config.json"), "", "model: no config.json there"),
    ("config-list", write("model/config.json", "[]"), "", "config.json: holds a list, and must hold a JSON object"),
    ("config-empty-object", write("model/config.json", "{}"), "", "transformers cannot read its config.json .*model_type"),
    ("config-empty", write("model/config.json", ""), "", "config.json: not valid JSON"),
    ("config-truncated", write("model/config.json", '{"model_type": "qw'), "", "config.json: not valid JSON"),
    ("config-latin-1", write("model/config.json", b'{"a": "\xe9"}'), "", "config.json: byte 0xe9 in line 1 is not UTF-8"),
    ("config-twice", write("model/config.json", '{"vocab_size": 1, "vocab_size": 2}'), "", "'vocab_size' stands twice in one object"),
    ("config-deep", write("model/config.json", "[" * 99999), "", "config.json: not valid JSON .nested too deeply"),
    ("config-unreadable", unreadable("model/config.json"), "", "config.json: cannot be read .Input/output error|no config.json there"),
    ("model-type-unknown", edit("config.json", model_type="nosuch"), "", "transformers cannot read its config.json .*nosuch"),
    ("model-type-list", edit("config.json", model_type=[1]), "", "transformers cannot read its config.json"),
    ("model-not-causal", edit("config.json", model_type="clip"), "", "model_type=clip is made of several models .text_config, vision_config."),
    ("model-code", edit("config.json", auto_map={"AutoConfig": "evil.C"}, model_type="evil", architectures=["EvilForCausalLM"]), "", "asks to run the checkpoint's own Python code"),
    ("size-text", edit("config.json", hidden_size="x"), "", "transformers cannot read its config.json .*hidden_size"),
    ("size-negative", edit("config.json", hidden_size=-96), "", "hidden_size=-96 in config.json, and it must be a whole number"),
    ("size-0", edit("config.json", num_attention_heads=0), "", "num_attention_heads=0 in config.json"),
    ("size-indivisible", edit("config.json", num_key_value_heads=0), "", "transformers cannot build a causal language model|cannot"),
    ("size-vocabulary", edit("config.json", vocab_size=200), "", r"tensors have other shapes than config.json says: lm_head.weight \[137, 96\] for \[200, 96\]"),
    ("size-hidden", edit("config.json", hidden_size=80), "", "tensors have other shapes than config.json says: .* and [0-9]+ more"),
    ("size-layers-more", edit("config.json", num_hidden_layers=3, layer_types=None), "", "the model of its config.json needs tensors that it lacks: model.layers.2"),
    ("size-layers-fewer", edit("config.json", num_hidden_layers=1, layer_types=None), "", "it has tensors that the model of its config.json does not know: model.layers.1"),
    ("size-layers-1e9", edit("config.json", num_hidden_layers=10**9, layer_types=None), "", "num_hidden_layers=1000000000 in config.json, and the weights are 25 tensors"),
    ("weights-lack-one", without_a_tensor, "", "needs tensors that it lacks: model.norm.weight"),
    ("weights-missing", remove("model/model.safetensors"), "", r"no \*.safetensors file there"),
    ("weights-pickled", lambda d: (d / "model/model.safetensors").rename(d / "model/pytorch_model.bin"), "", r"pickled weights .* are not loaded"),
    ("weights-truncated", truncated, "", "model.safetensors is no complete safetensors file"),
    ("weights-empty", write("model/model.safetensors", ""), "", "model.safetensors is no complete safetensors file .*0 bytes"),
    ("weights-garbage", write("model/model.safetensors", "x" * 999), "", "model.safetensors is no complete safetensors file"),
    ("weights-header-list", header("[]"), "", "model.safetensors is no complete safetensors file"),
    ("weights-header-offsets", header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, "x"]}}'), "", "is no complete safetensors file"),
    ("weights-header-huge", header("{}", 2**63), "", "is no complete safetensors file"),
    ("weights-directory", directory("model/model.safetensors"), "", "model.safetensors is missing, or is no file"),
    ("weights-loop", link("model/model.safetensors", "{d}/model/model.safetensors"), "", "model.safetensors is missing, or is no file"),
    ("index-missing-shard", index({"a": "model-2.safetensors"}), "", "model-2.safetensors is missing"),
    ("index-leaves", index({"a": "../secret.safetensors"}), "", "a is said to be in '../secret.safetensors', and only a file beside"),
    ("index-absolute", index({"a": "/etc/passwd"}), "", "a is said to be in '/etc/passwd'"),
    ("index-number", index({"a": 5}), "", "a is said to be in 5"),
    ("index-list", index([1]), "", "index.json: holds no weight_map"),
    ("index-empty", write("model/model.safetensors.index.json", "{}"), "", "index.json: holds no weight_map"),
    ("index-damaged", write("model/model.safetensors.index.json", "{"), "", "index.json: not valid JSON"),
    ("tokenizer-missing", remove("model/tokenizer.json", "model/tokenizer_config.json"), "", "its tokenizer has no tokens, so tokenizer.json is likely missing"),
    ("tokenizer-damaged", write("model/tokenizer.json", "{"), "", "its tokenizer cannot be read"),
    ("tokenizer-list", write("model/tokenizer.json", "[]"), "", "its tokenizer cannot be read"),
    ("tokenizer-binary", write("model/tokenizer.json", b"\xff\0"), "", "its tokenizer cannot be read"),
    ("tokenizer-config-list", write("model/tokenizer_config.json", "[]"), "", "its tokenizer cannot be read"),
    ("tokenizer-of-another", another_vocabulary, "", "the prompt has the token 4000, and the model's vocab_size is 137"),
    ("generation-list", write("model/generation_config.json", "[]"), "", "generation_config.json: holds a list"),
    ("generation-damaged", write("model/generation_config.json", "{"), "", "generation_config.json: not valid JSON"),
    ("generation-eos", write("model/generation_config.json", '{"eos_token_id": [1, "a"]}'), "", "generation_config.json: eos_token_id='a': the model's tokens are 0 to 136"),
    ("reference-missing", NOTHING, "--use-kl-loss --ref-checkpoint {d}/none", "--ref-checkpoint=.*none: no config.json there"),
    ("reference-vocabulary", reference(vocab_size=139), "--use-kl-loss --ref-checkpoint {d}/reference", "--ref-checkpoint=.*vocab_size=139, and the policy's is 137"),
    ("reference-sizes", lambda d: (reference()(d), (d / "model/config.json").replace(d / "kept"), shutil.copy(d / "kept", d / "model/config.json"), (d / "reference/config.json").write_text((d / "kept").read_text().replace('"intermediate_size": 208', '"intermediate_size": 200'))), "--use-kl-loss --ref-checkpoint {d}/reference", "--ref-checkpoint=.*tensors have other shapes"),
    ("experts-none", NOTHING, "--use-rollout-routing-replay", "--use-rollout-routing-replay: .*has no experts"),
    ("hopper-without-a-gpu", NOTHING, "--true-on-policy-mode --operators hopper", "--operators=hopper: "),
    # Prompts
    ("data-missing", NOTHING, "--prompt-data {d}/none.jsonl", "--prompt-data=.*none.jsonl: cannot be read .No such file"),
    ("data-directory", directory("d.jsonl"), "--prompt-data {d}/d.jsonl", "--prompt-data=.*d.jsonl: is a directory without state.json"),
    ("data-kind", write("data.tsv", "a"), "--prompt-data {d}/data.tsv", "--prompt-data=.*: unknown kind '.tsv'"),
    ("data-without-kind", write("data", ""), "--prompt-data {d}/data", "--prompt-data=.*: unknown kind ''"),
    ("data-loop", link("l.jsonl", "{d}/l.jsonl"), "--prompt-data {d}/l.jsonl", "l.jsonl: cannot be read .Too many levels"),
    ("data-unreadable", unreadable("u.jsonl"), "--prompt-data {d}/u.jsonl", "u.jsonl: cannot be read .*Input/output error"),
    ("data-pipe", lambda d: os.mkfifo(d / "p.jsonl"), "--prompt-data {d}/p.jsonl", "p.jsonl: is a device or a pipe, not a file"),
    ("data-empty", write("data.jsonl", ""), "", "--prompt-data=.*data.jsonl: no rows"),
    ("data-latin-1", write("data.jsonl", b'{"prompt": "\xe9", "label": 1}'), "", "data.jsonl:1: not valid JSON .*0xe9"),
    ("data-binary", write("data.jsonl", b"\0\1\2"), "", "data.jsonl:1: not valid JSON"),
    ("data-list", rows({"prompt": "a", "label": 1}, "[1]"), "", "data.jsonl:2: list. Every line must be an object"),
    ("data-number", rows("1"), "", "data.jsonl:1: int. Every line must be an object"),
    ("data-array-file", rows("[", '{"prompt": "a", "label": 1},', "]"), "", "data.jsonl:1: not valid JSON"),
    ("data-empty-line", rows({"prompt": "a", "label": 1}, ""), "", "data.jsonl:2: an empty line"),
    ("data-deep", rows("[" * 99999), "", "data.jsonl:1: not valid JSON .nested too deeply"),
    ("data-key-twice", rows('{"prompt": "a", "label": 1, "label": 2}'), "", "data.jsonl:1: .*'label' stands twice"),
    ("data-nan", rows('{"prompt": "a", "label": NaN}'), "", "data.jsonl:1: .*NaN is not a JSON number"),
    ("data-huge-number", rows('{"prompt": "a", "label": ' + "9" * 5000 + "}"), "", "data.jsonl:1: not valid JSON .*integer string"),
    ("label-missing", rows({"prompt": "a"}), "", "data.jsonl:1: no field 'label'; the row has prompt"),
    ("label-null", rows({"prompt": "a", "label": None}), "", "data.jsonl:1: label=None. A label must be"),
    ("label-list", rows({"prompt": "a", "label": [1]}), "", r"data.jsonl:1: label=\[1\]. A label must be"),
    ("label-blank", rows({"prompt": "a", "label": " "}), "", "--prompt-data=.*data.jsonl: prompt 0, label=' ': --rm-type=exact cannot read it"),
    ("label-no-maths", rows({"prompt": "a", "label": "\\boxed{"}), "--rm-type math", "prompt 0, label=.*: --rm-type=math cannot read it"),
    ("key-missing", NOTHING, "--input-key question", "data.jsonl:1: no field 'question'; the row has label, prompt"),
    ("key-empty", NOTHING, "--label-key ''", "data.jsonl:1: no field ''"),
    ("prompt-null", rows({"prompt": None, "label": 1}), "", "data.jsonl:1: prompt=None. It must be text"),
    ("prompt-number", rows({"prompt": 5, "label": 1}), "", "data.jsonl:1: prompt=5. It must be text"),
    ("prompt-empty", rows({"prompt": "", "label": 1}), "", "data.jsonl:1: prompt=''. It must be text"),
    ("prompt-too-long", rows({"prompt": "a" * 300, "label": 1}), "", "data.jsonl:1: the prompt has 300 tokens; .* 246"),
    ("prompt-surrogate", rows('{"prompt": "\\ud800", "label": 1}'), "", "data.jsonl:1: prompt=.* cannot be tokenised"),
    ("prompt-messages", rows({"prompt": [{"role": "user", "content": "a"}], "label": 1}), "", "Add --apply-chat-template"),
    ("chat-no-template", NOTHING, CHAT, "--apply-chat-template: the checkpoint's tokenizer has no chat template"),
    ("chat-bad-template", chat_template("{% for %}"), CHAT, "the checkpoint's chat template refuses the prompt|tokenizer cannot be read"),
    ("chat-refuses", chat_template("{{ raise_exception('no system role') }}"), CHAT, "chat template refuses the prompt .no system role"),
    ("chat-endless", chat_template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"), CHAT, r"data.jsonl:1: .*chat_template: takes more than 200,000 steps .*Mend the loops"),
    ("chat-no-role", lambda d: (chat_template("a")(d), rows({"prompt": [{"content": "a"}], "label": 1})(d)), CHAT, "Chat messages are objects with a role"),
    ("chat-texts", lambda d: (chat_template("a")(d), rows({"prompt": ["a"], "label": 1})(d)), CHAT, "Chat messages are objects with a role"),
    ("parquet-damaged", write("d.parquet", "PAR1 no"), "--prompt-data {d}/d.parquet", "--prompt-data=.*d.parquet: cannot be read"),
    ("parquet-empty", lambda d: pyarrow.parquet.write_table(pyarrow.table({"prompt": [], "label": []}), d / "d.parquet"), "--prompt-data {d}/d.parquet", "d.parquet: no rows"),
    ("parquet-columns", parquet({"question": "a"}), "--prompt-data {d}/d.parquet", "d.parquet: row 1: no field 'prompt'; the row has question"),
    ("parquet-bytes", parquet({"prompt": b"a", "label": 1}), "--prompt-data {d}/d.parquet", "row 1: prompt=b'a'. It must be text"),
    ("parquet-nan", parquet({"prompt": "a", "label": float("nan")}), "--prompt-data {d}/d.parquet", "row 1: label=nan. A label must be"),
    ("too-few-prompts", NOTHING, "--rollout-batch-size 5", "--rollout-batch-size=5: .*has 4 prompts that differ"),
    ("eval-missing", NOTHING, "--eval-interval 1 --eval-prompt-data {d}/none.jsonl", "--eval-prompt-data=.*none.jsonl: cannot be read"),
    # Reward functions
    ("rm-syntax", write("r.py", "def f(s) return 1"), f"{OWN} {{d}}/r.py:f", r"--custom-rm-path=.*r.py:f: cannot be imported: SyntaxError: .*r.py, line 1"),
    ("rm-import-raises", write("r.py", "\n1 / 0"), f"{OWN} {{d}}/r.py:f", "cannot be imported: ZeroDivisionError: .*r.py, line 2"),
    ("rm-import-exits", write("r.py", "raise SystemExit(3)"), f"{OWN} {{d}}/r.py:f", "cannot be imported: SystemExit: 3"),
    ("rm-import-dies", write("r.py", "import os\nos._exit(3)"), f"{OWN} {{d}}/r.py:f", "ends the process that imports it"),
    ("rm-raises", write("r.py", "def f(s): return s.nothing"), f"{OWN} {{d}}/r.py:f", "it raised AttributeError: 'Sample' object has no attribute 'nothing' .r.py, line 1"),
    ("rm-exits", write("r.py", "import sys\ndef f(s): sys.exit(3)"), f"{OWN} {{d}}/r.py:f", "it raised SystemExit: 3"),
    ("rm-dies", write("r.py", "import os\ndef f(s): os._exit(3)"), f"{OWN} {{d}}/r.py:f", "it ended its process .exit code 3"),
    ("rm-crashes", write("r.py", "import ctypes\ndef f(s): ctypes.string_at(0)"), f"{OWN} {{d}}/r.py:f", "it ended its process .SIGSEGV"),
    ("rm-two-arguments", write("r.py", "def f(s, t): return 1"), f"{OWN} {{d}}/r.py:f", "missing 1 required positional argument: 't'.*must take one Sample"),
    ("rm-huge", write("r.py", "def f(s): return 10**400"), f"{OWN} {{d}}/r.py:f", "it returned 1000.*int too large to convert to float"),
    ("rm-weighs-what-the-loss-lacks", write("r.py", "def f(s): return {'score': 1, 'token_weights': {'kl_loss': [1] * len(s.response_ids)}}"), f"{OWN} {{d}}/r.py:f", r"token_weights\['kl_loss'\]: the loss of this run has no such term.*--use-kl-loss"),
    ("rm-nan", write("r.py", "def f(s): return float('nan')"), f"{OWN} {{d}}/r.py:f", "it returned nan: a reward must be finite"),
    ("rm-none", write("r.py", "def f(s): pass"), f"{OWN} {{d}}/r.py:f", "it returned None: it must be a number"),
    ("rm-hangs", write("r.py", "def f(s):\n while True: pass"), f"{OWN} {{d}}/r.py:f --rm-time-limit 1", "gave no result within --rm-time-limit=1 seconds"),
    ("rm-async", write("r.py", "async def f(s): return 1"), f"{OWN} {{d}}/r.py:f", "is async"),
    ("rm-no-function", write("r.py", "f = 3"), f"{OWN} {{d}}/r.py:f", "is a int, not a function"),
    ("rm-no-name", write("r.py", ""), f"{OWN} {{d}}/r.py", "names no function. Give package.module.function or path/to/file.py:function"),
    ("rm-no-file", NOTHING, f"{OWN} {{d}}/none.py:f", "cannot be imported: FileNotFoundError"),
    ("rm-no-module", NOTHING, f"{OWN} no.such.module.f", "cannot be imported: ModuleNotFoundError"),
    ("tis-syntax", write("t.py", "def f(:"), "--use-tis --custom-tis-function-path {d}/t.py:f", "--custom-tis-function-path=.*cannot be imported: SyntaxError"),
]

OTHERS = [
    ("no-command", NOTHING, "trian", "unknown command 'trian'"),
    ("verify-missing", NOTHING, "verify --hf-checkpoint ''", "--hf-checkpoint is missing"),
    ("verify-no-model", NOTHING, "verify --hf-checkpoint {d}/none", "--hf-checkpoint=.*none: no config.json there"),
    ("verify-sizes", edit("config.json", vocab_size=200), "verify", "tensors have other shapes than config.json says"),
    ("verify-flag", NOTHING, "verify --num-promts 3", "--num-promts: unknown flag. Did you mean --num-prompts"),
    ("verify-yaml", NOTHING, "verify --custom-config-path c.yaml", "--custom-config-path: unknown flag"),
    ("verify-prompts-0", NOTHING, "verify --num-prompts 0", "--num-prompts=0: must be at least 1"),
    ("verify-tokens-0", NOTHING, "verify --max-new-tokens 0", "--max-new-tokens=0: must be at least 1"),
    ("verify-tokens-many", NOTHING, "verify --max-new-tokens 250", "--max-new-tokens=250: does not fit the model's context of 256"),
    ("verify-temperature-0", NOTHING, "verify --temperature 0", "--temperature=0.0: must be at least 1e-06"),
    ("verify-seed", NOTHING, f"verify --seed {2**63}", "--seed=9223372036854775808: must be at most 4294967295"),
    ("verify-engines-0", NOTHING, "verify --rollout-num-engines 0", "--rollout-num-engines=0: must be at least 1"),
    ("verify-url-nobody", NOTHING, "verify --rollout-server-url http://127.0.0.1:1", "--rollout-server-url=http://127.0.0.1:1: nothing answers there"),
    ("verify-url-ftp", NOTHING, "verify --rollout-server-url ftp://localhost", "--rollout-server-url=ftp://localhost: does not begin with http://"),
    ("verify-url-and-engines", NOTHING, "verify --rollout-server-url http://127.0.0.1:1 --rollout-num-engines 2", "--rollout-num-engines=2: with --rollout-server-url no server is started"),
    ("verify-url-and-sglang", NOTHING, "verify --rollout-server-url http://127.0.0.1:1 --sglang-tp-size 2", "--sglang-.*nothing would read it"),
    ("verify-key-file", NOTHING, "verify --rollout-server-url {http} --rollout-api-key @{d}/none", "--rollout-api-key=@.*none: the file with the secret cannot be read"),
    ("verify-colocate", NOTHING, "verify --colocate", "--colocate: this machine has no GPU"),
    ("verify-ipc", NOTHING, "verify --weight-sync ipc", "--weight-sync=ipc: .*this machine has none"),
    ("verify-unread", NOTHING, "verify --megatron-pp 2", "--megatron-pp=2: only --train-backend megatron reads it"),
    ("verify-blocks", NOTHING, "verify --row-parallel-blocks 3", "--row-parallel-blocks=3: must be a power of two"),
    ("verify-operators", NOTHING, "verify --no-true-on-policy-mode --operators triton", "--operators=triton: without --true-on-policy-mode"),
    ("verify-sglang", NOTHING, "verify --sglang-model-path x", "--sglang-model-path: .*Use --hf-checkpoint"),
    ("verify-ranks-twice", NOTHING, "verify --actor-num-gpus-per-node 1 --actor-num-ranks-per-node 2", "--actor-num-gpus-per-node=1: there are no GPUs here"),
    ("verify-json-nowhere", NOTHING, "verify --json {d}/none/r.json", "--json=.*none/r.json: cannot be written .No such file"),
    ("verify-json-directory", NOTHING, "verify --json {d}", "--json=.*: cannot be written .Is a directory"),
    ("verify-run-dir-file", NOTHING, "verify --run-dir {d}/data.jsonl", "--run-dir=.*data.jsonl: cannot be written"),
    ("verify-run-dir-proc", NOTHING, "verify --run-dir /proc/none", "--run-dir=/proc/none: cannot be written"),
    ("bench-what", NOTHING, "bench", "Missing from onpolicy bench"),
    ("bench-what-unknown", NOTHING, "bench steps", "invalid choice 'steps'"),
    ("bench-no-model", NOTHING, "bench step --hf-checkpoint {d}/none", "--hf-checkpoint=.*none: no config.json there"),
    ("bench-repetitions", NOTHING, "bench step --repetitions 0", "--repetitions=0: must be at least 1"),
    ("bench-tokens-few", NOTHING, "bench step --num-tokens 5", "--num-tokens=5: a sequence has .*= 128 tokens"),
    ("bench-tokens-none", NOTHING, "bench step --num-tokens", "--num-tokens=: a sequence has"),
    ("bench-batch", NOTHING, "bench decode --batch-sizes 257", "--batch-sizes=257: must be at most 256"),
    ("bench-contexts", NOTHING, "bench decode --context-lens 300 400", "--context-lens=300 400, .*: the model's context has 256 tokens"),
    ("bench-cells", NOTHING, "bench decode --context-lens 60 --sglang-max-total-tokens 100", "--context-lens=60, .*: a server's cache of 100 tokens does not hold 164"),
    ("bench-unread-decode", NOTHING, "bench rollout --batch-sizes 2", "--batch-sizes=2: only bench decode reads it"),
    ("bench-context", NOTHING, "bench rollout --max-new-tokens 255", "--max-new-tokens=255: .*context of 256"),
    ("bench-unread-step", NOTHING, "bench step --num-prompts 3", "--num-prompts=3: only bench rollout or agents or loop reads it"),
    ("bench-unread-rollout", NOTHING, "bench rollout --train-backend megatron", "--train-backend=megatron: only bench step or loop reads it"),
    ("bench-unread-cluster", NOTHING, "bench step --ray-address auto", "--ray-address=auto: only bench rollout or agents or loop reads it"),
    ("bench-unread-engines", NOTHING, "bench step --rollout-num-engines 2", "--rollout-num-engines=2: only bench rollout or agents or loop reads it"),
    ("bench-unread-ranks", NOTHING, "bench rollout --actor-num-ranks-per-node 2", "--actor-num-ranks-per-node=2: only bench loop reads it"),
    ("bench-client", NOTHING, "bench rollout --ray-address ray://h:1", "--ray-address=ray://h:1: is no host:port"),
    ("bench-sglang", NOTHING, "bench rollout --sglang-port 3", "--sglang-port: .*Use --rollout-base-port"),
    ("bench-json", NOTHING, "bench rollout --json /proc/none", "--json=/proc/none: cannot be written"),
    ("serve-missing", NOTHING, "serve --hf-checkpoint ''", "--hf-checkpoint is missing"),
    ("serve-ranks", NOTHING, "serve --actor-num-nodes 2", "--actor-num-nodes: unknown flag"),
    ("serve-client", NOTHING, "serve --ray-address ray://h:1", "--ray-address=ray://h:1: is no host:port"),
    ("serve-ports", NOTHING, "serve --rollout-base-port 65535 --rollout-num-engines 2", "65536, beyond 65535"),
    ("serve-no-model", NOTHING, "serve --hf-checkpoint {d}/none", "--hf-checkpoint=.*none: no config.json there"),
    ("serve-port", NOTHING, "serve --rollout-base-port 70000", "--rollout-base-port=70000: must be at most 65535"),
    ("serve-port-taken", NOTHING, "serve --rollout-base-port {port}", "--rollout-base-port: port [0-9]+ on 127.0.0.1 cannot be used"),
    ("serve-host", NOTHING, "serve --rollout-host no.such.host.invalid --rollout-api-key k", "--rollout-host=no.such.host.invalid: no server can listen"),
    ("serve-tp", NOTHING, "serve --no-true-on-policy-mode --sglang-tp-size 0", "--sglang-tp-size=0: must be at least 1"),
    ("serve-run-dir", NOTHING, "serve --run-dir {d}/data.jsonl/run", "--run-dir=.*: cannot be written"),
    ("serve-weights", truncated, "serve", "is no complete safetensors file"),
    ("report-none", NOTHING, "report", "RUN is missing"),
    ("report-missing", NOTHING, "report {d}/none", "RUN=.*none: no such directory or file"),
    ("report-flag", NOTHING, "report {d} --outptu x", "--outptu: unknown flag. Did you mean --output"),
    ("report-empty-directory", NOTHING, "report {d}", "RUN=.*: has no metrics.jsonl"),
    ("report-loop", link("loop", "{d}/loop"), "report {d}/loop", "RUN=.*loop: no such directory or file"),
    ("report-not-json", runs(metrics_jsonl="{\n{}\n"), "report {d}/old", "metrics.jsonl:1: not JSON"),
    ("report-binary", runs(metrics_jsonl=b"\xff\xfe\n\n"), "report {d}/old", "metrics.jsonl:1: not JSON"),
    ("report-step", runs(metrics_jsonl='{"a": 1}\n'), "report {d}/old", 'metrics.jsonl:1: .*"step"'),
    ("report-config", runs(metrics_jsonl='{"step": 1}\n', config_json="[]"), "report {d}/old", "config.json: holds a list, and must hold a JSON object"),
    ("report-config-binary", runs(metrics_jsonl='{"step": 1}\n', config_json=b"\xff"), "report {d}/old", "config.json: byte 0xff in line 1 is not UTF-8"),
    ("report-output", runs(metrics_jsonl='{"step": 1, "a": 1}\n'), "report {d}/old --output {d}/none/r.html", "--output=.*: cannot be written"),
    ("report-output-directory", runs(metrics_jsonl='{"step": 1, "a": 1}\n'), "report {d}/old --output {d}", "--output=.*: cannot be written"),
    ("report-sglang", NOTHING, "report {d} --sglang-tp-size 2", "starts no server"),
]
# fmt: on

CASES = [(i, m, f"train {GOOD['train']} {argv}", says) for i, m, argv, says in TRAIN] + OTHERS


@pytest.fixture(scope="session")
def good(tmp_path_factory):
    directory = tmp_path_factory.mktemp("good")
    make_checkpoint(directory / "model")
    rows(*({"prompt": letter * 2, "label": letter} for letter in "abcd"))(directory)
    return directory


@pytest.fixture(scope="session")
def web_server():
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture
def tripwire(monkeypatch):
    """Starting a server or a process group fails the test."""

    def started(*args, **kwargs):
        raise AssertionError("started")

    monkeypatch.setattr(EngineServer, "start", started)
    monkeypatch.setattr(distributed, "init_process_group", started)


def arguments(argv, directory, port):
    command, *rest = shlex.split(argv)
    if command in GOOD and command != "train" and not (command == "bench" and not rest):
        rest = [*rest[:1], *shlex.split(GOOD[command]), *rest[1:]] if command == "bench" else [
            *shlex.split(GOOD[command]), *rest]  # fmt: skip
    given = {"d": directory, "port": port, "http": f"http://127.0.0.1:{port}"}
    return [command, *(re.sub(r"\{(d|port|http)\}", lambda m: str(given[m[1]]), a) for a in rest)]


def servers():
    """The servers that this process has started; those of other tests may be among them."""
    return set(filter(is_guard, psutil.Process().children(recursive=True)))


@pytest.mark.parametrize(
    ("make", "argv", "says"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_bad_input_is_refused_in_one_message_before_anything_starts(
    make, argv, says, good, web_server, tmp_path, tripwire, capfd
):
    before = servers()
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    if make is not None:
        make(tmp_path)
    try:
        with forked_processes():
            code = main(arguments(argv, tmp_path, web_server))
    except SystemExit as stopped:  # tyro's, for values that are not of a flag's type
        code = stopped.code
    printed = capfd.readouterr().err
    message = re.sub(r"[│╭╮╰╯─\s]+", " ", printed)
    assert code == 2, printed
    assert re.search(says, message), printed
    assert "Traceback" not in printed
    assert len(re.findall(r"ConfigError: |For full helptext|unknown command", message)) == 1, (
        printed
    )
    assert servers() <= before


@pytest.mark.parametrize(
    ("make", "argv"),
    [
        (write("data.jsonl", b'\xef\xbb\xbf{"prompt": "a", "label": 1}\r\n{"prompt": "b", "label": 2}\r\n'), ""),
        (yaml("\ufefflr: 1e-3\r\nshuffle: no\r\nsave: ''\r\n"), YAML),
        (write("r.py", "f = lambda s: 1.0"), f"{OWN} {{d}}/r.py:f"),
        (write("r.py", "def f(s): return {'score': True, 'parts': 2}"), f"{OWN} {{d}}/r.py:f"),
        (NOTHING, "--use-tis --tis-upper-bound inf"),
        (NOTHING, f"--seed {2**32 - 1} --rollout_temperature 1e-6"),
    ],
    ids=["bom-and-crlf", "yaml-bom-crlf", "lambda", "bool-as-a-number", "no-upper-bound", "limits"],
)  # fmt: skip
def test_what_only_looks_bad_is_accepted(make, argv, good, tmp_path, capfd):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    if make is not None:
        make(tmp_path)
    code = main(arguments(f"train {GOOD['train']} --dry-run {argv}", tmp_path, 0))
    assert code == 0, capfd.readouterr().err


def test_no_case_stands_twice_and_all_commands_are_there():
    names = [case[0] for case in CASES]
    assert len(set(names)) == len(names) >= 200
    assert {argv.split()[0] for _, _, argv, _ in CASES} >= GOOD.keys()
    assert not torch.cuda.is_available() or "hopper-without-a-gpu" in names
