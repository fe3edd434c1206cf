"""What Grafana and Prometheus are given: dashboards, alert rules, where to scrape; from the list of series."""
