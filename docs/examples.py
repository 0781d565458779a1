"""The page of the examples: `python docs/examples.py` runs all of them and writes docs/examples.md.

What is said of a program is its own first cell, what it printed is what it printed; tests/pages/test_examples.py
holds both to the programs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "examples.md"
PROGRAMS = ("packed_pretraining", "streaming_serving", "natten_image", "speculative_tree", "long_context_ring")
INTRO = """\
# Examples

Five programs for readers who learn from code. Each trains or serves a small model on real data in less than a \
minute on two cores, prints what it finds, and ends with assertions. `--small` makes a program shorter. Cells begin \
with `# %%`, so editors open the programs as notebooks. \
Install once: `pip install -e '.[torch,jax,plot]' -c constraints.txt`.

The output below was printed on two cores of an AMD EPYC that ran other work too. Compare times only within a line; \
[performance](performance.md) has measured ones.

The page is written by `python docs/examples.py`, which runs them.
"""
OTHERS = """
## Notebooks

Six notebooks with outputs, which the tests run. To open them, `pip install jupyterlab` and `jupyter lab \
examples/notebooks`: [quick start](../examples/notebooks/quick_start.ipynb), \
[a gallery of masks](../examples/notebooks/masks_gallery.ipynb), \
[packed training](../examples/notebooks/packed_training.ipynb), \
[serving with KV caches](../examples/notebooks/serving_with_caches.ipynb), \
[images](../examples/notebooks/vision.ipynb) and [JAX](../examples/notebooks/with_jax.ipynb).

## Shorter programs

- [`context_parallel.py`](../examples/context_parallel.py): a training step of torch over the processes of a group
- training stacks ([the page](training.md)): [`torchtitan_style.py`](../examples/torchtitan_style.py), FSDP2, \
torch.compile and context parallel; [`trainer_packed.py`](../examples/trainer_packed.py), the Trainer of transformers \
with packed sequences; [`maxtext_style.py`](../examples/maxtext_style.py), splash attention replaced
- derivatives of any order ([how](guide.md)): [`meanflow.py`](../examples/meanflow.py), training steps with a tangent \
through attention. Also [`hessian_vector.py`](../examples/hessian_vector.py), the largest eigenvalue of a Hessian \
through checkpointed layers, and [`laplacian.py`](../examples/laplacian.py), kinetic energies of a wave function, in JAX
- [`flax_layer.py`](../examples/flax_layer.py): a layer of flax, trained under one operator and served from a cache
- masks of models in files: [`longformer.frisket`](../examples/longformer.frisket), \
[`gemma.frisket`](../examples/gemma.frisket), [`prefix.frisket`](../examples/prefix.frisket), \
[`dilated.frisket`](../examples/dilated.frisket), [`packed.frisket`](../examples/packed.frisket), \
[`streaming.frisket`](../examples/streaming.frisket)
- [`python_text.py`](../examples/python_text.py) and [`byte_model.py`](../examples/byte_model.py): the text and the \
small model that the five share
"""


def introduction(program: str) -> str:
    """The first cell of a program, as Markdown under a heading of the second level."""
    text = (ROOT / "examples" / f"{program}.py").read_text(encoding="utf-8")
    cell = re.match(r"# %% \[markdown\]\n((?:#.*\n)+)", text)
    assert cell, program
    title, *lines = [line[2:] for line in cell[1].splitlines()]
    return "\n".join((f"#{title}", *lines))


def run(program: str, *options: str) -> str:
    """What it prints."""
    command = [sys.executable, f"examples/{program}.py", *options]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def page(printed: Mapping[str, str]) -> str:
    parts = [INTRO]
    for program, output in printed.items():
        shown = "".join(f"    {line}".rstrip() + "\n" for line in output.splitlines())
        parts.append(f"\n{introduction(program)}\n\n[The program](../examples/{program}.py) prints\n\n{shown}")
    return "".join((*parts, OTHERS))


if __name__ == "__main__":
    PAGE.write_text(page({program: run(program) for program in PROGRAMS}), encoding="utf-8")
