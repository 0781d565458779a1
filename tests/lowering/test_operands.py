"""Forms of q, k and v: those that kernels read, and the error of those that have no kernels."""

from dataclasses import replace

import pytest

from frisket.dsl.errors import LoweringError
from frisket.lowering.dtypes import OPERANDS, Operand
from frisket.lowering.plan import Geometry

G = Geometry(1, 2, 2, 8, 8, 64, 32, 0.125, q=OPERANDS["bfloat16"], k=OPERANDS["int8"], v=OPERANDS["int8"])


def test_operands_of_a_call_say_the_dtype_of_stored_keys():
    assert G.kv_dtype == "int8"
    assert replace(G, k=G.q, v=G.q).kv_dtype == ""
    assert replace(G, k=Operand("int8", (1, 64)), v=Operand("int8", (1, 32))).kv_dtype == "int8"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"q": Operand("int8")}, "no kernel reads q of int8\n"),
        (
            {"q": Operand("bfloat16", (1, 64))},
            "no kernel reads q of bfloat16 with a scale for 1 x 64 tokens and",
        ),
        ({"k": Operand("int8", (1, 32))}, "no kernel reads k of int8 with a scale for 1 x 32 tokens and dims\n"),
        ({"v": Operand("int8", (1, 64))}, "no kernel reads v of int8 with a scale for 1 x 64 tokens and dims\n"),
        ({"v": Operand("float8_e5m2", (16, 32))}, "no kernel reads v of float8_e5m2 with a scale for 16 x 32 tokens"),
        ({"k": Operand("int8", pack=2)}, "no kernel reads k of int8 with 2 values in a byte\n"),
        ({"k": Operand("float4_e2m1fn", pack=2)}, "no kernel reads k of float4_e2m1fn with 2 values in a byte\n"),
    ],
)
def test_a_form_without_kernels_is_refused_by_name(form, words):
    with pytest.raises(LoweringError) as error:
        replace(G, **form)
    assert str(error.value).startswith(words)
    assert "one value in a byte, with one scale for each token and head or none" in str(error.value)
