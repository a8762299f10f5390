"""Random prompts for `verify`: of many lengths, with shared prefixes, and with images where asked."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.errors import ConfigError
from onpolicy.images.pixels import PixelReader
from onpolicy.images.placed import PlacedImage
from onpolicy.types import Prompt


def make_prompts(config: VerifyConfig, vocab_size: int, longest: int) -> list[Prompt]:
    """Return random prompts with shared prefixes, some longer than a prefill chunk.

    With --images three of four have one or two images. Raise ConfigError if none fits.
    """
    rng = random.Random(f"prompts/{config.seed}")
    pixels = PixelReader(config.model.hf_checkpoint) if config.model.images else None
    special = set() if pixels is None else {pixels.family.image_token}

    def draw() -> int:
        return next(t for t in iter(lambda: rng.randrange(vocab_size), None) if t not in special)

    shared = [draw() for _ in range(longest // 2)]
    prompts: list[Prompt] = []
    for i in range(config.num_prompts):
        prefix = shared[: rng.randrange(len(shared))]
        # The first prompt has the full length, so that one takes all prefill chunks.
        length = longest if i == 0 else rng.randrange(1, longest - len(prefix))
        token_ids = (prefix + [draw() for _ in range(length)])[:longest]
        images: Sequence[PlacedImage] = ()
        if pixels is not None and i % 4 == 3 and prompts[-1].images:
            # One that shares the images of the last, and so what the engine cached of it.
            images = prompts[-1].images
            token_ids = [*prompts[-1].prompt_ids[: images[-1].end + 1], draw()]
        elif pixels is not None and i % 4:
            token_ids, images = with_images(
                token_ids, pixels, rng, count=1 + i % 2, most=longest - 1
            )
        prompts.append(
            Prompt(index=i, prompt_ids=token_ids, images=tuple(images), label="", text="")
        )
    if pixels is not None and config.num_prompts > 1 and not any(p.images for p in prompts):
        raise ConfigError(
            f"--max-prompt-len={longest}: no image of this model fits. Give a larger number."
        )
    return prompts


def with_images(
    token_ids: list[int], pixels: PixelReader, rng: random.Random, *, count: int, most: int
) -> tuple[list[int], list[PlacedImage]]:
    """Return tokens with up to `count` random images among them, not first, at most `most` tokens."""
    found, images = token_ids, list[PlacedImage]()
    places = sorted(rng.randrange(1, len(token_ids) + 1) for _ in range(count))
    shift = 0
    for place in places:
        data = random_picture(rng)
        seen = pixels(data)
        # A token of text stands between two images, and after the last one.
        if len(found) + seen.num_rows + 1 > most:
            break
        start = place + shift
        text = next(t for t in token_ids if t != pixels.family.image_token)
        found = [*found[:start], *[pixels.family.image_token] * seen.num_rows, text, *found[start:]]
        images.append(PlacedImage(start, start + seen.num_rows, data, seen.digest))
        shift += seen.num_rows + 1
    return found, images


def random_picture(rng: random.Random) -> bytes:
    """Return a PNG of random noise, of 16 to 64 pixels on each side."""
    from PIL import Image

    width, height = rng.randrange(16, 65), rng.randrange(16, 65)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height)).save(file, "PNG")
    return file.getvalue()
