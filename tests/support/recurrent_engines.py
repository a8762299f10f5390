"""What an engine with recurrent layers is to stand, and what it is not to stand."""

from pathlib import Path

from sglang_patches import registry
from sglang_patches.extensions import Extension

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


class Retracting(Extension):
    """Retraction of one of several requests, every so many passes, as SGLang tests it."""

    def __init__(self, passes):
        self.passes = int(passes)

    def install(self, contract):
        from sglang.srt.managers import scheduler

        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, self.passes


class RoundedStates(Extension):
    """States rounded to bfloat16 after every pass while a file is there, as SGLang's flags can have
    them without a contract."""

    def __init__(self, file):
        self.file = Path(file)

    def install(self, contract):
        registry.hook(TARGET, self._round, "after")

    def _round(self, result, runner, *_, **__):
        if self.file.exists():
            states = runner.req_to_token_pool.mamba_pool.mamba_cache.temporal
            states.copy_(states.bfloat16())
        return result
