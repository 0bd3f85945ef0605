"""Building blocks of the pages that several tools write: templates, plots as SVG, scales. They read no run."""
