"""A test for each judgment: `pytest test_kernels.py`."""

import kernels
import pytest


@pytest.mark.samebits(kernels.rms_norm, op="rms_norm", dtypes=["bf16"])
def test_rms_norm():
    pass
