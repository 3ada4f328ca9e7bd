"""A Modal on this machine, for tests: the real client talks to it, and its sandboxes are real processes.

    with ModalServer() as server:
        os.environ.update(server.settings)
        import modal

`python -m tests.modal_server` runs one in a process of its own. It needs `modal` for the protocol's messages
(`modal_proto`) and bubblewrap for the containers.
"""

from .server import Asked, ModalServer

__all__ = ["Asked", "ModalServer"]
