"""The text part of a published model that also sees images, and the names of its weights.

Both engines build and load the text part, as the language model of transformers that computes the
same function of text (`published.py`). The tower and the projector stay in the files, and an export
copies them from there (`hf_export.py`), unless `--images` has both engines load them too
(`vision/seeing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from onpolicy.errors import ConfigError
from onpolicy.system.files import read_json_object

WHOLE_MODELS = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_vl": "qwen3_vl_text",
}
"""model_type of the whole and of its text part, where a causal LM of transformers computes what the
whole does on text, to the last bit. Others stay refused: PaliGemma reads a prompt in both directions."""

_DECODER, _HEAD = "model.", "lm_head."

_FORMS = (
    {_DECODER: "language_model.model.", _HEAD: "language_model.lm_head."},
    {_DECODER: "model.language_model.", _HEAD: "lm_head."},
)
"""Prefixes of names in a language model alone, with those in files. transformers 5 names modules by
the second form, and writes Gemma-3 and Mistral-3 in the first, as transformers 4 did."""


_TOWER_FORMS = tuple(
    {
        "model.tower.visual.": f"{prefix}visual.",
        "model.tower.vision_tower.": f"{prefix}vision_tower.{wrapper}",
        "model.tower.multi_modal_projector.": f"{prefix}multi_modal_projector.",
    }
    for wrapper in ("vision_model.", "")
    for prefix in ("model.", "")
)
"""The same of a tower beside a language model, which transformers 4 wrapped once more (SigLIP)."""


def has_text_part(directory: str | Path) -> bool:
    """Return whether a directory's config.json is of a whole model, whose text part is trained."""
    return _whole_type(directory) in WHOLE_MODELS


def _whole_type(directory: str | Path) -> str:
    file = Path(directory) / "config.json"
    return str(read_json_object(file, str(file)).get("model_type")) if file.is_file() else ""


def name_in_whole(own: str, directory: str | Path) -> str:
    """Map a parameter's name in the text part to that in transformers' whole model."""
    return _renamed(own, _FORMS[_whole_type(directory) != "llama4"])


def own_name(stored: str) -> str | None:
    """Map the name of a stored tensor to that in a language model alone; None: it is of no text part."""
    return _own(stored, _FORMS)


def tower_name(stored: str) -> str | None:
    """Map the name of a stored tensor to that in a tower; None: it is of none."""
    return _own(stored, _TOWER_FORMS)


def _own(stored: str, forms: Sequence[Mapping[str, str]]) -> str | None:
    for form in forms:
        for own, prefix in form.items():
            if stored.startswith(prefix):
                return own + stored.removeprefix(prefix)
    return None


def own_names(stored: Iterable[str], name: str) -> dict[str, str]:
    """Map the text part's own names to the stored ones of the checkpoint `name`.

    Raise ConfigError if a weight is stored twice, or if there is no text part.
    """
    found = _once(stored, own_name, name)
    if not any(own.startswith(_DECODER) for own in found):
        known = " or ".join(f"{form[_DECODER]}*" for form in _FORMS)
        raise ConfigError(
            f"{name}: no tensor is named {known}, as a text part is. Download the checkpoint again."
        )
    return found


def tower_names(stored: Iterable[str], name: str) -> dict[str, str]:
    """Map a tower's own names to the stored ones; empty without a tower. Raise ConfigError as
    `own_names` does for a weight that is stored twice."""
    return _once(stored, tower_name, name)


def _once(stored: Iterable[str], own_of: Callable[[str], str | None], name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in sorted(stored):
        own = own_of(each)
        if own in found:
            raise ConfigError(
                f"{name}: {found[own]} and {each} are names of one weight, before and since "
                "transformers 5, and which is meant is not known. Remove one from the files."
            )
        if own is not None:
            found[own] = each
    return found


def stored_name(own: str, names: Mapping[str, str]) -> str:
    """Map an own name to the stored one; one that is not in `names` gets the prefix of the others."""
    form = next(f for f in _FORMS if any(x.startswith(f[_DECODER]) for x in names.values()))
    return names.get(own) or _renamed(own, form)


def _renamed(own: str, form: Mapping[str, str]) -> str:
    prefix = next(prefix for prefix in form if own.startswith(prefix))
    return form[prefix] + own.removeprefix(prefix)
