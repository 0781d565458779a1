"""`python tests/release.py DIST [all]`: the source archive and the wheel are built, installed and tried elsewhere.

The wheel goes into an empty environment without extras, one with [torch] and one with [jax]; with `all`, into one for
each extra that needs no GPU. Each does what it can, and refuses the rest in words that name the extra. The source
archive is installed too, and what is built from it is the wheel, file by file. twine reads README and the metadata as
PyPI does. Type checkers read tests/types against the wheel. Needs `build`, twine, mypy and pyright.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
ARCHIVED = (
    "tests docs examples benchmarks .ci .github constraints.txt constraints-gpu.txt mkdocs.yml "
    "CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE"
).split()
# what to try, and the extra that it needs
NEEDS = {
    "import frisket.flex": "torch",
    "from frisket.caches.torch import KVCache": "torch",
    "import frisket as fk; fk.mask('causal').layout(256, 256).to_block_mask()": "torch",
    "from frisket.caches.jax import KVCache": "jax",
    "from frisket.operations import AttentionRegistry": "jax",
    "import frisket as fk; fk.sharding": "jax",
    "import frisket as fk; fk.mask('causal').layout(256, 256).plot('mask.png')": "plot",
}
TEXT, SCORE = "causal & window(100)", "softcap(20)"
FRAMEWORKS = ("torch", "jax")
EVERY = ("", "torch", "jax", "triton", "plot", "flax", "quantized", "transformers", "all")
# what an extra is for, as a program that fails without it
USES = {
    "triton": """
from frisket.runtime.cli.main import main
main(["emit", "causal & window(100)", "--backend", "triton", "--arch", "sm_90", "--report"])
""",
    "plot": """
import frisket as fk
fk.mask("causal & window(100)").layout(256, 256).plot("mask.png")
assert open("mask.png", "rb").read(8) == bytes([137, *b"PNG\\r\\n", 26, 10])
""",
    "flax": """
import jax.numpy as jnp
from flax import nnx
from frisket.integrations.flax import attention_fn
ours, theirs = (nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0), **{"attention_fn": f} if f else {})
                for f in (attention_fn("causal"), None))
x = jnp.sin(jnp.arange(320.0)).reshape(1, 20, 16)
assert jnp.allclose(ours(x), theirs(x, mask=nnx.make_causal_mask(x[..., 0])), atol=1e-5)
""",
    "quantized": """
import jax.numpy as jnp
from flax import nnx
from frisket.modeling import get_dot_general_by_bits
x = jnp.sin(jnp.arange(128.0)).reshape(2, 64)
ours, exact = (nnx.Linear(64, 8, **more, rngs=nnx.Rngs(0))(x) for more in (get_dot_general_by_bits(8, "convert"), {}))
assert 0 < jnp.abs(ours - exact).max() < 0.1
""",
    "transformers": """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from frisket.integrations.transformers import register
register()
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM._from_config(config, attn_implementation="frisket")
ours = model(torch.arange(40)[None]).logits
model.set_attn_implementation("eager")
assert torch.allclose(ours, model(torch.arange(40)[None]).logits, atol=1e-4)
""",
}


def run(*command: object, cwd: Path) -> str:
    """What a command prints; what it said, where it fails."""
    clean = {n: x for n, x in os.environ.items() if not n.startswith(("PYTHON", "FRISKET_"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


# -- what is in the archives ----------------------------------------------------------------------


def brings(extra: str) -> set[str]:
    """The extras that come with an extra, itself among them."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    inner = [name for x in listed.get(extra, []) if "[" in x for name in x.split("[")[1].split("]")[0].split(",")]
    return {extra, *inner}.union(*map(brings, inner)) - {""}


def files(wheel: Path) -> dict[str, int]:
    """Name -> checksum of every file; the record of them names the wheel's own."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def check_archives(wheel: Path, sdist: Path, work: Path) -> None:
    found = files(wheel)
    assert {name.split("/")[0].split("-")[0] for name in found} == {"frisket", "frisket_attention"}, sorted(found)
    assert "frisket/py.typed" in found
    assert not [name for name in found if {"tests", "docs", "facade", "__pycache__"} & set(name.split("/"))]
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {*ARCHIVED} <= tops, {*ARCHIVED} - tops
    run(*PIP, "wheel", "-q", "--no-deps", "-w", work / "again", sdist, cwd=work)
    again = files(next((work / "again").glob("*.whl")))
    assert again == found, {n for n in again.keys() | found.keys() if again.get(n) != found.get(n)}
    check_description(wheel)


def check_description(wheel: Path) -> None:
    """The metadata hold README; with REPOSITORY_URL, nothing in it leads to a file beside it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        held = message_from_bytes(archive.read(name))
    page, url = str(held.get_payload(decode=True), "utf-8"), os.environ.get("REPOSITORY_URL", "")
    addresses = re.findall(r'(?:\]\(|\bsrc=")([^)"#]+)', page)
    assert page.startswith("# frisket\n"), page[:80]
    assert held["Description-Content-Type"] == "text/markdown"
    relative = [x for x in addresses if not x.startswith("https://")]
    assert bool(relative) == (not url), relative
    assert [x.partition(", ")[0] for x in held.get_all("Project-URL", [])] == ["Source", "Issues", "Changelog"] * bool(
        url
    )


# -- from the outside -----------------------------------------------------------------------------


def environment(work: Path, extra: str, wheel: Path) -> Path:
    """The python of an environment that holds the wheel with one extra."""
    place = work / (extra or "none")
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=work)
    python = place / "bin" / "python"
    wanted = f"{wheel}[{extra}]" if extra else wheel
    install(python, work, wanted)
    return python


