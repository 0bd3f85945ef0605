"""Measures a student on benchmarks: asks for responses, has them judged, and computes figures. It starts no server."""
