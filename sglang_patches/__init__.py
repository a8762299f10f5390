"""An SGLang plug-in that gives the engine the trainer's operators. No fork, no edited files.

SGLang finds it through two official entry points (see pyproject.toml): `sglang.srt.plugins`
(`plugin.load`, run in every SGLang process) and `sglang.srt.platforms` (`platform.activate`, chosen
by SGLANG_PLATFORM). Without the variable ONPOLICY_CONTRACT neither changes anything.

Every other file is one concern: what diverges, why, its replacement, and when it can go.
"""
