"""Shared by all tests.

MLX is imported first, so that no test that starts a server in this process can slip an OpenBLAS
in front of it: the bitwise tests are about MLX's own BLAS.
"""

import mlx.core  # noqa: F401
