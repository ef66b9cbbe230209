"""Makes the tables of the paper, and a table of runs, as a page, JSON and a plot."""
