"""Limits and counts what requests cost: rate limits, accounts with budgets, and kept scores. It sends no request.

It knows no server's dialect. Adapters say what a request may take, and hand over the reply.
"""
