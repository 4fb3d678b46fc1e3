"""Kernels written in Triton. A module here imports Triton, and is itself imported where its kernels are first run."""
