"""Plans a run without hardware and without data.

`measure/`: what is measured, of the model and of this machine; this room: what adds up a plan (`planner` makes a `Plan`
from `cells`, `memory` and `timing`); `search`: what looks for the best of many plans.
"""
