"""`spot-async conformance`: checks a running backend against the contract of all backends. It trains nothing."""
