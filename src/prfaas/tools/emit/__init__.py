"""Files that run a deployment under systemd, Docker Compose or Kubernetes, made from the one deployment file."""
