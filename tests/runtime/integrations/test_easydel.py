"""Without EasyDeL; tests/real/easydel runs inside it."""

from importlib.util import find_spec

import pytest

import frisket as fk
from frisket.integrations import easydel


@pytest.mark.skipif(find_spec("easydel") is not None, reason="EasyDeL is installed")
def test_easydel_that_is_absent_is_named():
    with pytest.raises(fk.MissingPackageError, match="easydel is not installed: pip install easydel"):
        easydel.register()
    with pytest.raises(fk.ParameterError, match="there is no operation 'frisked'; did you mean 'frisket'"):
        easydel.register(operator="frisked")
