"""The contract of all backends as pytest tests, against the same model in torch (float32). It trains nothing.

`pytest -p spot_async.testing.conformance.plugin --pyargs spot_async.testing.conformance --backend KIND --model DIR`
"""
