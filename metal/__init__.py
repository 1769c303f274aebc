"""Kernels for Metal and CUDA, with dispatch and self-check. None yet: all operations are stock."""
