"""Checkpoints as SGLang's own loader has them, without the plug-in, in a process of its own:
`python -m tests.support.stock_loader CHECKPOINT...` writes each one's parameters beside it, or why there
are none.

SGLang asks for a GPU's capability, and is told that of an H100. Nothing is computed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

H100 = 9, 0


def stock_parameters(*paths):
    """What SGLang's own loader makes of each checkpoint: parameters by name, or an error's text."""
    command = [sys.executable, "-m", "tests.support.stock_loader", *map(str, paths)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return [torch.load(_result(path)) for path in paths]


def _result(path):
    return Path(path).with_suffix(".loaded")


def _load(path, is_first):
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import DefaultModelLoader
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.server_args import prepare_server_args

    argv = ["--model-path", path, "--device", "cpu", "--skip-tokenizer-init"]
    args = prepare_server_args([*argv, "--dtype", "bfloat16"])
    args.resolve_once()
    get_context().set_server_args(args)
    if is_first:
        get_parallel().override_permanently(tp_rank=0, pp_rank=0)
        where = f"file://{tempfile.mkdtemp()}/group"
        init_distributed_environment(1, 0, where, local_rank=0, backend="gloo")
        initialize_model_parallel()
        initialize_dp_attention(args)
    config, loader = ModelConfig.from_server_args(args), DefaultModelLoader(LoadConfig())
    model = loader.initialize_model_for_startup(
        model_config=config, device_config=DeviceConfig("cpu")
    )
    model.load_weights(loader._get_all_weights(config, model))
    return {name: parameter.data for name, parameter in model.named_parameters()}


def main(paths):
    from sglang.srt.model_loader import loader
    from sglang.srt.models import qwen3

    no_kernel = mock.patch.object(qwen3, "get_rope", lambda *_, **__: torch.nn.Identity())
    with (
        no_kernel,
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: H100),
        mock.patch.object(loader, "get_device_capability", lambda *_: H100),
    ):
        for number, path in enumerate(paths):
            try:
                result = _load(path, number == 0)
            except (ImportError, NotImplementedError) as error:
                result = str(error)
            torch.save(result, _result(path))


if __name__ == "__main__":
    main(sys.argv[1:])
