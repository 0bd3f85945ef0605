"""What requests cost, and how many may leave: rate limits, accounts with budgets, scores kept.

Knows no server's dialect: adapters say what a request may take and hand over the reply.
"""
