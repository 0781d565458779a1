"""One of two processes of `jax.distributed`; run by test_jax_parallel.py with (number, port, what to do)."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import frisket as fk
from frisket.dsl.errors import FrisketError
from frisket.runtime.parallel import jax_ring

number, port, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, number, heartbeat_timeout_seconds=60)
mesh = jax.make_mesh((4,), ("sp",), axis_types=(AxisType.Auto,))
spec = PartitionSpec(None, "sp")
rng = np.random.default_rng(0)
arrays = [rng.standard_normal((1, 60, 2, 8)).astype(np.float32) for _ in range(3)]


def attended(mask):
    deal, att = fk.parallel.deal(mask, 60, 4, tile=8), fk.compile(mask)
    run = jax.shard_map(
        lambda q, k, v: fk.parallel.attend(att, q, k, v, deal=deal), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    dealt = [deal.permute(x, 1) for x in arrays]
    split = [jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__) for x in dealt]
    whole = NamedSharding(mesh, PartitionSpec())
    out = jax.jit(lambda *a: deal.unpermute(run(*a), 1), out_shardings=whole)(*split)
    want, _ = fk.reference(*arrays, mask=mask, layout="bshd", return_lse=True)
    np.testing.assert_allclose(np.asarray(out.addressable_shards[0].data), want, atol=1e-5)
    print("close", flush=True)


try:
    if what == "masks":
        attended("causal & window(20)")
        attended(f"causal & window({21 + number})")
    elif number == 0:
        jax_ring.PATIENCE = 2
        attended("causal")
    else:
        print("elsewhere", flush=True)
except FrisketError as error:
    print(error, flush=True)
