"""Forecasts before any training whether SPOT can help: values, kept share, expected gain. It trains nothing."""
