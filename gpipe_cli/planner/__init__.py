"""What a run will need, worked out without hardware and without data: `planner.plan` and `search`."""
