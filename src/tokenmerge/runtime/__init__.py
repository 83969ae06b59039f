"""What both techniques build on: the clock, the timeline (the kind of every step), and sites installed on a model."""
