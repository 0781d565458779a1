"""Context parallel attention of JAX: eight devices in a process of their own, and processes of `jax.distributed`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import frisket as fk
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.show import show
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.parallel.shards import ShardPlace, check_covered, on_shard

CHILDREN = Path(__file__).parent / "children"
FEW = ["bytes: even", "weighted gathered"]
EVERY = [
    "causal", "window", "documents", "full", "prefix", "streaming", "block diffusion", "dilated", "chunks", "offsets",
    "prefix documents", "documents by batch", "sparse", "rows without keys", "biases", "plane", "distances",
    "split tables", "dropout and sinks", "split heads", "gathered", "gathered documents", "short", "bfloat16",
    "bytes: causal", "bytes: window", "bytes: gathered", "bytes: documents", "large: causal", "large: gathered",
    "native", "large: native", "large: native with a score mod", "large: native gathered",
    "weighted", "weighted documents", "weighted mesh", "weighted gathered", "weighted float16",
]  # fmt: skip


def on_eight_devices(*cases, **env):
    if native_build.reason():
        cases = [x for x in cases if "native" not in x]
    done = subprocess.run(
        [sys.executable, CHILDREN / "jax_cases.py", *cases], env={**os.environ, **env}, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert done.stdout.splitlines() == [*cases], done.stderr[-6000:]


def test_outputs_gradients_and_bytes():
    on_eight_devices(*FEW)


MANY = [
    "mesh",
    "large: native",
    "prefix documents",
    "rows without keys",
    "biases",
    "dropout and sinks",
    "split heads",
    "gathered",
    "bytes: documents",
    "large: causal",
    "large: gathered",
    "large: native with a score mod",
    "large: native gathered",
    "weighted",
    "weighted mesh",
    "weighted float16",
]


@pytest.mark.parametrize(
    "cases",  # a case is compiled for some ten seconds
    [pytest.param(MANY, marks=pytest.mark.exhaustive), pytest.param(EVERY, marks=pytest.mark.slow)],
    ids=["many", "every"],
)  # fmt: skip
def test_jax_context_parallel_masks_equal_one_device(cases):
    on_eight_devices(*cases)


@pytest.mark.exhaustive
def test_jax_context_parallel_runs_native_kernels():
    on_eight_devices("window", FRISKET_BACKEND="cpp")


def processes(what, codes=(0, 0)):
    """What two processes of two devices each print."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "NPROC": "4", "JAX_PLATFORMS": "cpu"}
    made = [
        subprocess.Popen(
            [sys.executable, "-u", CHILDREN / "jax_process.py", str(i), str(port), what], env=env,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=120) for p in made]
    finally:
        for p in made:
            p.kill()
    assert tuple(p.returncode for p in made) == codes, said
    return [out for out, _ in said]


@pytest.mark.exhaustive
def test_processes_agree_or_say_who_does_not():
    first, second = processes("masks")
    assert "close" in first
    assert "close" in second
    told = "processes call attend with different things\n  process {} has another attention than process {}:\n    {}"
    masks = [f"mask = q >= k & abs(q - k) < {w}" for w in (21, 22)]
    assert told.format(1, 0, f"{masks[1]}\n    {masks[0]}") in first
    assert told.format(0, 1, f"{masks[0]}\n    {masks[1]}") in second


@pytest.mark.exhaustive
def test_a_process_that_does_not_come_is_named():
    first, second = processes("absent")
    assert "process 1 has not come to this call of attend within 2 s" in first
    assert "elsewhere" in second


# -- without devices ------------------------------------------------------------------------------------------------


def names(made):
    return {t.name: (show(t.expr).splitlines()[-1], t.axes) for t in made.tables}


def test_lookups_become_tables_of_places():
    att = fk.compile("causal & document(off)", "score + bias[h, q, k] + slope[h] * (k - q)")
    made = on_shard(att, ShardPlace(100, 100), {"off": (5,), "bias": (2, 100, 100), "slope": (2,)})
    assert names(made) == {
        "off_of_k": ("segment(off, k)", "k"), "off_of_q": ("segment(off, q)", "q"),
        "bias_of_hqk": ("bias[h, q, k]", "hqk"),
    }  # fmt: skip
    assert str(made.attention.mask) == "q_at[q] >= k_at[k] & off_of_q[q] == off_of_k[k]"
    assert str(made.attention.score).endswith("score + bias_of_hqk[h, q, k] + slope[h] * float(k_at[k] - q_at[q])")
    facts = {n: d.fact for n, d in made.attention.mask.origin.declared.items()}
    assert facts == {
        "q_at": "sorted", "k_at": "sorted", "off_of_q": "sorted", "off_of_k": "sorted", "bias_of_hqk": None
    }  # fmt: skip


