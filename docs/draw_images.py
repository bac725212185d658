"""Draw the pictures of `docs/images` anew, by the code that is shown beside them.

    python -m docs.draw_images [NAME ...]

A picture is drawn by the example of its name, or else by the page that shows it and saves it under
its name. All take some twenty minutes on two cores. Look at them before you commit them.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np
from PIL import Image

from tests.test_docs import blocks_of, PAGES, script_of


ROOT = pathlib.Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MOST = 120_000  # bytes; larger pictures get a palette


def draw(picture: pathlib.Path) -> None:
    example = ROOT / "examples" / f"{picture.stem}.py"
    with tempfile.TemporaryDirectory() as folder:
        script, drawn = example, example.with_suffix(".png")
        if not example.exists():
            script, drawn = pathlib.Path(folder) / "page.py", pathlib.Path(folder) / picture.name
            script.write_text(script_of(blocks_of(page_of(picture.name).read_text())))
        without_windows = {**os.environ, "MPLBACKEND": "Agg"}
        subprocess.run([sys.executable, script], cwd=folder, env=without_windows, check=True)
        shutil.copy(drawn, picture)
    if picture.stat().st_size > MOST:
        reduce_colours(picture)


def reduce_colours(picture: pathlib.Path) -> None:
    """Leave 256 colours: those of most pixels as they are, so that areas stay flat, and others that
    are spread over the rest, so that gradients stay smooth."""
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    flat = pixels.reshape(-1, 3)
    every, of_pixel, counts = np.unique(flat, axis=0, return_inverse=True, return_counts=True)
    weighted = np.repeat(every, np.sqrt(counts).astype(int), axis=0)
    spread = Image.fromarray(weighted[None]).quantize(240, kmeans=5).getpalette("RGB")
    most = every[np.argsort(-counts)[:16]]
    palette = np.concatenate([most, np.reshape(spread, (-1, 3)).astype(np.uint8)])[:256]
    distances = np.abs(every[:, None].astype(int) - palette).sum(axis=2)
    nearest = np.argmin(distances, axis=1).astype(np.uint8)
    reduced = Image.fromarray(nearest[of_pixel].reshape(pixels.shape[:2]))
    reduced.putpalette(palette.tobytes())
    reduced.save(picture, optimize=True)


def page_of(name: str) -> pathlib.Path:
    """The page that shows the picture, and saves it."""
    for page in PAGES.values():
        text = page.read_text()
        if f"images/{name})" in text and f'savefig("{name}"' in text:
            return page
    raise ValueError(f"no page shows {name} and saves it.")


if __name__ == "__main__":
    names = sys.argv[1:] or sorted(path.stem for path in IMAGES.glob("*.png"))
    for name in names:
        print(name, flush=True)
        draw(IMAGES / f"{name}.png")
