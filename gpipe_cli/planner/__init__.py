"""What a run will need, worked out without hardware and without data: `plan.plan` and `search`."""
