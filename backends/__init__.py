"""One backend for each kind of inference server: it translates between the protocols and the server's own API.

A backend is a folder whose `backend.py` has its `Backend` class. `shared/` has what several of them use. The core
finds backends by name and imports none of them, and no backend imports another.

To write one, copy `examples/custom_backend`; `vllm/backend.py` is one for a server that speaks JSON. In a configuration
`backend.kind: module:Class` finds a class as it is. One that ships here also needs its entry point, its package and its
package-dir in `pyproject.toml`, and a row in `docs/servers.md`.
"""
