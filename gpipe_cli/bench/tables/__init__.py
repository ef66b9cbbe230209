"""Makes the tables of the paper, and a table of runs, as Markdown, JSON and a plot."""
