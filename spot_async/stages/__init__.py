"""Runs the requests of a policy in stages, one for each kind of request. It knows no policy and no kind of server."""
