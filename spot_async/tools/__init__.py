"""Commands beside a run. They read files or ask servers, and nothing outside this room but `cli/` imports them."""
