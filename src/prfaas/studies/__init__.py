"""Named studies: what the simulator says about the questions that people ask first."""
