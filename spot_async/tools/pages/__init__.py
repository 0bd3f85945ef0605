"""What the pages of several tools are made of: templates, plots as SVG, scales."""
