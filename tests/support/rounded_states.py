"""A violation for an engine with recurrent layers: while a file is there, states keep 8 bits fewer."""

from pathlib import Path

from sglang_patches import registry
from sglang_patches.extensions import Extension

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


class RoundedStates(Extension):
    """States rounded to bfloat16 after every pass, as SGLang's own flags can have them."""

    def __init__(self, file):
        self.file = Path(file)

    def install(self, contract):
        registry.hook(TARGET, self._round, "after")

    def _round(self, result, runner, *_, **__):
        if self.file.exists():
            states = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
            states.copy_(states.bfloat16())
        return result
