"""The tasks and the tiny policy that ship with the package, and the scripts that made them."""
