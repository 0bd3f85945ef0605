"""Several evaluations beside each other: tables, intervals, curves and what each method computed."""
