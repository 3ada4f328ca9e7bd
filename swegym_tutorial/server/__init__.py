"""A Tinker-compatible training server for this machine: real gradients into real LoRA adapters, real sampling.

`serve` runs it in this process; `process.LocalServer` runs it as a child that ends with its parent. Any release of
the `tinker` SDK from 0.24.1 on talks to it. torch, transformers and peft do the computing.
"""

from .main import serve

__all__ = ["serve"]