def test_padding_and_sizes_are_the_problems():
    made = on_shard(fk.compile("q + KV_LEN - Q_LEN >= k"), ShardPlace(100, 128), {})
    assert str(made.attention.mask) == "q_at[q] + 100 - 100 >= k_at[k] & q_at[q] < 100 & k_at[k] < 100"
    only_queries = on_shard(fk.compile("causal"), ShardPlace(100, 128, coordinates="q"), {})
    assert str(only_queries.attention.mask) == "q_at[q] >= k & q_at[q] < 100"


@pytest.mark.parametrize(("text", "sorted_"), [
    ("doc[q] == doc[k]", "sorted"), ("doc[q // 2] == doc[k]", "sorted"), ("doc[q % 2] == doc[k]", None),
    ("doc[-q] == doc[k]", None), ("doc[doc[q] + 1] == doc[k]", "sorted"),
])  # fmt: skip
def test_a_table_of_places_is_sorted_where_that_is_known(text, sorted_):
    att = fk.compile(text, doc=np.arange(9) // 2)
    declared = on_shard(att, ShardPlace(9, 9), {}).attention.mask.origin.declared
    assert declared["doc_of_q"].fact == sorted_
    unsorted = on_shard(fk.compile(text, doc=np.arange(9) % 4), ShardPlace(9, 9), {}).attention.mask.origin.declared
    assert unsorted["doc_of_q"].fact is None


def test_split_tables_are_read_at_their_own_places():
    where = ShardPlace(64, 64, split={"rel": (0, 1)})
    with pytest.raises(ParameterError, match="`rel` is split along axis 0 and read there at `q - k`"):
        on_shard(fk.compile("causal", "score + rel[q - k]"), where, {})
    plane = fk.compile("causal", "score + rel[q, k]")
    for own, travels, read in ((0,), {}, "rel[place of q, k]"), ((1,), {"rel": 1}, "rel[q, place of k]"):
        made = on_shard(plane, ShardPlace(64, 64, split={"rel": own}), {})
        assert made.sent_with_keys == travels
        assert repr(made.tables[0].expr).splitlines()[-1] == read
    with pytest.raises(ParameterError, match="`rel` is split along queries and along keys"):
        on_shard(plane, where, {})
    x, mesh = jnp.zeros((1, 64, 1, 8)), jax.make_mesh((1,), ("sp",))
    with pytest.raises(ParameterError, match="`rel` is split along queries and along keys"):
        fk.parallel.attend(
            plane, x, x, x, deal=fk.parallel.deal("causal", 64, 1), mesh=mesh, split={"rel": (0, 1)}, rel=x[0, :, 0]
        )


def covered(att, deal, given=(), batch=1, heads=1):
    check_covered(att.program, deal, given, batch, heads)


def test_a_deal_has_to_bring_what_the_mask_shows():
    deal = fk.parallel.deal("causal & window(20)", 256, 4, tile=16)
    covered(fk.compile("causal & window(20)"), deal)
    covered(fk.compile("causal & window(20) & same(doc)"), deal, ["doc"])
    covered(fk.compile("causal & window(10)"), deal)  # by analysis: another clause, which shows less
    for att in (fk.compile("causal & window(21)"), fk.compile("causal"), fk.compile(None)):
        with pytest.raises(ParameterError, match="the deal brings what this mask shows"):
            covered(att, deal)
    doc = np.arange(256) // 50
    documents = fk.parallel.deal("causal & same(doc)", 256, 4, tile=16, doc=doc)
    covered(fk.compile("causal & same(doc)", doc=doc), documents)
    covered(fk.compile("causal & same(doc)"), documents, ["doc"])
    with pytest.raises(ParameterError, match="attention may show more"):
        covered(fk.compile("causal & same(doc)", doc=np.arange(256) // 70), documents)
    by_head = fk.parallel.deal("causal & q - k < 20 * (h + 1)", 256, 4, tile=16)
    with pytest.raises(ParameterError, match=r"depends on h and is known for 1 of 2"):
        covered(fk.compile("causal & q - k < 20 * (h + 1)"), by_head, heads=2)


def test_jax_context_parallel_refuses_bad_meshes():
    deal = fk.parallel.deal("causal", 64, 1, tile=16)
    att, x = fk.compile("causal"), jnp.zeros((1, 64, 2, 8))
    with pytest.raises(ParameterError, match="there is no mesh axis 'sp' here"):
        fk.parallel.attend(att, x, x, x, deal=deal)
    spec = PartitionSpec(None, "sp")
    mesh = jax.make_mesh((1,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))

    def call(x=x, **how):
        run = jax.shard_map(
            lambda x: fk.parallel.attend(att, x, x, x, **{"deal": deal, **how}), mesh=mesh, in_specs=spec,
            out_specs=spec,
        )  # fmt: skip
        return run(x)

    for how, error, text in (
        ({"variant": "tree"}, ParameterError, 'it is "ring" or "all-gather"'),
        ({"deal": fk.parallel.deal("causal", 64, 2, tile=16)}, ShapeError, "2 ranks, mesh axis 'sp' has 1 devices"),
        ({"x": x[:, :32]}, ShapeError, r"they are \[batch, 64, heads, dim\]"),
        ({"doc": jnp.zeros(64, int)}, ParameterError, "`doc` is given and no mask"),
        ({"split": {"doc": 0}}, ParameterError, "`doc` is given and no mask"),
    ):
        with pytest.raises(error, match=text):
            call(**how)


def test_jax_context_parallel_refuses_automatic_axes():
    deal, att, x = fk.parallel.deal("causal", 64, 1, tile=16), fk.compile("causal"), jnp.zeros((1, 64, 2, 8))
    mesh = jax.make_mesh((1, 1), ("sp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = PartitionSpec(None, "sp")
    run = jax.shard_map(
        lambda x: fk.parallel.attend(att, x, x, x, deal=deal), mesh=mesh, in_specs=spec, out_specs=spec,
        axis_names={"sp"},
    )  # fmt: skip
    with pytest.raises(ParameterError, match="leaves mesh axis 'tp' to automatic sharding"):
        jax.jit(run)(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["ring", "all-gather"])
def test_a_mask_that_shows_nothing(variant):
    deal, att = fk.parallel.deal("q < 0", 60, 1, tile=16), fk.compile("q < 0", backend="xla")
    x = jnp.ones((1, 64, 2, 8))
    mesh = jax.make_mesh((1,), ("sp",))

    def total(q, k, v, sinks):
        return fk.parallel.attend(att, q, k, v, deal=deal, mesh=mesh, variant=variant, sinks=sinks).sum()

    for found in (total(x, x, x, None), *jax.grad(total, (0, 1, 2, 3))(x, x, x, jnp.ones(2))):
        assert (found == 0).all()


def test_steps_send_what_is_needed():
    deal = fk.parallel.deal("causal & window(100)", 1000, ranks=4)
    first, *rest = fk.parallel.steps(deal)
    assert (first.shift, first.length, first.pairs, first.reads) == (0, 256, (), (True,) * 4)
    assert [(s.shift, s.length, s.pairs, s.start, s.reads) for s in rest] == [
        (1, 128, ((0, 1), (1, 2), (2, 3)), (128, 128, 128, 0), (False, True, True, True))
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [{"q": "767 - q", "k": "(k + 9) % 768"}, {"k": "turn[k]", "h": "1 - h"}])
def test_dropout_of_an_attention_at_other_positions(at):
    """It draws at the positions, as on one device, and not at the places that were distributed."""
    q, k, v = jnp.asarray(np.random.default_rng(5).standard_normal((3, 1, 768, 2, 16)), "float32")
    tables = {"turn": np.arange(768)[::-1].copy()} if "turn[k]" in at.values() else {}
    att = fk.compile("causal", dropout=0.4).at(**at, **tables)
    deal, mesh = fk.parallel.deal(att.mask, 768, ranks=1), jax.make_mesh((1,), ("sp",))
    found = fk.parallel.attend(att, *(deal.permute(x, 1) for x in (q, k, v)), deal=deal, axis="sp", mesh=mesh, seed=7)
    np.testing.assert_allclose(deal.unpermute(found, 1), att(q, k, v, seed=7), atol=1e-5)


def test_jax_context_parallel_names_wrong_arrays():
    """With mesh=, an axis that the mesh lacks and arrays that no deal permuted are errors of ours."""
    deal, att = fk.parallel.deal("causal", 50, 1, tile=16), fk.compile("causal")
    mesh = jax.make_mesh((1,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.zeros((1, 50, 2, 8))
    for how, error, text in (
        ({"axis": "cp"}, ParameterError, "axis='cp', and the mesh has no axis 'cp'\n  its axes are 'sp'"),
        ({"batch_axis": ("sp", "dp")}, ParameterError, "the mesh has no axis 'dp'"),
        ({"head_axis": "tp"}, ParameterError, "head_axis='tp', and the mesh has no axis 'tp'"),
        ({}, ShapeError, r"they are \[batch, 64, heads, dim\]\n  what deal.permute\(x, axis=1\) gives"),
        ({"deal": fk.parallel.deal("causal", 50, 2, tile=16)}, ShapeError, "2 ranks, mesh axis 'sp' has 1 devices"),
    ):
        with pytest.raises(error, match=text):
            fk.parallel.attend(att, x, x, x, **{"deal": deal, "mesh": mesh, **how})
    y = deal.permute(x, 1)
    assert fk.parallel.attend(att, y, y, y, deal=deal, mesh=mesh).shape == y.shape


def test_deal_of_traced_documents_is_refused():
    wide = fk.parallel.deal("causal", 64, 1, tile=16)
    for make in (
        lambda doc: fk.parallel.deal("same(doc)", 64, 1, doc=doc),
        lambda doc: wide.under("same(doc)", doc=doc),
    ):
        with pytest.raises(
            ParameterError, match="a deal is made on the host\n  make it outside; or deal of a wider mask"
        ):
            jax.jit(make)(jnp.zeros(64, int))
