"""Trouble on purpose: a proxy, sandboxes and a killer that break what a run stands on, and checks of what is left."""
