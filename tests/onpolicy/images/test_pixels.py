"""Pixels are what a person sees in an image, and the same in every process."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from onpolicy.errors import ConfigError
from onpolicy.images import pixels
from onpolicy.images.pixels import PixelReader, decoded
from onpolicy.images.placed import PlacedImage
from tests.support.seeing_policies import FAMILIES
from tests.support.tiny_images import encoded_image, write_image_checkpoint_files


@pytest.fixture(scope="module", params=FAMILIES)
def read(request, tmp_path_factory):
    return PixelReader(
        write_image_checkpoint_files(tmp_path_factory.mktemp("files"), request.param)
    )


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


GRADIENT = Image.fromarray(np.arange(24 * 16 * 3, dtype=np.uint8).reshape(16, 24, 3))


def test_another_process_has_the_same_digest(read, tmp_path):
    data = encoded_image()
    (tmp_path / "image").write_bytes(data)
    code = (
        "import sys; from onpolicy.images.pixels import PixelReader\n"
        "print(PixelReader(sys.argv[1])(open(sys.argv[2], 'rb').read()).digest)"
    )
    files = read.directory, tmp_path / "image"
    told = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True)
    assert told.stdout.strip() == read(data).digest, told.stderr


def test_other_pixels_have_another_digest_and_the_same_pixels_the_same(read):
    data, lossless = saved(GRADIENT), saved(GRADIENT, "WEBP", lossless=True)
    assert read(data).digest == read(lossless).digest
    changed = GRADIENT.copy()
    changed.putpixel((5, 5), (255, 0, 255))
    assert read(saved(changed)).digest != read(data).digest


def test_a_photograph_lies_as_its_camera_says():  # sgl-project/sglang#33464
    tag = Image.Exif()
    tag[0x0112] = 6
    turned = decoded(saved(GRADIENT, "PNG", exif=tag))
    assert turned.size == (16, 24)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(GRADIENT), -1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_what_is_transparent_is_white_in_every_mode(mode):  # vllm-project/vllm#44974
    """A hidden colour does not show: in the alpha channel, and as a colour that a PNG makes so."""
    hidden, options = Image.new("RGBA", (8, 8), (10, 10, 10, 0)), {}
    if mode == "P":
        image = hidden.quantize(4)
    elif "A" in mode:
        image = hidden.convert(mode)
    else:
        image = hidden.convert("RGB").convert(mode)
        options = {"transparency": image.getpixel((0, 0))}
    assert saved(image, **options).find(b"tRNS") > 0 or "A" in mode
    assert decoded(saved(image, **options)).getpixel((3, 3)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no image can be read from these 0 bytes"),
        (b"<svg></svg>", "no image can be read"),
        (saved(GRADIENT)[:100], "no image can be read"),
        (saved(Image.new("I;16", (8, 8), 40000)), r"mode=I;16.*8 bits"),
        (saved(GRADIENT, "GIF", save_all=True, append_images=[GRADIENT.rotate(90)]), "frames=2"),
    ],
    ids=["nothing", "svg", "cut", "16 bits", "animated"],
)
def test_what_is_no_single_image_of_8_bits_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        decoded(data)


def test_a_small_file_of_many_pixels_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(pixels, "MOST_PIXELS", 100)
    with pytest.raises(ValueError, match=r"24 x 16 pixels, and an image may have 100"):
        decoded(saved(GRADIENT))


def test_the_rows_are_those_of_the_grid_or_of_the_family(read):
    found = read(saved(GRADIENT.resize((40, 24))))
    if found.grid is None:
        assert found.num_rows == 4 and found.values.shape == (1, 3, 16, 16)
    else:
        time, height, width = found.grid
        assert (time, found.num_rows) == (1, height * width // 4)
        assert len(found.values) == height * width


def test_a_placed_image_is_checked_by_its_pixels_and_its_rows(read):
    data, found = encoded_image(), read(encoded_image())
    assert read.checked(PlacedImage(3, 3 + found.num_rows, data, found.digest)) is read(data)
    for start, digest in ((2, found.digest), (3, "0" * 64)):
        with pytest.raises(
            ValueError, match=r"its pixels are .* were .* where the prompt was made"
        ):
            read.checked(PlacedImage(start, 3 + found.num_rows, data, digest))


def test_a_directory_without_a_processor_is_refused(read, tmp_path):
    (tmp_path / "config.json").write_bytes((read.directory / "config.json").read_bytes())
    with pytest.raises(
        ConfigError, match=r"--images: no image processor.*preprocessor_config.json"
    ):
        PixelReader(tmp_path)


def test_several_pictures_of_one_are_refused(tmp_path):
    write_image_checkpoint_files(tmp_path, "gemma3")
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_pan_and_scan": True}))
    with pytest.raises(ConfigError, match=r"do_pan_and_scan=true.*Set it to false"):
        PixelReader(tmp_path)


def test_no_more_pixels_are_kept_than_fit(read, monkeypatch):
    first = read(encoded_image("red"))
    assert read(encoded_image("red")) is first
    monkeypatch.setattr(pixels, "MOST_KEPT", first.values.numel())
    second = read(encoded_image("green"))
    assert read(encoded_image("green")) is second
    assert read(encoded_image("red")) is not first


def test_other_families_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"model_type=llama.*gemma3, qwen3_vl.*text alone"):
        PixelReader(tmp_path)


def test_pixels_that_were_resized_otherwise_are_refused(read, tmp_path):
    """A control: the same image by a processor of other sizes."""
    other = write_image_checkpoint_files(tmp_path / "other", read.family.model_type)
    file = other / "preprocessor_config.json"
    sizes = {"shortest_edge": 1024, "longest_edge": 4096}
    if read.family.rows_of_each is not None:
        sizes = {"height": 32, "width": 32}
    file.write_text(json.dumps({**json.loads(file.read_text()), "size": sizes}))
    data, resized = saved(GRADIENT), PixelReader(other)(saved(GRADIENT))
    assert resized.digest != read(data).digest
    with pytest.raises(ValueError, match=r"its pixels are .* Both need the same checkpoint"):
        read.checked(PlacedImage(0, resized.num_rows, data, resized.digest))