def install(python: Path, work: Path, *what: object) -> None:
    pinned = ROOT / "constraints.txt"
    run(*PIP, "--python", python, "install", "-q", "--no-compile", *what, "-c", pinned, cwd=work)


def trial(work: Path, extra: str, wheel: Path, sdist: Path) -> str:
    """What an environment says it did."""
    python = environment(work, extra, wheel)
    outside = work / f"outside-{extra}"
    outside.mkdir()
    said = run(python, "-I", __file__, "inside", extra, *brings(extra), cwd=outside)
    if not extra:
        check_types(python, outside)
        install(python, work, "--no-deps", "--force-reinstall", sdist)
        said += run(python, "-I", __file__, "inside", extra, cwd=outside)
    shutil.rmtree(work / (extra or "none"))
    return said


def check_types(python: Path, outside: Path) -> None:
    """mypy and pyright know the installed wheel's types."""
    shutil.copy(ROOT / "tests" / "types" / "understand.py", outside)
    run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "understand.py", cwd=outside)
    run(sys.executable, "-m", "pyright", "--pythonpath", python, "understand.py", cwd=outside)


# -- inside an environment ------------------------------------------------------------------------


def inside(extra: str, brought: set[str]) -> None:
    """What this environment can do, done; what it cannot, refused."""
    import numpy as np

    import frisket as fk

    assert "site-packages" in str(fk.__file__), fk.__file__
    assert fk.__version__ == metadata.version("frisket-attention")
    frisket = Path(sys.executable).parent / "frisket"
    here = Path.cwd()
    assert "full" in run(frisket, "show", TEXT, "--q-len", 1024, cwd=here)
    assert fk.mask("causal").layout(1024, 1024).visible_pairs == 1024 * 1025 // 2
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 256, 2, 32)).astype("f")
    wanted = fk.reference(q, k, v, mask=TEXT, score=SCORE, layout="bshd")
    assert np.abs(wanted - dense(q, k, v)).max() < 1e-12
    assert not {"torch", "jax"} & set(sys.modules)

    if "plot" not in brought:
        refused = subprocess.run([frisket, "plot", "causal", "-o", "mask.png"], capture_output=True, text=True)
        assert refused.returncode == 2, refused
        assert re.search(r"pip install '.*frisket.attention.*\[plot\]'", refused.stderr), refused.stderr
    for statement, needed in NEEDS.items():
        said = refusal(statement)
        assert (f"[{needed}]'" in said and "pip install '" in said) == (needed not in brought), (statement, said)
    for name in brought:
        if name in USES:
            run(sys.executable, "-I", "-c", USES[name], cwd=here)
    did = ["text and layouts", *sorted(brought & USES.keys())]
    for framework in [x for x in FRAMEWORKS if x in brought]:
        for tier in ["library"] + ["native"] * (not fk.backends()["cpp"]):
            att = fk.compile(TEXT, SCORE, backend=tier)
            out = np.asarray(attend(att, framework, q, k, v))
            assert np.abs(out - wanted).max() < 1e-5, (tier, np.abs(out - wanted).max())
            did.append(f"{tier} ({framework})")
    if "torch" in brought:
        flex(q, k, v)
    print(f"frisket {fk.__version__} with {extra or 'no extra'}: {', '.join(did)}")


def refusal(statement: str) -> str:
    """What a statement says is not installed; nothing where it runs."""
    try:
        exec(statement, {})
    except ImportError as error:
        return str(error)
    return ""


def dense(q: Any, k: Any, v: Any) -> Any:
    """The attention of TEXT and SCORE written out, [batch, length, heads, dim]."""
    import numpy as np

    x = np.einsum("bqhd,bkhd->bhqk", q.astype(float), k.astype(float)) / q.shape[-1] ** 0.5
    distance = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    x = np.where((distance >= 0) & (distance < 100), 20 * np.tanh(x / 20), -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v.astype(float))


def attend(att: Any, framework: str, q: Any, k: Any, v: Any) -> Any:
    """`att` on arrays of a framework, in and out [batch, length, heads, dim], with finite gradients."""
    if framework == "jax":
        jax = importlib.import_module("jax")
        assert all(jax.numpy.isfinite(x).all() for x in jax.grad(lambda *x: att(*x).sum(), (0, 1, 2))(q, k, v))
        return att(*map(jax.numpy.asarray, (q, k, v)))
    torch = importlib.import_module("torch")
    given = [torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = att(*given)
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in given)
    return out.detach().transpose(1, 2)


def flex(q: Any, k: Any, v: Any) -> None:
    """torch's flex_attention and ours, with ours imported in its place."""
    torch = importlib.import_module("torch")
    results = []
    for name in ("torch.nn.attention.flex_attention", "frisket.flex"):
        api = importlib.import_module(name)
        mask = api.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 100), None, None, 256, 256, device="cpu")
        given = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)]
        results.append(api.flex_attention(*given, lambda s, b, h, q, k: s - 0.1 * (q - k), mask))
    assert torch.allclose(*results, atol=1e-5)


def main(dist: Path, tried: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max_workers=2) as pool:
        work = Path(name)
        run(sys.executable, "-m", "build", "--outdir", dist.resolve(), ROOT, cwd=work)
        (wheel,), (sdist,) = dist.resolve().glob("*.whl"), dist.resolve().glob("*.tar.gz")
        jobs = [pool.submit(trial, work, extra, wheel, sdist) for extra in tried]
        check_archives(wheel, sdist, work)
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=work)
        for job in jobs:
            print(job.result(), end="", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "inside":
        inside(sys.argv[2], {*sys.argv[3:]})
    else:
        main(Path(sys.argv[1]), EVERY if sys.argv[2:] == ["all"] else ("torch", "", "jax"))
