"""The console: samples of the deployment's state, what changed between them, what is wrong, and the page."""
