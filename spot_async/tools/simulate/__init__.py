"""`spot-async simulate`: runs the orchestrator on virtual time with stated rates. It starts and trains nothing."""
