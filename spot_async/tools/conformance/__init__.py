"""The contract that every backend passes, as checks that run against a live one (`spot-async conformance`)."""
