"""The tasks and the tiny policy that ship with the package, and the scripts that made them."""

from pathlib import Path

POLICY = Path(__file__).parent / "policy"  # the tiny policy, in Hugging Face's form
