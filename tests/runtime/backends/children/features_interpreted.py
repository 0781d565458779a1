"""Run by test_backend_features.py with TRITON_INTERPRET=1: a call does what Triton's record says of a feature."""

import pytest
from support.feature_probes import PROBES, compare

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide|backend '.*' runs in)")


@pytest.mark.parametrize("feature", [n for n, probe in PROBES.items() if "torch" in probe.frameworks])
def test_triton_kernels_do_what_their_record_claims(feature):
    assert compare("triton", "torch", feature, tile=(16, 16)) == ""
