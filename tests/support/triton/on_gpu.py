"""A pytest plugin: what the interpreter's tests make is made on the GPU, and their kernels are compiled and run there.

    PYTHONPATH=tests JAX_PLATFORMS=cpu python -m pytest -p support.triton.on_gpu \\
        tests/lowering/kernels/triton/children/forward_interpreted.py

Tensors are on the GPU where a test says nothing of devices, and come back when it looks at them. A tensor that
frisket itself makes on the wrong device goes unseen here: benchmarks/gpu.py runs whole calls without this."""

import os

import numpy as np
import pytest
import torch

assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter is on: there is nothing to run on a GPU"
from_numpy, to_numpy = torch.from_numpy, torch.Tensor.numpy


def pytest_configure(config: pytest.Config) -> None:
    torch.set_default_device("cuda")
    torch.from_numpy = lambda array: from_numpy(array).to(torch.get_default_device())
    torch.Tensor.numpy = lambda self, **options: to_numpy(self.detach().cpu(), **options)
    torch.Tensor.__array__ = lambda self, dtype=None, copy=None: np.asarray(self.numpy(), dtype)


OF_THE_INTERPRETER = (  # what they look at, the interpreter has alone; or a tile that it takes and no GPU has room for
    "test_launch_reports_only_compiled_kernels", "test_parts_and_packing_are_chosen_where_they_pay",
    "test_decode_in_one_part_of_rows_without_keys", "test_error_of_the_instruction[bfloat16]",
    "test_error_of_the_instruction[float16]", "test_tensors_of_any_head_size[320-float32]",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [x for x in items if x.name not in OF_THE_INTERPRETER]
